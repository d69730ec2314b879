"""What the parts train: a GPT by size, or `tdp train`'s own trainer, in this process at world 1."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.here import Here
from torchdistpackage.config.load import load
from torchdistpackage.data.source import DataSource
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.train.build import build
from torchdistpackage.train.step import Trainer

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"124M": (12, 768, 12), "350M": (24, 1024, 16)}
"""Layers, width and heads of GPT-2 small and medium."""
WIDE = 3, 4096, 32
"""Products as large as those of a model of 7B; four of these fit into 80 GB, with their AdamW."""
VOCAB, SEQ_LEN, BATCH = 50304, 1024, 8
TINY, TINY_VOCAB, TINY_SEQ_LEN, TINY_BATCH = (2, 32, 2), 256, 16, 4


def sizes(here: Here) -> Sequence[str]:
    return ["tiny"] if here.small else [*SIZES]


def numbers(name: str) -> tuple[int, int, int, int, int, int]:
    """Layers, width, heads, vocabulary, tokens of a sample, samples."""
    if name == "tiny":
        return (*TINY, TINY_VOCAB, TINY_SEQ_LEN, TINY_BATCH)
    return (*(WIDE if name == "wide" else SIZES[name]), VOCAB, SEQ_LEN, BATCH)


def gpt(here: Here, name: str, dtype: torch.dtype | None = None) -> GPT:
    """The same weights each time. Needs tpc."""
    layers, dim, heads, vocab, seq_len, _ = numbers(name)
    torch.manual_seed(0)
    shape = GPTShape(layers=layers, dim=dim, heads=heads, vocab=vocab, seq_len=seq_len)
    return GPT(shape, dtype=dtype, device=here.device)


def batch(here: Here, name: str) -> tuple[Tensor, Tensor]:
    *_, vocab, seq_len, samples = numbers(name)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (samples, seq_len + 1), generator=draw).to(here.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(here: Here, model: torch.nn.Module, own: GPT, data: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over the tokens, in bf16. model: `own`, or what wraps it."""
    with torch.autocast(here.device.type, dtype=torch.bfloat16):
        total, count = own.loss(model(data[0]), data[1])
    return total / count


def adamw(parameters: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def overrides(name: str) -> list[str]:
    """Of a config, for the GPT of this size on one rank, its step alone."""
    layers, dim, heads, vocab, seq_len, samples = numbers(name)
    model = {"layers": layers, "dim": dim, "heads": heads, "vocab": vocab, "dropout": 0.0}
    return [
        *(f"model.{key}={value}" for key, value in model.items()),
        f"data.seq_len={seq_len}",
        f"data.global_batch={samples}",
        *ONE_RANK,
    ]


ONE_RANK = [
    "parallel.data=1",
    "parallel.pipe=1",
    "parallel.tensor=1",
    "parallel.sequence_parallel=false",
    "pipeline.microbatches=1",
    "train.accumulate=1",
    "train.straggler_every=0",
]


def trainer(here: Here, changes: Sequence[str], data: DataSource | None = None) -> Trainer:
    """What `tdp train` would train with. Needs the default group; sets up tpc."""
    assert detect({}).world_size == 1
    return build(plan_of(changes), 0, here.device, data)


def plan_of(changes: Sequence[str]) -> Plan:
    """Of the tiny GPT's configuration with these changes, at world 1."""
    return make_plan(load(str(CONFIGS / "gpt_tiny.yaml"), [*changes], 1), 1)


def steady(train: Trainer) -> Callable[[], object]:
    """A step as the loop has it: issued, then the numbers of the one before are read."""
    pending, step = [train.train_step(1, measure=False)], [1]

    def go() -> object:
        step[0] += 1
        issued = train.train_step(step[0], measure=False)
        result = pending.pop().wait()
        pending.append(issued)
        return result

    return go
