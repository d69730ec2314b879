"""From a launcher's variables to ranks that run, and what became of them. No torch.

Which rank          rendezvous (variables of a launcher), slurm_env (those of Slurm).
Device, network     device; network.
Ranks of our own    workers (start, watch, end; be a rank or start them), entrypoint (the function
                    by name, and its call), fork_server_client, fork_server and ipc.
Watched ranks       supervisor (one rank of srun), process, failure (which rank failed first).
Run folders         files (atomic writes, lines), lock (one writer at a time).
Slurm jobs          slurm/.
"""
