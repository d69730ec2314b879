"""Jobs of Slurm: made, submitted, watched, requeued and read from their run folders. No torch.

The job             job (a configuration as a batch job; sweeps), snapshot (its code), script (its
                    text).
Submission          submit, or by_submitit; jobs (look, cancel, submit again).
Slurm               query (commands, states of jobs), queue (when nodes could start), switches.
Run folder          run_dir (submissions, starts), runs (starts, state, progress, logs).
The end of a job    failure_report (which rank failed first), node_blocklist, requeue (whether it
                    comes back), monitor (whether it is submitted again).
"""
