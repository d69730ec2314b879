"""Ranks as threads of one process, which talk in memory.

run          `run_ranks`: one function on every rank of a layout.
threads      whose turn it is, and what torch and Python have once for a process.
transport    the back end of torch.distributed that these ranks have.
own_backend  what each call of torch asks of a back end of our own; harness/late has another one.
matcher      the board on which the calls of all ranks meet. No torch.
findings     why no rank can move, or which ranks disagree, in sentences. No torch.
"""
