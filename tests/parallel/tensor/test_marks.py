"""A parameter knows its layout: what puts another object in its place marks it again."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter

from tests.parallel.tensor.split_block import SplitBlock
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_spec import group_of
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect, layout_of, mark
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm, RMSNorm

SHAPE = GPTShape(2, 8, 2, 17, 6, position="learned", sequence_parallel=True)


def models() -> list[nn.Module]:
    gpt = GPT(SHAPE, stage_of=[0] * 5 + [1])
    layers = nn.Sequential(ColumnLinear(4, 6), RowLinear(6, 4, sequence_parallel=True))
    layers.append(RMSNorm(4, sequence_parallel=True))
    return [gpt, layers, SplitBlock(sequence_parallel=True)]


def pickled(net: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(net))  # noqa: S301


def to_empty(net: nn.Module) -> nn.Module:
    return net.to("meta").to_empty(device="cpu")


def assigned(net: nn.Module) -> nn.Module:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    return net


def swapped(net: nn.Module) -> nn.Module:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return net.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def called(net: nn.Module) -> nn.Module:
    """functional_call puts other tensors in and the parameters back."""
    others = {name: p.detach().clone() for name, p in net.named_parameters()}
    if not isinstance(net, GPT):
        x = torch.randn(4, 2, 4 if isinstance(net, nn.Sequential) else 8)
        torch.func.functional_call(net, others, (x,))
    return net


def replaced(net: nn.Module) -> nn.Module:
    for part in list(net.modules()):
        for name, p in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(p.detach().clone()))
    return net


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as made": lambda net: net,
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "to": lambda net: net.to(torch.float64),
    "half": lambda net: net.half(),
    "swap": swapped,
    "to_empty": to_empty,
    "assign": assigned,
    "functional_call": called,
    "replace": replaced,
}


def survive(data: int, models: Callable[[], list[nn.Module]] = models) -> None:
    tpc.setup_process_groups([("data", data), ("tensor", 2)])
    group = tpc.get_group("tensor")
    for name, way in WAYS.items():
        for net in map(way, models()):
            layouts = collect(net)
            if name == "replace" and isinstance(net, GPT):
                # layers alone saw this, which know neither the whole model's names nor stages
                net.mark()
            for path, p in net.named_parameters():
                wanted, found = layouts[path], layout_of(p)
                assert type(p) is nn.Parameter
                if wanted.is_whole:
                    assert found is None or found.is_whole, (name, path)
                    continue
                where = name, path, found
                assert found is not None, where
                assert found.split == wanted.split, where
                assert found.unreduced == wanted.unreduced, where
                assert (found.parts, found.uneven) == (wanted.parts, wanted.uneven), where
                assert found.stages == wanted.stages, where
                assert group_of(p) is group, where


@pytest.mark.late_in_full
@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_mark_survives_what_replaces_parameters(ranks, data):
    ranks(2 * data).run(survive, data)


def inner_moves_alone() -> None:
    """The outer module's word stays where an inner one moves by itself; a user's too."""
    tpc.setup_process_groups([("tensor", 2)])
    net = GPT(SHAPE, stage_of=[0] * 5 + [1])
    net.embed.to(torch.float64)
    assert layout_of(net.embed.weight).stages == (0, 1)
    plain = nn.Sequential(ColumnLinear(4, 6))
    mark(plain, {"0.weight": Layout("mine", (6, 4), (("tensor",), ()), stages=(3,))})
    plain.to(torch.float64)
    assert layout_of(plain[0].weight).name == "mine"
    assert layout_of(plain[0].bias).split == (("tensor",),)
    # a weight that comes from another layer is cut as the layer that holds it says
    plain[0].weight = RowLinear(6, 12, bias=False).weight
    assert layout_of(plain[0].weight).split == (("tensor",), ())


@pytest.mark.late_in_full
def test_outer_modules_and_users_speak_for_inner_ones(ranks):
    ranks(2).run(inner_moves_alone)


def pickles_alone() -> None:
    """What is saved of parameters loads without our classes; a pickled layer finds its group."""
    layer = LayerNorm(4, sequence_parallel=True)
    for what in (list(layer.parameters()), layer.state_dict(keep_vars=True)):
        file = io.BytesIO()
        torch.save(what, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        values = loaded.values() if isinstance(loaded, dict) else loaded
        for mine, theirs in zip(values, layer.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert layout_of(mine) is None
    again = pickle.loads(pickle.dumps(layer))  # noqa: S301
    assert again.group is dist.group.WORLD


@pytest.mark.late_in_full
def test_pickled_parameters_need_no_class_of_ours(ranks):
    ranks(2).run(pickles_alone)


def compiled(norm: type[LayerNorm | RMSNorm]) -> None:
    """Marks are read while a graph is made: no break, and none is made anew."""
    tpc.setup_process_groups([("tensor", 2)])
    x = torch.randn(3, 4)
    net = norm(4, sequence_parallel=True)
    twin = copy.deepcopy(net)
    ddp = NaiveDDP(net)
    counter = CompileCounter()
    net.compile(fullgraph=True, backend=counter)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).square().sum().backward()
    assert counter.frame_count == 1
    # without a reducer the layer sums, also where the graph breaks at the sum
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at .grad of what passes a break
        torch.compile(twin, backend="eager")(x).square().sum().backward()
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def compiled_alone() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    x = torch.randn(3, 4)
    alone = ColumnLinear(4, 4, group=tpc.groups.of([tpc.rank]))
    for one in (LayerNorm(4), alone):
        counter = CompileCounter()
        torch.compile(one, fullgraph=True, backend=counter)(x).sum().backward()
        assert counter.frame_count == 1


@pytest.mark.own_transport("torch.compile")
@pytest.mark.parametrize("norm", [LayerNorm, pytest.param(RMSNorm, marks=pytest.mark.full)])
def test_marks_neither_break_nor_remake_a_graph(ranks, norm):
    ranks(2).run(compiled, norm)


@pytest.mark.full
@pytest.mark.own_transport("torch.compile")
def test_layers_of_one_rank_are_one_graph(ranks):
    ranks(2).run(compiled_alone)
