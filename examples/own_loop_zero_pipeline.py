"""Your own loop with Pipeline and ZeroOptimizer: replicas of two stages, checked by one process.

    python examples/own_loop_zero_pipeline.py                          data 2 x pipe 2, here
    torchrun --nproc-per-node 4 examples/own_loop_zero_pipeline.py     or as torchrun makes them

Prints the largest difference of a gradient, and of a weight after training, from those of the same
network trained whole, in float64.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from torchdistpackage import (
    Pipeline,
    ZeroOptimizer,
    partition_uniform,
    run_or_launch,
    setup_distributed,
    tpc,
)

STEPS = 20


def network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(64, 10)).to(device, torch.float64)


def train() -> None:
    setup_distributed()
    tpc.setup_process_groups([("data", dist.get_world_size() // 2), ("pipe", 2)])
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:1600] / 16, device=device)
    labels = torch.tensor(digits[:1600], device=device)
    # equally many samples on each replica: gradients are averaged over the replicas
    own_images = images.chunk(tpc.get_dp_size())[tpc.get_dp_rank()]
    own_labels = labels.chunk(tpc.get_dp_size())[tpc.get_dp_rank()]

    stage = partition_uniform(network(device))
    optimizer = ZeroOptimizer(torch.optim.SGD(stage.parameters(), lr=0.5), stage, stage=1)
    # reducer: gradients are reduced in the backward of the last microbatch
    pipe = Pipeline(stage, loss=F.cross_entropy, num_microbatches=8, reducer=optimizer)

    whole = network(device)
    peer_of = dict(zip(stage.parameters(), partition_uniform(whole).parameters(), strict=True))
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    errors = torch.zeros(2, dtype=torch.float64, device=device)
    for _ in range(STEPS):
        pipe.step(own_images, targets=own_labels)
        F.cross_entropy(whole(images), labels).backward()
        optimizer.reducer.finish()  # on all ranks: the sums have arrived
        for shard in optimizer.shards:  # each is elements start to stop of one parameter
            if shard.start < shard.stop:
                expected = peer_of[shard.parameter].grad.flatten()[shard.start : shard.stop]
                error = (shard.tensor.grad.flatten() - expected).abs().max()
                errors[0] = torch.maximum(errors[0], error)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()

    optimizer.finish()  # the last gather
    for mine, peer in peer_of.items():
        errors[1] = torch.maximum(errors[1], (mine - peer).detach().abs().max())
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        gradient, weight = errors.tolist()
        print(f"data {tpc.get_dp_size()} x pipe 2: gradients {gradient:.1e}, weights {weight:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(train, num_procs=4, preload=["sklearn.datasets"])
