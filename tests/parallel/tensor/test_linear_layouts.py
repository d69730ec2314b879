"""Who speaks for a parameter: the outermost part that names it, else it is whole."""

from torch import nn

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear

COLUMN = ((("tensor",), ()), ((), ("tensor",)))


class Outer(nn.Module):
    """Speaks for one parameter of a part, under another global name."""

    def __init__(self):
        super().__init__()
        self.part = ColumnLinear(4, 6)

    def layouts(self) -> dict[str, Layout]:
        return {"part.bias": Layout("elsewhere", (6,), (("tensor",),), stages=(1,))}


def check_names() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    net = nn.ModuleDict(
        {
            "plain": nn.Linear(3, 4),
            "cut": nn.Sequential(ColumnLinear(4, 6), RowLinear(6, 4, sequence_parallel=True)),
            "outer": Outer(),
        }
    )
    net["again"] = net["cut"][0]
    layouts = collect(net, "model")
    assert list(layouts) == [name for name, _ in net.named_parameters()]
    assert layouts["plain.weight"] == Layout("model.plain.weight", (4, 3))
    assert layouts["cut.0.weight"] == Layout("model.cut.0.weight", (6, 4), COLUMN[0], uneven=True)
    assert layouts["cut.1.weight"] == Layout("model.cut.1.weight", (4, 6), COLUMN[1], uneven=True)
    assert layouts["cut.1.bias"].unreduced == ("tensor",)
    assert layouts["outer.part.weight"] == Layout(
        "model.outer.part.weight", (6, 4), COLUMN[0], uneven=True
    )
    assert layouts["outer.part.bias"].name == "model.outer.elsewhere"
    assert layouts["outer.part.bias"].stages == (1,)
    for name, parameter in net.named_parameters():
        assert parameter.shape == local_shape(layouts[name], tpc.topology.dense, tpc.rank)


def test_names_and_cuts_of_a_nested_module(ranks):
    ranks(2).run(check_names)


def shared_with_plain() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    net = nn.ModuleDict({"first": nn.Linear(4, 3), "second": ColumnLinear(4, 6)})
    net["first"].weight = net["second"].weight
    layouts = collect(net)
    assert list(layouts) == ["first.weight", "first.bias", "second.bias"]
    assert layouts["first.weight"].split == COLUMN[0]


def test_a_shared_parameter_is_listed_once_by_whoever_knows_it(ranks):
    ranks(2).run(shared_with_plain)
