"""Training runs: from a YAML file to ranks that train, each step a function of what came before.

    file -> configuration -> plan -> refusals -> folder -> ranks

Configuration   config/load.py reads the file into a RunConfig, which keeps all rules across keys.
Plan            plan (make_plan: a configuration and a number of ranks give stages, layouts and
                groups), stage_partition (where the model is cut), memory (bytes on a rank). What a
                model cannot do is refused here, by models/refusals.py: the ranks plan too.
Refusals        refusals (files, your modules, texts, the checkpoint; looked at once, where the run
                is started), resume_check, texts, user_code.
Folder          run_folder (its lock, and how it is made).
Ranks           job (starts them, or is one that a launcher started, and says why a start may not
                be), submitit_task. job names worker in a string, since only a rank loads torch.

In a rank, torch is there and every file takes plain arguments, but for build and worker:

Objects         worker (a rank from its environment to its end), build (plan to objects),
                staged_model.
Steps           loop (which calls a Callback between steps), step, update, step_stats, votes,
                callbacks, profiler, trace, nonfinite.
Data            data, data_build, blend, corpus, documents, token_cache, split, packing, bins, chat,
                mapped.
State           train_state, stop, log, finish, export, recompute.
Services        trackers/ (log.to: TensorBoard, Weights & Biases, MLflow).
Beside a run    evaluation, generate, prompts, inference with inference_request (tdp eval and tdp
                generate); shrink, dry_run (tdp comm lint); traffic (bytes of a step in tdp
                plan); estimate (times of them, tdp plan --profile);
                trace_file (tdp profile).
"""
