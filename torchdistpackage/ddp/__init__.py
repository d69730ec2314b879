"""Data parallelism: ranks with equal parameters and different batches average their gradients.

Read in this order.

Reference       reference: DDP and ZeRO-1 in the plainest way; tests hold everything else equal.
Wrapper         naive_ddp (NaiveDDP), wrapper_state (names, copies, pickles, changed modules).
One backward    reducer (which backward counts); it is called by grad_hooks (on parameters and on
                what a forward returns) and asks ready when buckets may be launched (several
                reducers in one backward; a pipeline that knows the last microbatch).
Buckets         param_spec (a parameter, its group and its layout), bucket_plan (which gradients
                share one, and its size), bucket_tuning (measures the first steps and chooses a
                plan), grad_bucket (a bucket's memory), bucket_comm (its all-reduce, and the slots
                of gradients in all buckets).
Fewer bytes     comm_hooks, power_sgd; sparse_grads and embedding_rows (only rows that were used).
Checks          param_sync (initial values, buffers, replicas that differ, unused parameters), join
                (uneven inputs), weak_hook (hooks that copies do not have), sync_batch_norm.
More            expert_grads (experts), ema (averages of parameters), auto (NaiveDDP or ZeRO, by
                measurement), zero/ (sharded optimizers).
"""
