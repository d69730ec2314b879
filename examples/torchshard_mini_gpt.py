"""torchshard's mini GPT and its flags, on the bytes of Python's standard library.

    python examples/torchshard_mini_gpt.py --enable-model-parallel --enable-one-data-group
    torchrun --nproc-per-node 4 examples/torchshard_mini_gpt.py --enable-zero-optim

With model parallelism heads, hidden features and the vocabulary are split; ranks have samples of
their own, which are gathered, or the same ones (one data group). Prints the loss on unseen bytes.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchdistpackage.compat.torchshard as ts
from torchdistpackage import ZeroOptimizer, run_or_launch, setup_distributed

VOCAB, LENGTH = 256, 32


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, col: int | None, row: int | None):
        super().__init__()
        self.head_width, linear = width // num_heads, ts.nn.ParallelLinear
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.kqv, self.proj = linear(width, 3 * width, dim=col), linear(width, width, dim=row)
        up, down = linear(width, 4 * width, dim=col), linear(4 * width, width, dim=row)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.kqv(self.ln1(x)).view(*x.shape[:2], -1, 3 * self.head_width)  # my heads
        k, q, v = (t.transpose(1, 2) for t in ts.slice(heads, 3, dim=-1, contiguous=True))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(*x.shape[:2], -1))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, args: argparse.Namespace):
        super().__init__()
        width, (col, row) = args.n_embd, (1, 0) if args.enable_model_parallel else (None, None)
        self.tok_emb = ts.nn.ParallelEmbedding(VOCAB, width, dim=row)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        blocks = [Block(width, args.n_head, col, row) for _ in range(args.n_layer)]
        self.blocks, self.ln_f = nn.Sequential(*blocks), nn.LayerNorm(width)
        self.head = ts.nn.ParallelLinear(width, VOCAB, bias=False, dim=col)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.ln_f(self.blocks(self.tok_emb(ids) + self.pos_emb)))
        return logits.view(-1, logits.size(-1))


def train(args: argparse.Namespace) -> None:
    rank, world_size, *_ = setup_distributed()
    ts.distributed.init_process_group(group_size=world_size)
    torch.manual_seed(0)  # split layers start as slices of whole ones
    model, criterion = GPT(args), ts.nn.ParallelCrossEntropyLoss()
    ts.register_ddp_parameters_to_ignore(model)
    model = DistributedDataParallel(model)
    alike = [p for p in model.parameters() if ts.get_parallel_dim(p) is None]
    parts = [p for p in model.parameters() if ts.get_parallel_dim(p) is not None]
    optimizers = [torch.optim.AdamW(some, args.lr) for some in (alike, parts) if some]
    if args.enable_zero_optim:  # of what all ranks hold alike, each keeps a part of the state
        optimizers[0] = ZeroOptimizer(optimizers[0], group=dist.group.WORLD)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    draws = torch.Generator().manual_seed(0)  # the same on all ranks

    def loss_of(part: Tensor, num: int) -> Tensor:
        starts = torch.randint(len(part) - LENGTH, (num,), generator=draws)
        batch = torch.stack([part[i : i + LENGTH + 1] for i in starts.tolist()]).long()
        if not args.enable_one_data_group:
            batch = batch[rank::world_size]
            if args.enable_model_parallel:
                batch = ts.distributed.gather(batch, dim=0)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.enable_amp_mode):
            return criterion(model(batch[:, :-1]), batch[:, 1:].flatten())

    for _ in range(args.steps):
        loss_of(text[: -len(text) // 10], args.batch_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    loss = loss_of(text[-len(text) // 10 :], 240).detach()
    dist.all_reduce(loss)  # with model parallelism the same on all ranks
    if rank == 0:
        print(f"{world_size} ranks: {loss.item() / world_size:.5f} nats a byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model-parallel", "one-data-group", "amp-mode", "zero-optim"):
        parser.add_argument(f"--enable-{name}", action="store_true")
    for name, value in {"n-layer": 2, "n-head": 4, "n-embd": 32, "batch-size": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-2)
    run_or_launch(train, parser.parse_args(), num_procs=2)
