"""A transformer block cut over ranks beside the same block whole, on the text of Python itself.

    python examples/tensor_parallel_block.py                        four ranks on this machine
    torchrun --nproc-per-node 2 examples/tensor_parallel_block.py   or as many as torchrun makes

Prints how far outputs and gradients are apart at most, in float64.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage import run_or_launch, setup_distributed, tpc
from torchdistpackage.parallel import Block, ParallelBlock

BATCH, LENGTH, DIM, HEADS = 4, 128, 64, 8


def compare() -> float:
    rank, world_size, _, _ = setup_distributed()
    tpc.setup_process_groups([("tensor", world_size)])
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    text = Path(argparse.__file__).read_bytes()[: BATCH * LENGTH]
    ids = torch.tensor(list(text), device=device).view(BATCH, LENGTH)
    torch.manual_seed(0)  # the same characters become the same vectors on all ranks
    vectors = nn.Embedding(256, DIM, dtype=torch.float64, device=device)
    whole = Block(DIM, num_heads=HEADS).to(device, torch.float64)
    block = ParallelBlock(DIM, num_heads=HEADS).to(device, torch.float64)
    block.init_from_full(whole)  # each rank takes its heads and its columns

    results = []
    for module in (whole, block):
        x = vectors(ids).detach().requires_grad_()
        y = module(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    (y, grad), (y_cut, grad_cut) = results
    difference = max((y - y_cut).abs().max().item(), (grad - grad_cut).abs().max().item())
    if rank == 0:
        sizes = [sum(p.numel() for p in module.parameters()) for module in (whole, block)]
        print(f"{world_size} ranks: {sizes[1]} of {sizes[0]} weights on each")
        print(f"largest difference {difference:.1e} where values reach {grad.abs().max():.0f}")
    dist.destroy_process_group()
    return difference


if __name__ == "__main__":
    run_or_launch(compare, num_procs=4)
