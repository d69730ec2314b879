"""A process's knowledge of where it was started, and the report of its failure. No torch.

rendezvous  its rank, and where all ranks meet, from a launcher's variables.
slurm_env   Slurm's variables, which rendezvous and device read.
device      which of the visible GPUs is this rank's, and whether all ranks agree.
network     which network interface the ranks talk over.
failure     the report that a failed rank leaves, and which rank of several failed first.
"""
