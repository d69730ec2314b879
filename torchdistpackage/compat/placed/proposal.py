"""`propose`: a placement of a model's parts, from their measured times and memory.

torch.fx traces the model; its parts are its children (or their children, for large ones) and the
functions between them.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.compat.placed.functor import DeviceFunctor
from torchdistpackage.compat.placed.managed import ManagedModule, ManagedTensor
from torchdistpackage.compat.placed.place import Place
from torchdistpackage.compat.placed.placement_search import (
    GIB,
    PlacedNode,
    PlaceLink,
    bytes_of,
    search,
    step_seconds,
)
from torchdistpackage.errors import PlacementError
from torchdistpackage.parallel.pipeline.partition.layer_costs import STATE_FACTOR
from torchdistpackage.tools.undisturbed import undisturbed


@dataclass(frozen=True)
class Proposal:
    """The place of each part of a model.

    places: name of a part -> number of its place. seconds: predicted for a step. alone_s: predicted
    for a step on one place. held_bytes: memory of each place.
    """

    places: dict[str, int]
    seconds: float
    alone_s: float
    held_bytes: tuple[int, ...]
    nodes: tuple[PlacedNode, ...]
    graph: fx.GraphModule

    def __str__(self) -> str:
        lines = [f"{self.seconds * 1e3:.3g} ms a step (one place: {self.alone_s * 1e3:.3g} ms)"]
        for index, num_bytes in enumerate(self.held_bytes):
            names = [name for name, at in self.places.items() if at == index]
            lines.append(f"place {index}: {num_bytes / GIB:.3g} GiB: {', '.join(names) or '-'}")
        return "\n".join(lines)

    def agreed(self, F: DeviceFunctor) -> Proposal:
        """Return the first rank's proposal on all ranks, as each has measured other times."""
        program = F.program
        first = Place(torch.device("cpu"), (program.ranks[0],))
        text = json.dumps([self.places, self.seconds, self.alone_s, self.held_bytes])
        is_first = program.rank == program.ranks[0]
        agreed_text = program.tell(first, "a proposal", text if is_first else None)
        places, seconds, alone_s, held_bytes = json.loads(agreed_text)
        return replace(
            self, places=places, seconds=seconds, alone_s=alone_s, held_bytes=tuple(held_bytes)
        )

    def apply(self, F: DeviceFunctor, places: Sequence[Place] | None = None) -> PlacedModel:
        """Return the model with its parts on these places; default the next places of `F`."""
        chosen = list(places or [F.allocate_device() for _ in self.held_bytes])
        if len(chosen) != len(self.held_bytes):
            raise PlacementError(
                f"the proposal is for {len(self.held_bytes)} places, not {len(chosen)}; pass as "
                "many places as it was made for"
            )
        return PlacedModel(self, F, chosen)


class PlacedModel:
    """A model whose parts are on places; call it with managed tensors. parts: by name."""

    def __init__(self, proposal: Proposal, F: DeviceFunctor, places: Sequence[Place]):
        self.graph = proposal.graph
        self.parts = dict[str, Any]()
        self._functor = F
        self._first = places[next(iter(proposal.places.values()), 0)]
        for node in self.graph.graph.nodes:
            if node.op not in ("call_module", "call_function", "call_method", "get_attr"):
                continue
            with F.under(places[proposal.places[node.name]]):
                self.parts[node.name] = F(_function_of(node, self.graph))

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters on this rank."""
        held_parameters = [
            p
            for module in self.parts.values()
            if hasattr(module, "parameters")
            for p in module.parameters()
        ]
        return list(dict.fromkeys(held_parameters))

    def train(self, mode: bool = True) -> PlacedModel:
        """Put all parts that are modules into training mode, or out of it."""
        for module in self.parts.values():
            if isinstance(module, ManagedModule):
                module.train(mode)
        return self

    def eval(self) -> PlacedModel:
        """Put all parts that are modules into evaluation mode."""
        return self.train(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output. Tensors without a place go to that of the first part.

        No code of the user's runs between the parts, so sends may leave ahead.
        """
        with self._functor.ahead():
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = {node: self._placed(x) for node, x in _bound(self.graph, args, kwargs).items()}
        for node in self.graph.graph.nodes:
            inputs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "placeholder":
                continue
            if node.op == "output":
                return inputs[0][0]
            values[node] = self.parts[node.name](*inputs[0], **inputs[1])
        return None

    def _placed(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, ManagedTensor):
            return x
        with self._functor.under(self._first):
            return self._functor(x)


