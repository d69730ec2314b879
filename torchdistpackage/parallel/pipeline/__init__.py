"""Pipeline parallelism: stages on several ranks, and microbatches that pass through them.

Read in this order.

Reference       reference: GPipe in 40 lines; tests hold Pipeline equal to it.
Public          pipeline (`Pipeline`, for loops of your own).
One step        stages (those of this rank, and how they are called), microbatches (a batch is cut,
                run and joined), losses (means, sums and counts), agreement (input errors before
                anything is sent), grad_sync (the reducers of the stages, and which backward is the
                last), weight_tying (gradients over stages).
Executor        executor (runs one rank's program), program (the schedule as bound functions),
                stage_runner, links (receives and sends between stages).
Backward        split_backward (input and weight gradients) on parallel/deferred_wgrad.
Partition       partition/ (where to cut).
"""
