"""torchshard's image classifier and its flags, on scikit-learn's digits.

    python examples/torchshard_classifier.py --enable-model-parallel --model-parallel-dim -1
    torchrun --nproc-per-node 4 examples/torchshard_classifier.py --enable-zero-optim

Prints accuracy and loss on digits that no step has seen, and writes checkpoint.pt, which --resume
and --evaluate read under any other flags.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchdistpackage.compat.torchshard as ts
from torchdistpackage import ZeroOptimizer, run_or_launch, setup_distributed


class Classifier(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        self.fc = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1)
        if isinstance(self.fc, ts.nn.ParallelLinear):
            if x.requires_grad:  # DDP takes the mean of what are shares of one mean already
                x.register_hook(lambda grad: grad * dist.get_world_size())
            x = ts.distributed.gather(x, dim=0)
        return self.fc(x)


def train(args: argparse.Namespace) -> None:
    rank, world_size, *_ = setup_distributed()
    split, criterion = args.enable_model_parallel, ts.nn.ParallelCrossEntropyLoss()
    torch.manual_seed(args.seed)
    model = Classifier(args.num_classes)
    ts.distributed.init_process_group(group_size=world_size)
    if split:
        ts.nn.ParallelLinear.convert_parallel_linear(model, dim=args.model_parallel_dim)
    model = DistributedDataParallel(model)
    alike = [p for p in model.parameters() if ts.get_parallel_dim(p) is None]
    parts = [p for p in model.parameters() if ts.get_parallel_dim(p) is not None]
    how = {"momentum": args.momentum, "weight_decay": args.weight_decay}
    optimizers = [torch.optim.SGD(some, args.lr, **how) for some in (alike, parts) if some]
    if args.enable_zero_optim:  # of what all ranks hold alike, each keeps a part of the state
        optimizers[0] = ZeroOptimizer(optimizers[0], group=dist.group.WORLD)
    if args.resume:
        state = torch.load(args.resume, weights_only=True)
        model.load_state_dict(ts.relocate_state_dict(model, state))

    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16).float().view(-1, 1, 8, 8), torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))

    def outputs(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mine = batch[: len(batch) // world_size * world_size][rank::world_size]
        target = ts.distributed.gather(labels[mine], dim=0) if split else labels[mine]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.enable_amp_mode):
            output = model(images[mine])
            return output, target, criterion(output, target)

    for epoch in range(0 if args.evaluate else args.epochs):
        for step, batch in enumerate(order[360:].split(args.batch_size), 1):
            _, _, loss = outputs(batch)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0 and args.print_freq and step % args.print_freq == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.4f} on rank 0")
    output, target, loss = outputs(order[:360])
    if ts.get_parallel_dim(output) in (1, -1):
        output = ts.distributed.gather(output, dim=-1)
    found = torch.stack([(output.argmax(1) == target).float().mean(), loss.detach()])
    dist.all_reduce(found)  # with a split head the same on all ranks
    state = ts.collect_state_dict(model, model.state_dict())  # on all ranks
    if rank == 0:
        torch.save(state, "checkpoint.pt")
        print("{} ranks: accuracy {:.4f}, loss {:.6f}".format(world_size, *found / world_size))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("enable-model-parallel", "enable-amp-mode", "enable-zero-optim", "evaluate"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--model-parallel-dim", type=int)
    values = {"num-classes": 10, "epochs": 3, "batch-size": 64, "lr": 0.05, "resume": ""}
    values |= {"momentum": 0.9, "weight-decay": 1e-4, "seed": 0, "print-freq": 0}
    for name, value in values.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    run_or_launch(train, parser.parse_args(), num_procs=2, preload=["sklearn.datasets"])
