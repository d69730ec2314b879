"""From a launcher's variables to ranks that run, and what became of them. No torch.

Which rank          rendezvous (variables of a launcher), slurm_env and hostlist (those of Slurm).
Device, network     device, cuda_driver; network.
Ranks of our own    launch (be a rank or start them), workers (start, watch, end), entrypoint (the
                    function by name), fork_server_client, fork_server and ipc, rank.
Watched ranks       supervisor (one rank of srun), signals, failure (which rank failed first).
Run folders         files (whole files, lines), holder and lock (one writer at a time).
Slurm jobs          slurm/.
"""
