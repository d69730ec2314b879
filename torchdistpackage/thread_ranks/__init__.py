"""Ranks as threads of one process, which talk in memory.

run          `run_ranks`: one function on every rank of a layout.
threads      turns between threads, and the per-process state that each rank gets for itself.
transport    the back end of torch.distributed through which these ranks communicate.
own_backend  the interface of our own back ends; harness/late has the other one.
matcher      the board on which the calls of all ranks meet. No torch.
findings     why no rank can go on, or which ranks disagree, in sentences. No torch.
alone        one rank of a layout without the others.
"""
