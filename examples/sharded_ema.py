"""Averaged weights in your own loop: each rank keeps a part, all are tried out, the first saves.

    python examples/sharded_ema.py                                 four ranks on this machine
    torchrun --nproc-per-node 2 examples/sharded_ema.py            or as many as torchrun makes

Prints the accuracy on held-out digits with either, and what the averages cost a rank.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from torchdistpackage import NaiveDDP, ShardedEMA, run_or_launch, setup_distributed

STEPS, BATCH, DECAY = 300, 32, 0.98


def train() -> None:
    rank, world_size, *_ = setup_distributed()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)
    held_out = torch.arange(len(labels), device=device) % 5 == 0
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = NaiveDDP(nn.Sequential(*layers, nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = ShardedEMA(model)
    order = torch.Generator().manual_seed(0)  # the same on all ranks
    for _ in range(STEPS):
        batch = torch.randint(len(labels), (BATCH,), generator=order)[rank::world_size]
        mine = batch[batch % 5 != 0].to(device)  # a fifth is held out
        optimizer.zero_grad()
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        ema.update(model, decay=DECAY)

    @torch.no_grad()
    def accuracy() -> float:
        return (model(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()

    last = accuracy()
    with ema.applied_to(model):  # on all ranks
        averaged = accuracy()
    mine, whole = ema.state_dict_shard(), ema.state_dict_cpu()  # all of it is on the first rank
    if rank == 0:
        torch.save(whole, "averages.pt")  # loads into the plain model
        print(f"accuracy {last:.4f} with the last weights, {averaged:.4f} with their averages")
        sizes = [sum(x.nbytes for x in held.values()) for held in (mine, whole)]
        print(f"rank 0 keeps {sizes[0]} of {sizes[1]} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(train, num_procs=4, preload=["sklearn.datasets"])
