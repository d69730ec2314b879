"""Stages of any model that torch.fx can trace, cut by measured time.

A cut may go anywhere, also through a residual connection. Every value that is computed before the
cut and used after it crosses it: a single one as a tensor, several as a dict by name. A value used
two stages later passes through the stage between.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import getitem
from typing import NamedTuple

from torch import Tensor, fx, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.layer_costs import (
    PieceCost,
    agreed,
    measure_call,
    measure_link,
    middle,
    split_measured,
)
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.tools.undisturbed import undisturbed

BYTES_PER_S = 1e9
"""Assumed rate of a link without a measurement, so that cuts move to where fewer bytes cross."""


def split_traced(
    model: nn.Module,
    example: Sequence[object],
    placement: Sequence[int],
    *,
    leaves: Sequence[type[nn.Module]] = (),
    cap_bytes: float | None = None,
    live: Sequence[int] | None = None,
    schedule: Schedule | None = None,
    rounds: int = 3,
    group: Group | None = None,
    bytes_per_s: float | None = None,
) -> list[fx.GraphModule]:
    """Return the stages of `model` in order; parameters keep their names.

    The first stage takes the model's arguments, each later one the output of the previous stage,
    and the last returns the model's output. Operations are timed one by one on `example`, the
    model's arguments for one micro-batch. Code that depends on `training`, outside of torch's own
    modules, is traced for the current mode.

    placement: for each stage the pipe index that runs it.
    leaves: classes of modules that are not traced into.
    cap_bytes, live, schedule: see `layer_costs.split_measured`.
    group: see `layer_costs.measure`.
    bytes_per_s: rate of the links; None: measured in `group`.

    Raises:
        ScheduleError: the model cannot be traced, has too few places for a cut, or does not fit
            into cap_bytes.
    """
    traced = _trace(model, tuple(leaves))
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    costs, values = _timed_run(traced, nodes, example, rounds)
    if group is not None:
        costs = agreed(costs, group)
    if bytes_per_s is None:
        bytes_per_s = BYTES_PER_S if group is None else measure_link(group)
    cuts = _cuts(traced, nodes, values, costs, bytes_per_s)
    if len(cuts) + 1 < len(placement):
        raise ScheduleError(
            f"{type(model).__name__} can be cut in {len(cuts)} places, which is too few for "
            f"{len(placement)} stages; modules that share a parameter stay together, and only "
            "tensors can be sent between stages"
        )
    edges = [0, *(cut.at for cut in cuts), len(nodes)]
    across = [*(cut.num_bytes for cut in cuts), 0]
    pieces = [_sum(costs[a:b], out) for (a, b), out in zip(pairwise(edges), across, strict=True)]
    options = {"cap_bytes": cap_bytes, "live": live, "schedule": schedule}
    ranges = split_measured(pieces, placement, bytes_per_s=bytes_per_s, **options)
    ends = [edges[r.start] for r in ranges] + [len(nodes)]
    return [_stage(traced, nodes, a, b) for a, b in pairwise(ends)]


class _CutPoint(NamedTuple):
    """A possible cut before node `at`, after which `after_s` seconds of the step have passed."""

    at: int
    after_s: float
    num_bytes: int


class _Tracer(fx.Tracer):
    """A tracer that does not trace into modules of the given classes."""

    def __init__(self, leaves: tuple[type[nn.Module], ...]):
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, self._leaves) or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module, leaves: tuple[type[nn.Module], ...]) -> fx.GraphModule:
    """Trace a model; raise ScheduleError if torch.fx cannot."""
    try:
        return fx.GraphModule(model, _Tracer(leaves).trace(model))
    except (fx.proxy.TraceError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ScheduleError(
            f"{type(model).__name__} cannot be traced ({type(error).__name__}: {error}); name the "
            f"modules whose code depends on values in `leaves`, or give a chain of pieces "
            f"(flatten_model)"
        ) from error


def _timed_run(
    traced: fx.GraphModule, nodes: Sequence[fx.Node], example: Sequence[object], rounds: int
) -> tuple[list[PieceCost], dict[fx.Node, object]]:
    """Return the cost of each node, and the values of the last round."""
    measured: list[list[PieceCost]] = [[] for _ in nodes]
    values: dict[fx.Node, object] = {}
    with undisturbed(traced):
        for turn in range(rounds + 1):
            arguments = iter(example)
            for costs, node in zip(measured, nodes, strict=True):
                if node.op == "placeholder":
                    default = node.args[0] if node.args else None
                    values[node], cost = next(arguments, default), PieceCost(0.0, 0.0)
                else:
                    inputs = [values[n] for n in node.all_input_nodes]
                    values[node], cost = measure_call(
                        _call(traced, node), inputs, _own(traced, node)
                    )
                if turn:
                    costs.append(cost)
    return [middle(costs) for costs in measured], values


def _call(traced: fx.GraphModule, node: fx.Node) -> Callable[..., object]:
    """Return the node as a function of the values of its `all_input_nodes`."""

    def call(*inputs: object) -> object:
        values = dict(zip(node.all_input_nodes, inputs, strict=True))
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        return getattr(fx.Interpreter(traced), node.op)(node.target, args, kwargs)

    return call


def _own(traced: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Return the trained parameters that the node itself uses."""
    candidates: list[object] = []
    if node.op == "call_module":
        candidates += traced.get_submodule(str(node.target)).parameters()
    elif node.op == "get_attr":
        candidates.append(fx.Interpreter(traced).fetch_attr(str(node.target)))
    return [p for p in candidates if isinstance(p, nn.Parameter) and p.requires_grad]


