"""ZeRO: data-parallel ranks shard the optimizer state, the gradients, the parameters.

Read ddp/reference and the reducer one folder up first; this folder uses the same reducer.

Optimizer       optimizer (ZeroOptimizer), guards (is it still the same module?).
Layout          replication (which ranks share a parameter; HSDP), requires_whole (optimizers that
                need whole parameters), shard_bounds (arithmetic on sizes), param_shard (parameters
                side by side, and what each rank owns and steps of them).
One bucket      bucket (what belongs to one), grad_buffer (gradients in), partial_step (a few
                parameters at a time), param_buffer (parameters out, and what a reader of one waits
                for), rows (an embedding that shares its weight with a head).
Stage 3         stage3 (parameters are gathered only where they are used; torch.compile).
Host memory     offload (copies of slices on the device or in host memory).
State           state_dict (an optimizer around another, whose state is saved as the plain one has
                it), state_gather (pieces joined).
ZeRO or DDP     ddp/auto, by measurement.
"""
