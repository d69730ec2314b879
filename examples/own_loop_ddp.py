"""Your own loop with NaiveDDP: scikit-learn's handwritten digits, a small network, data parallel.

    python examples/own_loop_ddp.py                                 four ranks on this machine
    torchrun --nproc-per-node 2 examples/own_loop_ddp.py            or as many as torchrun makes

Prints the accuracy on the fifth of the digits that no step has seen.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from torchdistpackage import NaiveDDP, run_or_launch, setup_distributed

BATCH = 64  # over all ranks
EPOCHS = 10


def train() -> float:
    rank, world_size, _, _ = setup_distributed()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)
    held_out = torch.arange(len(labels), device=device) % 5 == 0
    known_images, known_labels = images[~held_out], labels[~held_out]

    # All ranks start from rank 0's weights: NaiveDDP sends them.
    model = NaiveDDP(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(0)  # the same on all ranks
    for _ in range(EPOCHS):
        shuffled = torch.randperm(len(known_labels), generator=order).to(device)
        for batch in shuffled.split(BATCH):
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(model(known_images[mine]), known_labels[mine]).backward()
            optimizer.step()  # the gradients are averages over the ranks already

    with torch.no_grad():
        guesses = model(images[held_out]).argmax(1)
    accuracy = (guesses == labels[held_out]).float().mean().item()
    if rank == 0:
        print(f"{world_size} ranks: accuracy {accuracy:.4f} on {len(guesses)} held-out digits")
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    run_or_launch(train, num_procs=4, preload=["sklearn.datasets"])
