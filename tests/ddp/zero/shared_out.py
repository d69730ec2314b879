"""A model's parameters shared out by hand, so that what reads pieces is tested without an engine.

The pieces do as little as they can: they get their part of a gradient, and give their values back.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.transport.sharded_flat import start_all_gather_v
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.sharded import ParamPartition
from torchdistpackage.ddp.zero.sharded_base import ShardedOptimizerBase
from torchdistpackage.layout.partition import greedy_partition


class Model(nn.Module):
    """Sizes that no number of ranks divides, a scalar, a matrix by columns, a frozen one."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
            return nn.Parameter(x.to(dtype))

        self.scale = parameter()
        self.first = parameter(5, 7)
        self.columns = nn.Parameter(parameter(3, 4).detach().t())
        self.frozen = parameter(6).requires_grad_(False)
        self.spare = parameter(4)
        self.tiny = parameter(1)
        self.last = parameter(11)

    def groups(self) -> list[dict]:
        """Two param groups, in an order that is not that of registration."""
        return [
            {"params": [self.last, self.first, self.frozen, self.scale]},
            {"params": [self.columns, self.tiny, self.spare], "lr": 3e-3},
        ]


def gradients(model: Model, step: int) -> None:
    """The same on every rank and at every size; `spare` gets none."""
    draw = torch.Generator().manual_seed(100 + step)
    for name, p in model.named_parameters():
        grad = torch.randn(p.shape, generator=draw, dtype=torch.float64)
        if name not in ("frozen", "spare"):
            p.grad = torch.empty_like(p).copy_(grad)


class ByHand(ShardedOptimizerBase):
    """Each parameter cut by itself, at places that favour the first ranks, or owned whole."""

    def __init__(
        self,
        model: Model,
        inner: Optimizer,
        group: Group,
        whole: bool = False,
        of_last: Group | None = None,
    ):
        """of_last: the ranks that share the parameters of the last param group, if others do."""
        names = {p: name for name, p in model.named_parameters()}
        held: list[list[ParamPartition]] = []
        for number, members in enumerate(g["params"] for g in inner.param_groups):
            is_last = of_last is not None and number == len(inner.param_groups) - 1
            shared_by = of_last if is_last else group
            shares = greedy_partition([p.numel() for p in members], shared_by.size())
            owner_of = {i: owner for owner, some in enumerate(shares) for i in some}
            held.append(
                [
                    self.share(ParamSpec(names[p], p, shared_by), owner_of[i], whole)
                    for i, p in enumerate(members)
                ]
            )
        super().__init__(inner, held)

    def share(self, spec: ParamSpec, owner: int, whole: bool) -> ParamPartition:
        p, num_ranks, index = spec.parameter, spec.group.size(), spec.group.rank()
        if not p.requires_grad:
            return ParamPartition(spec, (0,) * (num_ranks + 1), None)
        step = -(-p.numel() // num_ranks)
        bounds = tuple(min(p.numel(), r * step) for r in range(num_ranks + 1))
        if whole:
            bounds = tuple(0 if r <= owner else p.numel() for r in range(num_ranks + 1))
        start, stop = bounds[index], bounds[index + 1]
        held = ParamPartition(spec, bounds, None, whole, master=p.dtype != torch.float64)
        if start < stop:
            values = p.detach().clone() if whole else held.flat(p.detach())[start:stop].clone()
            held = replace(held, own_tensor=nn.Parameter(values.double()))
        return held

    @torch.no_grad()
    def step(self, closure=None):
        for held in (h for members in self.partitions for h in members):
            grad, (start, stop) = held.spec.parameter.grad, held.range
            if held.own_tensor is not None and grad is not None:
                mine = grad if held.whole else held.flat(grad)[start:stop]
                held.own_tensor.grad = mine.to(held.own_tensor.dtype)
        self.inner.step()
        for held in (h for members in self.partitions for h in members):
            if held.bounds[-1]:
                held.spec.parameter.copy_(self.joined(held))

    def joined(self, held: ParamPartition) -> Tensor:
        p = held.spec.parameter
        flat = torch.zeros(p.numel(), dtype=torch.float64)
        start, stop = held.range
        if held.own_tensor is not None:
            flat[start:stop] = held.flat(held.own_tensor) if held.whole else held.own_tensor
        return held.shaped(start_all_gather_v(flat, held.bounds, held.spec.group).wait())

    def zero_grad(self, set_to_none: bool = True) -> None:
        for held in (h for members in self.partitions for h in members):
            held.spec.parameter.grad = None

    @torch.no_grad()
    def refresh_masters(self) -> None:
        for held in (h for members in self.partitions for h in members):
            if held.own_tensor is not None and held.master:
                start, stop = held.range
                value = held.spec.parameter
                held.own_tensor.copy_(value if held.whole else held.flat(value)[start:stop])


def assert_same(a: object, b: object, where: str = "") -> None:
    """Equal to the bit, in all that dicts, lists and tensors hold; dtypes, devices and strides."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert (a.dtype, a.device, a.stride()) == (b.dtype, b.device, b.stride()), where
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=where)
    elif isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where} {key}")
    elif isinstance(a, Sequence) and not isinstance(a, str) and isinstance(b, Sequence):
        assert len(a) == len(b), where
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where} {number}")
    else:
        assert a == b, where
