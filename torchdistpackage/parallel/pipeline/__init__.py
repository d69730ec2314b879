"""Pipeline parallelism: stages on several ranks, and micro-batches that pass through them.

The files in reading order.

Reference       reference: GPipe in 40 lines; tests compare Pipeline with it.
Public          pipeline (`Pipeline`, for a training loop of your own).
One step        stages (this rank's stages, and how they are called), microbatches (cut a batch,
                run it and join the results), losses (means, sums and counts), agreement (input
                errors before anything is sent), grad_sync (the reducers of the stages, and which
                backward is the last), weight_tying (weights that several stages hold).
Executor        executor (runs one rank's program), program (the schedule as bound functions),
                stage_runner, links (receives and sends between stages).
Backward        split_backward (input and weight gradients) on parallel/deferred_wgrad.
Partition       partition/ (cuts a model into stages).
"""
