"""The peer of the fault benchmark: a training script as people write it for torchrun.

DDP over gloo, a checkpoint every so many steps under a temporary name that is then renamed, resume
from the newest. SIGUSR2 and SIGTERM are handled: all ranks agree on a step, rank 0 saves.
Nothing in here is from this package.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from faults_data import Tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class SmallGPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, vocab: int, seq_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.zeros(seq_len, dim))
        block = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        mask = nn.Transformer.generate_square_subsequent_mask(seq_len)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        x = self.norm(self.blocks(x, mask=self.mask, is_causal=True))
        return x @ self.embed.weight.T


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    for name in (
        "layers",
        "dim",
        "heads",
        "vocab",
        "seq-len",
        "global-batch",
        "steps",
        "save-every",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--broken", type=int, default=-1)
    parser.add_argument("--broken-step", type=int, default=-1)
    return parser.parse_args()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.rename(path)
    print(f"saved {path}", flush=True)


def main() -> None:
    args = parse()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = DistributedDataParallel(
        SmallGPT(args.layers, args.dim, args.heads, args.vocab, args.seq_len)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    note = str(args.folder / "note")
    data = Tokens(args.seq_len, args.vocab, args.broken, args.broken_step, note)

    begin = 0
    if found := sorted(args.folder.glob("step_*.pt")):
        state = torch.load(found[-1], weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    metrics = None
    if rank == 0:
        print(f"start at step {begin}", flush=True)
        starts = len(list(args.folder.glob("metrics.*.jsonl")))
        metrics = (args.folder / f"metrics.{starts:03}.jsonl").open("w")
        metrics.write(json.dumps({"step": begin}) + "\n")
        metrics.flush()

    # Only now: torchrun's restarts rely on SIGTERM to end a worker that waits for its peers.
    told: list[int] = []
    for signum in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: told.append(signum))

    for step in range(begin + 1, args.steps + 1):
        began = time.time()
        x, y = data.batch("train", 1234, step, rank, world_size, args.global_batch // world_size)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stop = torch.tensor(float(bool(told)))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if metrics:
            row = {"step": step, "loss": loss.item(), "step_s": time.time() - began}
            metrics.write(json.dumps(row) + "\n")
            metrics.flush()
        if rank == 0 and (stop or step % args.save_every == 0):
            save(args.folder / f"step_{step:06}.pt", model.module, optimizer, step)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if stop:
            print(f"rank {rank} on {os.uname().nodename}: told to stop after {step}", flush=True)
            break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