def _cuts(
    traced: fx.GraphModule,
    nodes: Sequence[fx.Node],
    values: dict[fx.Node, object],
    costs: Sequence[PieceCost],
    bytes_per_s: float,
) -> list[_CutPoint]:
    """Return the possible cuts, without those that a nearby cut with fewer bytes beats."""
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for parameter in _own(traced, node):
            users.setdefault(id(parameter), []).append(i)
    candidates: list[_CutPoint] = []
    after_s = 0.0
    first = sum(node.op == "placeholder" for node in nodes) + 1
    for at in range(len(nodes)):
        shared = any(min(indices) < at <= max(indices) for indices in users.values())
        across = [values[n] for n in _crossing(nodes, at)]
        if at >= first and not shared and all(isinstance(x, Tensor) for x in across):
            candidates.append(_CutPoint(at, after_s, sum(x.nbytes for x in across)))  # type: ignore[union-attr]
        after_s += costs[at].step_s

    def is_worse(a: _CutPoint, b: _CutPoint) -> bool:
        return abs(a.after_s - b.after_s) < (a.num_bytes - b.num_bytes) / bytes_per_s

    return [cut for cut in candidates if not any(is_worse(cut, other) for other in candidates)]


def _crossing(nodes: Sequence[fx.Node], at: int) -> list[fx.Node]:
    """Return the nodes before `at` whose values are used from `at` on, or by the output."""
    earlier = set(nodes[:at])
    return [n for n in nodes[:at] if any(user not in earlier for user in n.users)]


def _stage(traced: fx.GraphModule, nodes: Sequence[fx.Node], a: int, b: int) -> fx.GraphModule:
    """Return nodes a to b as a module, with the parameters that they use."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = _crossing(nodes, a)
    if len(inputs) == 1:
        copies[inputs[0]] = graph.placeholder(inputs[0].name)
    elif inputs:
        received = graph.placeholder("received")
        for node in inputs:
            copies[node] = graph.call_function(getitem, (received, node.name))
    for node in nodes[a:b]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if b == len(nodes):
        (output,) = traced.graph.find_nodes(op="output")
        graph.output(fx.node.map_arg(output.args[0], copies.__getitem__))
    else:
        outputs = _crossing(nodes, b)
        alone = len(outputs) == 1
        graph.output(copies[outputs[0]] if alone else {n.name: copies[n] for n in outputs})
    return fx.GraphModule(traced, graph)


def _sum(costs: Sequence[PieceCost], output_bytes: int) -> PieceCost:
    """Return the summed cost of a piece's nodes."""
    names = ("forward_s", "backward_s", "parameter_bytes", "activation_bytes")
    sums = {name: sum(getattr(c, name) for c in costs) for name in names}
    return PieceCost(**sums, output_bytes=output_bytes)
