"""ZeRO: data-parallel ranks shard the optimizer state, the gradients, the parameters.

Read ddp/reference and the reducer one folder up first; this folder uses the same reducer. Below the
optimizer no file imports the code of an option; each reads the one frozen value of options.py.

Optimizer       optimizer (ZeroOptimizer), sharded_base (an optimizer around another). What others
                may know of it is ddp/sharded.
Layout          sharing (which ranks share a parameter), shard_bounds (arithmetic on sizes, and
                which optimizers need full parameters), param_shard (parameters side by side, and
                their shards).
Buckets         bucket (the parts of one, and steps of a few at a time), grad_buffer (gradients
                in), param_buffer (parameters out, waits of their readers, and copies of slices).

Options:

Stage 3         stage3 (parameters are gathered only where they are used; torch.compile).
Host memory     offload (copies of slices in host memory).
State           state_dict (saved as by the plain optimizer), state_gather (pieces joined).
ZeRO or DDP     ddp/auto, by measurement.
"""