class _Children(fx.Tracer):
    """A tracer that keeps the modules in `leaves` as parts."""

    def __init__(self, leaves: set[str]):
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves


def propose(
    model: Module,
    example: Any,
    *,
    memory_gb: float | Sequence[float],
    num_places: int | None = None,
    link: PlaceLink | None = None,
    max_nodes: int = 8,
    repeats: int = 3,
    trains: bool = True,
) -> Proposal:
    """Measure the parts of `model` on `example`, and place them for a short step.

    example: the model's input, or a tuple of inputs. memory_gb: GiB of each place. num_places:
    default the length of `memory_gb`, or 2. link: between places. max_nodes: split children into
    theirs up to about this number of parts. repeats: measurements of each part; the shortest
    counts. trains: include backwards, gradients and Adam's two copies of each parameter.

    Raises:
        PlacementError: torch.fx cannot trace the model, the example does not fit its inputs, a
            number is out of range, or the parts do not fit into the memory.
    """
    if not isinstance(model, Module):
        raise PlacementError(
            f"propose: the model is a {type(model).__name__}, not a module; pass a torch.nn.Module"
        )
    single = isinstance(memory_gb, int | float)
    memory = [memory_gb] * (2 if num_places is None else num_places) if single else list(memory_gb)
    problems = [
        text
        for text, wrong in (
            (f"memory_gb={memory_gb!r}; give gigabytes above 0, one number or one for each "
            "place", not memory
             or not all(isinstance(gb, int | float) and 0 < gb < float("inf") for gb in memory)),
            (f"{len(memory)} values of memory_gb for {num_places} places; give one for each",
             num_places not in (None, len(memory))),
            (f"repeats={repeats} calls; measure 1 or more", repeats < 1),
        )
        if wrong
    ]  # fmt: skip
    if problems:
        raise PlacementError(f"propose: {'; '.join(problems)}")
    inputs = example if isinstance(example, tuple) else (example,)
    graph = _trace(model, max_nodes)
    with undisturbed(model):
        nodes, names = _measure(graph, inputs, repeats, trains)
    link = link or PlaceLink()
    places = search(nodes, [int(gb * GIB) for gb in memory], link)
    return Proposal(
        dict(zip(names, places, strict=True)),
        step_seconds(nodes, places, link),
        step_seconds(nodes, [0] * len(nodes), link),
        tuple(bytes_of(nodes, places, len(memory))),
        tuple(nodes),
        graph,
    )


def _trace(model: Module, max_nodes: int) -> fx.GraphModule:
    """Return the graph of the model's parts; split the largest child while parts are few."""
    leaves = {name for name, _ in model.named_children()}
    graph = _traced(model, leaves)
    while True:
        sizes = {
            name: sum(p.numel() for p in model.get_submodule(name).parameters())
            for name in leaves
            if list(model.get_submodule(name).children())
        }
        for name in sorted(sizes, key=lambda n: -sizes[n]):
            inner = {f"{name}.{child}" for child, _ in model.get_submodule(name).named_children()}
            try:
                opened = _traced(model, leaves - {name} | inner)
            except PlacementError:
                continue
            if _num_parts(opened) <= max_nodes:
                graph = opened
                leaves = leaves - {name} | inner
                break
        else:
            return graph


def _traced(model: Module, leaves: set[str]) -> fx.GraphModule:
    try:
        return fx.GraphModule(model, _Children(leaves).trace(model))
    except Exception as error:  # whatever a forward does with a proxy
        raise PlacementError(
            f"{type(model).__name__} cannot be traced by torch.fx ({error}); place its parts by "
            f"hand, or put what depends on values into a child module"
        ) from error


def _num_parts(graph: fx.GraphModule) -> int:
    return sum(node.op not in ("placeholder", "output") for node in graph.graph.nodes)


def _function_of(node: fx.Node, graph: fx.GraphModule) -> Any:
    """Return the module or function that a node calls."""
    if node.op == "call_module":
        return graph.get_submodule(str(node.target))
    if node.op == "call_function":
        return node.target
    if node.op == "call_method":
        return operator_of(str(node.target))
    return _Attribute(operator.attrgetter(str(node.target))(graph))


def operator_of(name: str) -> Callable[..., Any]:
    """Return a function that calls the method `name` of its first argument."""

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    call.__name__ = name
    return call


