"""Your own loop with tpc and Pipeline: a network cut into stages, fed in microbatches.

    python examples/own_loop_pipeline.py                            four stages on this machine
    torchrun --nproc-per-node 2 examples/own_loop_pipeline.py       or as many as torchrun makes

Prints the last loss beside that of the same network trained whole, in float64.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from torchdistpackage import (
    Pipeline,
    partition_uniform,
    run_or_launch,
    setup_distributed,
    tpc,
)


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(64, 10)).to(device, torch.float64)


def train() -> None:
    setup_distributed()
    tpc.setup_process_groups([("pipe", dist.get_world_size())])
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, device=device), torch.tensor(digits, device=device)

    stage = partition_uniform(network(device))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    pipe = Pipeline(stage, loss=F.cross_entropy, num_microbatches=8)
    for _ in range(20):
        optimizer.zero_grad()
        loss = pipe.step(images, targets=labels)  # the mean over the batch, on every rank
        optimizer.step()

    if tpc.is_first_in_pipeline_group():
        whole = network(device)
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
        for _ in range(20):
            optimizer.zero_grad()
            (expected := F.cross_entropy(whole(images), labels)).backward()
            optimizer.step()
        print(f"{tpc.get_pp_size()} stages: loss {loss:.12f}, in one piece {expected:.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(train, num_procs=4, preload=["sklearn.datasets"])
