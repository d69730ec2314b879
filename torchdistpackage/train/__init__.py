"""Training runs: from a YAML file to ranks that train.

    file -> configuration -> plan -> refusals -> folder -> ranks

Configuration   config/load.py reads the file into a RunConfig, which keeps all rules across keys.
Plan            plan/run_plan.py: stages, layouts and groups, without torch.
Refusals        plan/refusals.py.
Folder          launch/run_folder.py (its lock, and how it is made).
Ranks           job (starts them, or is one that a launcher started, and says why a start may not
                be), submitit_task. job names worker in a string, since only a rank loads torch.

In a rank, torch is there and every file takes plain arguments, but for build and worker:

Objects         worker (a rank from its environment to its end), build (plan to objects),
                data_build (the same of the data, see data/), staged_model.
Steps           loop (which calls a Callback between steps), step, update, step_stats, votes,
                callbacks, replica_check, profiler, trace, nonfinite.
State           train_state, stop, log, finish, export, recompute.
Services        trackers/ (log.to: TensorBoard, Weights & Biases, MLflow).
Beside a run    evaluation, generate, inference with inference_request (tdp eval and tdp
                generate); dry_run (tdp comm lint); parity with parity_steps (tdp prove);
                trace_file (tdp profile).
"""
