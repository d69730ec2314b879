"""ZeRO: data-parallel ranks shard the optimizer state, the gradients, the parameters.

Read ddp/reference and the reducer one folder up first; this folder uses the same reducer. The
mechanism; below the optimizer no file imports what an option asks for, but each reads the one
frozen value of options.py:

Optimizer       optimizer (ZeroOptimizer), sharded_base (an optimizer around another). What others
                may know of it is ddp/sharded.
Layout          sharing (which ranks share a parameter), shard_bounds (arithmetic on
                sizes, and which optimizers need whole parameters), param_shard (parameters side by
                side, and the shards that are cut of them).
Buckets         bucket (what belongs to one, and steps of a few at a time), grad_buffer (gradients
                in), param_buffer (parameters out, what a reader of one waits for, and where copies
                of slices are).

What options ask for:

Stage 3         stage3 (parameters are gathered only where they are used; torch.compile).
Host memory     offload (copies of slices in host memory).
State           state_dict (saved as the plain optimizer has it), state_gather (pieces joined).
ZeRO or DDP     ddp/auto, by measurement.
"""
