"""Start ranks, watch them, and report how they ended. No torch.

Ranks of our own    workers (start, watch, end; be a rank or start them), entrypoint (the function
                    by name, and its call), fork_server_client, fork_server and ipc.
Watched ranks       supervisor (one rank of srun), process.
Run folders         run_folder (where it is, how it is made), lock (one writer at a time),
                    run_rows, run_events.
Slurm jobs          slurm/.
"""
