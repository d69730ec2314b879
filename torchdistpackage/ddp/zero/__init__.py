"""ZeRO: the ranks that data parallelism joins share the optimizer, the gradients, the parameters.

To read it in order, after the reducer one folder up, which drives it too.

What users hold     optimizer (ZeroOptimizer), on wrapped (an optimizer around another); bf16 (the
                    earlier package's signature), ties (is it still the same module?).
Who owns what       sharing (parameters and groups), whole (which optimizers may see pieces), units
                    and cut (arithmetic on sizes), line (members side by side, and the bounds).
One bucket          bucket (all there is of one), shards and held (what the inner optimizer sees),
                    scattered with incoming and marks (gradients in), stepping (a few parameters at
                    a time), parameters with absent (out again, and who waits for them), rows
                    (lookups in a table that a head shares).
Stage 3             passage (whole only where used), compiled (under torch.compile).
Elsewhere           copies and offload (host memory), on streams and arena; replicas (shards held
                    several times).
State               state (as the plain optimizer has it), on forms and gathered.
ZeRO or all-reduces choose, on measured.
"""
