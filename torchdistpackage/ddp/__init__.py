"""Data parallelism: ranks with equal parameters and different batches average their gradients.

To read in this order.

What it computes    reference: DDP and ZeRO-1 in the plainest way, which tests hold all else to.

What users hold      naive_ddp (the wrapper NaiveDDP), on wrapper (names, copies, pickles).
One backward         reducer (which backward counts) and what calls it: outputs (hooks on what a
                     forward returns), told (hooks on parameters), turns (several reducers in one
                     backward), steered (a pipeline that knows which is the last); departures (when
                     a bucket leaves).
Where gradients lie  shared (a parameter and its group), buckets (which travel together), packed
                     (slots in buckets), gradients (a bucket's memory), carrier (its all-reduce).
How sizes are found  order (the best packing, on paper), fit (what a run shows, and who decides).
Fewer bytes          compress, power_sgd; rows, embeddings, lookups for tables of which few rows
                     are used.
What stands around   equal (starting values, buffers), replicas (are they still equal?), membership
                     (did the module change?), used (did all ranks use all?), join (uneven inputs),
                     hooks (gone on copies of a module), sync_batch_norm.
The family           moe (experts), ema with owned, partition and plain (averages of parameters),
                     data_parallel (NaiveDDP or ZeRO, by measurement), zero/ (sharded optimizers).
"""
