"""torch's fully_shard: between its uses a model leaves the device, and comes back as it was.

    python examples/fully_shard_offload.py                         two ranks on this machine
    torchrun --nproc-per-node 4 examples/fully_shard_offload.py    or as many as torchrun makes

So a frozen encoder can rest in host memory while others train. Prints what rank 0 holds.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torchdistpackage import run_or_launch, setup_distributed


def held(model: nn.Module) -> list[Tensor]:
    """The bytes of my part of each parameter, with what fully_shard pads it by."""
    storages = [p.to_local().untyped_storage() for p in model.parameters()]
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages]


def offload(model: nn.Module) -> list[Tensor]:
    rest = [x.to("cpu", copy=True) for x in held(model)]
    for x in held(model):
        x.untyped_storage().resize_(0)  # the parameters stay where they are, without memory
    return [x.pin_memory() if torch.cuda.is_available() else x for x in rest]


def reload(model: nn.Module, rest: list[Tensor]) -> None:
    for x, kept in zip(held(model), rest, strict=True):
        x.untyped_storage().resize_(kept.nbytes)
        x.set_(x.untyped_storage()).copy_(kept, non_blocking=True)


def main() -> None:
    rank, world_size, _, _ = setup_distributed()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).to(device)
    for layer in (*model, model):
        fully_shard(layer)
    x = torch.randn(4, 512, device=device)

    def report(when: str, rest: list[Tensor] = ()) -> None:
        mib = [sum(part.nbytes for part in parts) / 2**20 for parts in (held(model), rest)]
        if rank == 0:
            print(f"{when}: {mib[0]:.2f} MiB on the {device.type}, {mib[1]:.2f} MiB at rest")

    before = model(x)
    report(f"1/{world_size} of 8.02 MiB")
    report("offloaded", rest := offload(model))
    reload(model, rest)
    report(f"reloaded, largest change {(model(x) - before).abs().max():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_or_launch(main, num_procs=2)
