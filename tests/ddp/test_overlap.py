"""Buckets leave while the backward runs, each once, whatever is around the layers: R22."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ddp.one_process import DIM
from torchdistpackage.ddp.naive_ddp import NaiveDDP


def buckets_leave_early() -> None:
    """From the second step on the first bucket leaves before the last gradient is there."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    ddp = NaiveDDP(model, bucket_cap_mb=0.0002)
    events: list[str] = []
    ddp.reducer.on_launch = lambda b: events.append(f"bucket {b}")
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: events.append(f"grad {i}"))
    for _ in range(2):
        events.clear()
        ddp.zero_grad()
        ddp(torch.ones(2, DIM)).sum().backward()
    assert events.index("bucket 0") < events.index("grad 0")
    assert [e for e in events if e.startswith("bucket")] == [
        f"bucket {b}" for b in range(ddp.reducer.num_buckets)
    ]


def test_buckets_leave_while_the_backward_runs(ranks):
    ranks(2).run(buckets_leave_early)


class Blocks(nn.Module):
    """Three blocks, one shared by two places, under what `kind` says, and a head."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(DIM, 1)
        if "compiled" in kind:
            for block in self.blocks:
                block.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        places = [0, 1, 2, 1] if "shared" in self.kind else [0, 1, 2]
        for i in places:
            if "reentrant" in self.kind:
                x = checkpoint(self.blocks[i], x, use_reentrant="non-reentrant" not in self.kind)
            else:
                x = self.blocks[i](x)
        return self.head(x)


KINDS = [
    *("plain", "reentrant", "non-reentrant", "shared", "shared, reentrant"),
    *("shared, non-reentrant", "compiled", "set_to_none", "zeroed in place"),
]


def leaves_early_and_once(kind: str) -> None:
    model = Blocks(kind)
    ddp = NaiveDDP(model, bucket_cap_mb=0.0001)
    launched: list[int] = []
    gradients: list[str] = []
    first = 0
    ddp.reducer.on_launch = lambda b: (launched.append(b), gradients.append(f"bucket {b}"))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: gradients.append(name))
    for _ in range(4):
        launched.clear(), gradients.clear()
        ddp.zero_grad(set_to_none=kind != "zeroed in place")
        x = torch.ones(2, DIM, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch on compiled parts under a hook
            ddp(x).sum().backward()
        assert sorted(launched) == list(range(ddp.reducer.num_buckets)), "each leaves once"
        first = gradients.index(f"bucket {launched[0]}")
    last = max(i for i, event in enumerate(gradients) if not event.startswith("bucket"))
    assert first < last, gradients


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_bucket_leaves_before_the_last_gradient_and_each_leaves_once(ranks, kind):
    ranks(2).run(leaves_early_and_once, kind)
