"""A net with a bit of everything, its batches, and a loop that notes the gradients of each step."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DIM, PER_RANK, STEPS = 6, 3, 3
Forward = Callable[[nn.Module, Tensor], object]


class Net(nn.Module):
    """Two blocks, one of them used twice, a frozen layer, a norm with buffers, a spare layer."""

    def __init__(self, mode: str = "plain"):
        super().__init__()
        self.mode = mode
        self.first = nn.Linear(DIM, DIM)
        self.shared = nn.Linear(DIM, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.spare = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, DIM)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(self.frozen(x)))

    def two_checkpoints(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            # the outer one's first pass has no gradients, as torch remarks
            warnings.simplefilter("ignore")
            x = checkpoint(self.block, x, use_reentrant=True)
            return checkpoint(self.block, x, use_reentrant=True)

    def forward(self, x: Tensor):
        x = torch.tanh(self.first(x))
        if self.mode in ("reentrant", "non-reentrant"):
            kind = self.mode == "reentrant"
            x = checkpoint(self.block, x, use_reentrant=kind)
            x = checkpoint(self.block, x, use_reentrant=kind)
        elif self.mode == "nested":
            x = checkpoint(self.two_checkpoints, x, use_reentrant=True)
        else:
            x = self.block(self.block(x))
        x = self.shared(x)
        out = self.last(x)
        if self.mode == "two outputs":
            return {"out": out, "aux": [x * 2, "a label"]}
        return out


def loss_of(out: object) -> Tensor:
    if isinstance(out, dict):
        return out["out"].square().mean() + out["aux"][0].square().mean()
    return out.square().mean()


def build(mode: str) -> Net:
    torch.manual_seed(3)
    return Net(mode).double()


def batches(num_ranks: int) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    shape = (STEPS, 2, num_ranks * PER_RANK, DIM)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def train(net: nn.Module, mine: Tensor, forward: Forward, **options) -> list[dict[str, Tensor]]:
    """Gradients after each step; two microbatches a step when `num_grad_acc_iter` is 2."""
    set_to_none = options.pop("set_to_none", True)
    between = options.pop("between", False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        for micro in range(2):
            out = forward(net, mine[step, micro])
            if between and micro == 0:
                optimizer.zero_grad(set_to_none=True)
            (loss_of(out) / 2).backward()
        grads = {n.removeprefix("module."): p.grad for n, p in net.named_parameters()}
        history.append({n: g.clone() if g is not None else None for n, g in grads.items()})
        optimizer.step()
    return history


def expect_same(ours: list[dict], truth: list[dict]) -> None:
    for mine, one in zip(ours, truth, strict=True):
        assert mine.keys() == one.keys()
        for name, grad in one.items():
            if grad is None:
                assert mine[name] is None, name
            else:
                torch.testing.assert_close(mine[name], grad, rtol=0, atol=1e-12, msg=name)


def plainly(net: nn.Module, x: Tensor) -> object:
    return net(x)


def under_checkpoint(net: nn.Module, x: Tensor) -> object:
    return checkpoint(net, x.requires_grad_(), use_reentrant=True)
