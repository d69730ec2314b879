"""Everything about a run that is known before a process starts. No torch.

Plan            run_plan (`make_plan`: a configuration and a number of ranks give stages, layouts
                and groups), stage_partition (where the model is cut), memory (bytes on a rank).
                What a model cannot do is refused here, by models/refusals.py: the ranks plan too.
Refusals        refusals (files, your modules, texts, the checkpoint; looked at once, where the run
                is started), resume_check, user_code.
Other ranks     elastic (the same run on another number of ranks), shrink (`tdp comm lint`).
Costs           traffic (bytes of a step), context_plan, expert_plan; estimate (seconds of
                messages, `tdp plan --profile`), step_time (of a step, `tdp plan --time`),
                layout_search (of all layouts, the fastest that fit).
Parity          parity_plan, parity_model, smaller_arguments (what `tdp prove` runs),
                parity_program, certificate (what it writes).
"""
