"""Whatever a forward returns, its backward reduces, and what is returned stays what it was."""

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.one_process import DIM
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.ddp.grad_hooks import on_backward_start, tensors_in
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import CommError


@dataclass
class Scores:
    y: Tensor


class Box:
    """Something of the user's, into which nobody looks."""

    def __init__(self, y: Tensor):
        self.y = y


FORMS: dict[str, tuple[Callable[[Tensor], object], Callable[..., Tensor]]] = {
    "tuple": (lambda y: (1, [y]), lambda out: out[1][0]),
    "return type": (lambda y: y.max(dim=1), lambda out: out.values),
    "dataclass": (Scores, lambda out: out.y),
    "namespace": (lambda y: SimpleNamespace(inside={"y": y}), lambda out: out.inside["y"]),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), lambda out: out.mean),
    "nested distribution": (
        lambda y: torch.distributions.Independent(torch.distributions.Normal(y, 1.0), 1),
        lambda out: out.mean,
    ),
}


class Net(nn.Module):
    def __init__(self, form: Callable[..., object]):
        super().__init__()
        torch.manual_seed(2)
        self.form = form
        self.layer = nn.Linear(DIM, DIM).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor):
        self.aux = self.layer(x) * self.scale
        return self.form(self.aux)


def mine(rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(3, DIM, generator=draw, dtype=torch.float64)


def expect_mean(net: Net, read: Callable[..., Tensor]) -> None:
    """Gradients are those of the mean over ranks of the losses."""
    alone, size = Net(net.form), dist.get_world_size()
    for rank in range(size):
        (read(alone(mine(rank))).square().sum() / size).backward()
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)


def every_form() -> None:
    for form, read in FORMS.values():
        net = Net(form)
        ddp = NaiveDDP(net)
        read(ddp(mine(dist.get_rank()))).square().sum().backward()
        expect_mean(net, read)


def test_a_backward_through_any_form_of_output_reduces(ranks):
    ranks(2).run(every_form)


def detached() -> None:
    net = Net(lambda y: {"loss": y, "accuracy": y.detach().mean(), "raw": y.detach()})
    ddp, total = NaiveDDP(net), torch.zeros((), dtype=torch.float64)
    for _ in range(2):
        ddp.zero_grad()
        out = ddp(mine(dist.get_rank()))
        out["loss"].square().sum().backward()
        total += out["accuracy"]
        assert out["raw"].numpy().shape == (3, DIM)
    assert total.grad_fn is None
    expect_mean(net, lambda out: out["loss"])


def test_what_comes_detached_stays_so(ranks):
    ranks(2).run(detached)


def returned_parameter() -> None:
    net = Net(lambda y: y)
    net.form = lambda y: (y, net.scale)
    ddp = NaiveDDP(net)
    for _ in range(3):
        ddp.zero_grad()
        out, scale = ddp(mine(dist.get_rank()))
        (out * scale).square().sum().backward()
    assert not net.scale._backward_hooks
    expect_mean_of_both(net)


def expect_mean_of_both(net: Net) -> None:
    alone, size = Net(lambda y: y), dist.get_world_size()
    for rank in range(size):
        ((alone(mine(rank)) * alone.scale).square().sum() / size).backward()
    torch.testing.assert_close(net.scale.grad, alone.scale.grad, rtol=0, atol=1e-12)


def test_a_parameter_that_is_returned_collects_no_hooks(ranks):
    ranks(2).run(returned_parameter)


def nothing_to_hook() -> None:
    for form, kind in ((Box, "Box"), (lambda y: None, "NoneType")):
        net = Net(form)
        ddp, x = NaiveDDP(net), mine(dist.get_rank())
        with pytest.raises(CommError, match=rf"Net returned {kind}, .* reduce_gradients\(\)"):
            ddp(x)
        with torch.no_grad():
            ddp(x)
        with ddp.no_sync():
            ddp(x)
        net.aux.square().sum().backward()
        ddp.reduce_gradients()
        net.form = lambda y: y
        expect_mean(net, lambda out: out)


def test_outputs_without_tensors_are_refused_and_reduced_by_hand(ranks):
    ranks(2).run(nothing_to_hook)


@dataclass(frozen=True, slots=True)
class Frozen:
    y: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.y * 2)


class Mirrored(dict):
    """Keeps what it holds as attributes too, as Hugging Face's outputs do."""

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)


class Pair(namedtuple("Pair", ("y", "name"))):
    def __new__(cls, y: Tensor):
        return super().__new__(cls, y, "one")


def mirrored(y: Tensor) -> Mirrored:
    made = Mirrored()
    made["y"] = y
    return made


CONTAINERS: dict[str, tuple[Callable[[Tensor], object], Callable[..., Tensor]]] = {
    "dict": (lambda y: {"y": y, "n": 1}, lambda out: out["y"]),
    "ordered": (lambda y: OrderedDict(y=y), lambda out: out["y"]),
    "default": (lambda y: defaultdict(list, y=y), lambda out: out["y"]),
    "dict with attributes": (mirrored, lambda out: out["y"]),
    "attributes of a dict": (mirrored, lambda out: out.y),
    "list": (lambda y: [y], lambda out: out[0]),
    "named tuple": (Pair, lambda out: out.y),
    "frozen": (Frozen, lambda out: out.y),
    "made after the start": (Frozen, lambda out: out.doubled),
    "nested": (lambda y: {"all": [Scores(y), (1, None)]}, lambda out: out["all"][0].y),
    **{name: FORMS[name] for name in FORMS if name not in ("tuple", "return type")},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_the_caller_keeps_is_not_touched(name: str):
    """As of a module that returns what it has in a cache."""
    form, read = CONTAINERS[name]
    kept = form(torch.ones(2))
    before = tensors_in(kept)
    out = map_tensors(kept, torch.neg)
    assert type(out) is type(kept)
    assert read(out).tolist() == (-read(form(torch.ones(2)))).tolist()
    assert all(x is y for x, y in zip(tensors_in(kept), before, strict=True))
    assert map_tensors(kept, lambda x: x) is kept


def test_outputs_of_hugging_face_are_copied_with_their_attributes():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    y = torch.ones(1, 2)
    kept = outputs.CausalLMOutput(loss=None, logits=y, hidden_states=(y + 1, y + 2))
    out = map_tensors(kept, torch.neg)
    assert type(out) is type(kept)
    assert list(out) == ["logits", "hidden_states"]
    assert out.loss is None
    assert out.logits is out["logits"]
    assert out.hidden_states is out[1]
    assert [x.tolist() for x in out.hidden_states] == [[[-2.0, -2.0]], [[-3.0, -3.0]]]
    assert kept.logits is kept["logits"] is y
    assert kept.hidden_states[0].tolist() == [[2.0, 2.0]]


def test_a_cache_that_is_returned_in_every_forward_gets_no_hooks():
    cache, called = {"y": torch.ones(2)}, []
    for _ in range(3):
        out = on_backward_start(cache, lambda grad: called.append(1))
    out["y"].sum().backward()
    assert called == [1]
    assert cache["y"].grad_fn is None
