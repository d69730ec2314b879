"""Two towers in one pipeline: images of digits and their names learn to meet, each stage by a
forward and a backward of your own.

    python examples/two_tower.py                                 three stages on this machine
    torchrun --nproc-per-node 3 examples/two_tower.py

Prints how often a digit that no step has seen is nearest to its own name.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from torchdistpackage import forward_backward, forward_eval, run_or_launch, setup_distributed, tpc

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TOWERS = {
    0: lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)),  # images
    1: lambda: nn.Sequential(nn.EmbeddingBag(123, 64), nn.GELU(), nn.Linear(64, 32)),  # names
    2: lambda: nn.Linear(32, 32, bias=False),  # where both are compared
}


def train() -> None:
    setup_distributed()
    tpc.setup_process_groups([("pipe", 3)])
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    stage = tpc.get_pp_rank()
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)
    names = torch.tensor([list(name.ljust(5).encode()) for name in NAMES], device=device)
    torch.manual_seed(stage)
    tower = TOWERS[stage]().to(device)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=5e-3)

    def forward(given):
        if stage == 0:
            return tower(given)
        if stage == 1:  # what came, then this stage's own input
            image, letters = given
            return image, tower(letters)
        image, name, *same = given
        likeness = F.normalize(tower(image), dim=1) @ F.normalize(name, dim=1).T * 10
        if not same:
            return likeness.argmax(1)
        pairs = (same[0][:, None] == same[0]).float()  # equal digits have equal names
        return F.cross_entropy(likeness, pairs / pairs.sum(1, keepdim=True))

    def backward(output, gradient):
        torch.autograd.backward(output, gradient)
        nn.utils.clip_grad_value_(tower.parameters(), 1.0)

    draw = torch.Generator().manual_seed(0)  # the same on all ranks
    for _ in range(100):
        batch = torch.randint(len(labels), (128,), generator=draw)
        batch = batch[batch % 5 != 0].to(device)  # a fifth is held out
        own = (images[batch], names[labels[batch]], labels[batch])[stage]
        forward_backward(optimizer, forward, backward, own, num_microbatches=2)
        optimizer.step()

    nearest = forward_eval(forward, (images[::5], names, None)[stage])
    told = [(nearest == labels[::5]).float().mean().item() if stage == 2 else None]
    dist.broadcast_object_list(told, src=2)
    if stage == 0:
        print(f"{told[0]:.4f} of {len(labels[::5])} held-out digits are nearest to their name")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(train, num_procs=3, preload=["sklearn.datasets"])
