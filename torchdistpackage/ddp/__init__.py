"""Data parallelism: ranks with equal parameters and different batches average their gradients.

The files in reading order. Below the wrapper no file imports an option.

Reference       reference: DDP and ZeRO-1 in the plainest way; tests compare everything with it.
Wrapper         naive_ddp (NaiveDDP), wrapper_state (names, copies, pickles, changed modules).
One backward    reducer (which backward counts, when a bucket is launched), ready (which gradients
                are final; several reducers in one backward), grad_hooks (on parameters and on what
                a forward returns), output_hook (a backward whose wrapper is gone).
Buckets         param_spec (a parameter, its group and its layout), bucket_plan (which gradients
                share one, and its size), grad_bucket (a bucket's memory), bucket_comm (its
                all-reduce, and the slots of gradients in all buckets).

Options enter at three seams: `ReadyPolicy` (ready), `BucketComm` with its `CommHook`
(bucket_comm) and `BucketPlanner` (bucket_plan). naive_ddp imports options, which makes them, and
hands them to the reducer as `ReducerParts`.

Options         options: turns a user's options into the objects that the reducer takes.
Schedules       scheduled_ready (a pipeline tells which backwards are the last).
Sizes           bucket_tuning: measures the first steps and chooses a plan.
Fewer bytes     comm_hooks (bf16, fp16, PowerSGD), sparse_grads (of sparse embeddings).
Checks          param_sync (initial values, buffers, replicas that differ, unused parameters), join
                (uneven inputs), sync_batch_norm.
More            expert_grads (experts), ema (averages of parameters), auto (NaiveDDP or ZeRO, by
                measurement), weak_hook, sharded (what an optimizer that shards shows to
                others, which import no ZeRO), zero/ (sharded optimizers).
"""
