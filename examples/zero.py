"""Your own loop with ZeroOptimizer: handwritten digits, each rank keeps a part of AdamW's state.

    python examples/zero.py                                 four ranks on this machine
    torchrun --nproc-per-node 2 examples/zero.py            or as many as torchrun makes

Accumulates, clips, follows a schedule, and loads what it saves into plain AdamW.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from torchdistpackage import ZeroOptimizer, clip_grad_norm_, run_or_launch, setup_distributed

BATCH, STEPS = 64, 200  # a batch is over all ranks, and comes in two halves


def train() -> None:
    rank, world_size, _, _ = setup_distributed()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)
    held_out = torch.arange(len(labels), device=device) % 5 == 0
    known_images, known_labels = images[~held_out], labels[~held_out]

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = ZeroOptimizer(inner, model, stage=2)  # the model stays as it is
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    draw = torch.Generator().manual_seed(0)  # the same on all ranks
    for _ in range(STEPS):
        batch = torch.randint(len(known_labels), (BATCH,), generator=draw).to(device)
        for half in batch[rank::world_size].chunk(2):
            (F.cross_entropy(model(known_images[half]), known_labels[half]) / 2).backward()
        clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    here = sum(x.numel() for s in optimizer.state.values() for x in s.values() if x.dim())
    state = optimizer.state_dict(to=0, cpu=True)  # whole, on rank 0 alone
    guesses = model(images[held_out]).argmax(1)  # waits for the last gather by itself
    if rank == 0:
        torch.optim.AdamW(model.parameters()).load_state_dict(state)  # no sharding any more
        whole = sum(x.numel() for s in state["state"].values() for x in s.values() if x.dim())
        accuracy = (guesses == labels[held_out]).float().mean().item()
        print(f"{world_size} ranks: accuracy {accuracy:.4f}, {here} of {whole} numbers of state")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(train, num_procs=4, preload=["sklearn.datasets"])
