"""A mixture of experts in your own loop, shared by ranks, on the text of Python itself.

    python examples/moe_own_loop.py                        four ranks on this machine
    torchrun --nproc-per-node 4 examples/moe_own_loop.py   or as many as torchrun makes

Each pair of ranks shares the eight experts. Prints the loss, how much busier the busiest expert is
than the mean, and where the experts' weights are.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchdistpackage import NaiveDDP, clip_grad_norm_, run_or_launch, setup_distributed, tpc
from torchdistpackage.parallel import MoELayer, balance_experts

STEPS, LENGTH, BATCH, DIM = 60, 32, 8, 32


class NextByte(nn.Module):
    """The next byte from the last two: an embedding, a mixture of experts, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, DIM)
        self.before = nn.Embedding(256, DIM)
        self.experts = MoELayer(DIM, 64, num_experts=8, top_k=2, gated=True, aux_loss=0.02)
        self.head = nn.Linear(DIM, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (S + 1, B) -> logits (S, B, 256)."""
        x = self.bytes(ids[1:]) + self.before(ids[:-1])
        return self.head(x + self.experts(x))


def train() -> tuple[float, float]:
    rank, world_size, _, _ = setup_distributed()
    tpc.setup_process_groups([("data", world_size)])
    tpc.build_moe_groups(moe_ep_size=2 if world_size % 2 == 0 else 1)
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)
    torch.manual_seed(0)
    model = NextByte().to(device)
    ddp = NaiveDDP(model)  # knows from the layouts which gradients are of experts
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(rank)  # every rank trains on passages of its own
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text) - LENGTH - 2, (BATCH,), generator=draw)
        ids = torch.stack([text[i : i + LENGTH + 2] for i in starts], 1)
        logits = ddp(ids[:-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[2:].flatten())
        (loss + model.experts.aux_loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        load = balance_experts(model)["experts.router"]
        if rank == 0 and step % 20 == 0:
            print(f"step {step}  loss {loss.item():.3f}  experts {load.imbalance:.2f}x")

    if rank == 0:
        here = [n for n in model.state_dict() if "experts.experts" in n and "up" in n]
        print(f"{world_size} ranks, {len(here)} of 8 experts on each")
    dist.destroy_process_group()
    return loss.item(), load.imbalance


if __name__ == "__main__":
    run_or_launch(train, num_procs=4)