class _Attribute(Module):
    """A module that returns a parameter or buffer of the model itself."""

    def __init__(self, value: Any):
        super().__init__()
        if isinstance(value, torch.nn.Parameter):
            self.value = value
        else:
            self.register_buffer("value", value)

    def forward(self) -> Any:
        return self.value


def _bound(
    graph: fx.GraphModule, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[fx.Node, Any]:
    """Return the inputs of a graph by its placeholders.

    Raises:
        PlacementError: an input is missing, unknown or given twice.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    names = [str(node.target) for node in inputs]
    named = dict(zip(names, args, strict=False))
    twice = sorted(named.keys() & kwargs.keys())
    defaults = {str(node.target): node.args[0] for node in inputs if node.args}
    values = {**defaults, **named, **kwargs}
    missing = [n for n in names if n not in values]
    unknown = sorted(values.keys() - set(names))
    if missing or unknown or twice or len(args) > len(names):
        raise PlacementError(
            f"the model takes {', '.join(names) or 'nothing'}; {len(args)} values were given by "
            f"position; missing: {missing}, unknown: {unknown}, given twice: {twice}"
        )
    return {node: values[str(node.target)] for node in inputs}


def _measure(
    graph: fx.GraphModule, inputs: tuple[Any, ...], repeats: int, trains: bool
) -> tuple[list[PlacedNode], list[str]]:
    """Return the nodes and names of the parts; times are the shortest of `repeats` calls."""
    parts = [n for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
    index = {node: i for i, node in enumerate(parts)}
    seconds = [[float("inf"), float("inf")] for _ in parts]
    sizes = [(0, 0, 0)] * len(parts)
    seen: set[int] = set()
    values = _bound(graph, inputs, {})
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            i = index[node]
            function = _function_of(node, graph)
            arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            for _ in range(repeats):
                output, times, saved = _timed(function, arguments, trains)
                seconds[i] = [min(a, b) for a, b in zip(seconds[i], times, strict=True)]
            weights = [p for p in getattr(function, "parameters", list)() if id(p) not in seen]
            seen.update(map(id, weights))
            weight_bytes = sum(p.nbytes for p in weights) * (int(STATE_FACTOR) if trains else 1)
            sizes[i] = (_num_bytes(output), weight_bytes, saved)
            values[node] = output
    nodes = [
        PlacedNode(node.name, *seconds[i], *sizes[i],
                   tuple(index[n] for n in node.all_input_nodes if n in index))
        for i, node in enumerate(parts)
    ]  # fmt: skip
    return nodes, [node.name for node in parts]


def _timed(function: Any, arguments: Any, trains: bool) -> tuple[Any, tuple[float, float], int]:
    """Return (detached output, (forward, backward) seconds, bytes saved for the backward)."""
    args, kwargs = fx.node.map_aggregate(arguments, _as_leaf)  # type: ignore[misc]
    not_counted = {x.data_ptr() for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)}
    not_counted |= {p.data_ptr() for p in getattr(function, "parameters", list)()}
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        # inputs and parameters are in memory anyway, so count only what the backward adds
        if x.data_ptr() not in not_counted:
            saved[x.data_ptr()] = x.nbytes
        return x

    with (
        torch.set_grad_enabled(trains),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
    ):
        begin = _now(args)
        output = function(*args, **kwargs)
        forward_s = _now(args) - begin
    roots = [x for x in leaves_of(output) if isinstance(x, Tensor) and x.requires_grad]
    backward_s = 0.0
    if roots and trains:
        leaves = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        leaves += [p for p in getattr(function, "parameters", list)() if p.requires_grad]
        gradients = [torch.ones_like(x) for x in roots]
        begin = _now(args)
        if leaves:
            torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
        backward_s = _now(args) - begin
    for x in leaves_of(output):
        if isinstance(x, Tensor):
            saved.pop(x.data_ptr(), None)
    return fx.node.map_aggregate(output, _detached), (forward_s, backward_s), sum(saved.values())


def _now(args: Any) -> float:
    for device in {x.device for x in leaves_of(args) if isinstance(x, Tensor) and x.is_cuda}:
        # kernels run asynchronously, so wait for them before reading the clock
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _as_leaf(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
    return x


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _num_bytes(output: Any) -> int:
    return sum(x.nbytes for x in leaves_of(output) if isinstance(x, Tensor))
