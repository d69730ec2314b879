"""Activations in host memory: the same bits, no memory of the device, no race between streams."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.streams import _histories
from torchdistpackage.testing import ordered_streams
from torchdistpackage.tools import activation_offload
from torchdistpackage.tools.activation_offload import ActivationOffload, offload_modules

LAYERS, WIDTH = 3, 24
CPU = torch.device("cpu")


class Block(nn.Module):
    """It saves its input, results, strided views of one storage, a mask and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        a, b, c = self.mix(self.norm(x)).chunk(3, -1)
        hidden = (a.softmax(-1) * b.sigmoid() * c.transpose(0, 1).transpose(0, 1)) * mask
        if torch.is_grad_enabled():
            self.seen.append(StorageWeakRef(a.untyped_storage()))
        return x + self.out(F.dropout(hidden, 0.1))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).double()


def forward(net: nn.Module) -> Tensor:
    torch.manual_seed(1)
    dtype = next(net.parameters()).dtype
    x, mask = torch.randn(8, 16, WIDTH, dtype=dtype), (torch.rand(8, 16, WIDTH) > 0.2).to(dtype)
    for block in net.children():
        x = block(x, mask)
    return x.square().mean()


def offloaded() -> nn.Sequential:
    net = model()
    names = [name for name, _ in net.named_children()]
    offload_modules(net, names, ActivationOffload(CPU))
    return net


def gradients(net: nn.Module, *, of: str = "backward") -> list[Tensor]:
    parameters = [*net.parameters()]
    if of == "two micro-batches":
        first, second = forward(net), forward(net)
        first.backward()
        (2 * second).backward()
    elif of == "twice":
        loss = forward(net)
        loss.backward(retain_graph=True)
        loss.backward()
    else:
        forward(net).backward()
    return [p.grad for p in parameters]


FULL = [pytest.mark.full]


@pytest.mark.parametrize(
    "of",
    ["two micro-batches", pytest.param("backward", marks=FULL), pytest.param("twice", marks=FULL)],
)
def test_gradients_are_the_same_bits_and_streams_are_ordered(of):
    expected = gradients(model(), of=of)
    with ordered_streams():
        found = gradients(offloaded(), of=of)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, gradients(copy.deepcopy(offloaded()), of=of), expected))


def test_bf16_under_autocast_is_the_same_and_casts_of_weights_stay(monkeypatch):
    copied: list[tuple[int, ...]] = []
    bytes_of = activation_offload._bytes_of
    monkeypatch.setattr(
        activation_offload,
        "_bytes_of",
        lambda x: copied.append((x.dtype, *x.shape)) or bytes_of(x),
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (gradients(net.float()) for net in (model(), offloaded()))
    assert all(map(torch.equal, found, expected))
    weights = {(torch.bfloat16, *shape) for shape in ((WIDTH, WIDTH), (3 * WIDTH, WIDTH))}
    weights |= {(dtype, *reversed(shape)) for dtype, *shape in weights}
    assert copied and not weights & {*copied}


def test_only_the_last_block_stays_on_the_device_and_nothing_after_the_backward():
    net = offloaded()
    loss = forward(net)
    gone = [block.seen[-1].expired() for block in net.children()]
    assert gone == [True] * (LAYERS - 1) + [False]
    loss.backward()
    assert all(block.seen[-1].expired() for block in net.children())


@pytest.mark.parametrize(
    "method", ["free", *(pytest.param(x, marks=FULL) for x in ("wait_for_copies", "bytes_of"))]
)
def test_a_missing_wait_is_a_race(monkeypatch, method):
    """Without the wait of one place alone memory is used while a copy is on its way."""
    cls = activation_offload._ModuleStorages
    original, inside = getattr(cls, method), []

    def marked(self, *args):
        inside.append(method)
        try:
            return original(self, *args)
        finally:
            inside.pop()

    wait = cls._wait
    monkeypatch.setattr(cls, method, marked)
    # what a traceback holds dies when these streams are gone
    monkeypatch.setattr(
        cls, "_wait", lambda self, e: None if inside or not _histories else wait(self, e)
    )
    with pytest.raises(RaceError), ordered_streams():
        gradients(offloaded())


def test_a_saved_tensor_that_changed_in_place_is_refused():
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            return y * y.sigmoid().mul_(2).add_(y.mul_(3))

    net = nn.Sequential(InPlace())
    x = torch.ones(256, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(x).sum().backward()
    offload_modules(net, ["0"], ActivationOffload(CPU))
    with pytest.raises(RuntimeError, match="changed in place: it is at version 1"):
        net(x)
