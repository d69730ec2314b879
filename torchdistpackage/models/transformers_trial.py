"""Try a split on a small copy: whether ranks compute the same, and in which order blocks run their
layers.

The ranks are threads of this process, which talk in memory (thread_ranks). Each splits the copy as
it would the model; logits and the gradient of every parameter are compared with the copy's own.

From the order in which blocks run the layers that ranks split follows which gradients are needed of
what is frozen or computed again, and so what ranks send (transformers_numbers.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.equivalence.compare import ParityFinding, first_difference
from torchdistpackage.equivalence.match import elementwise_within
from torchdistpackage.equivalence.record import ParityRecord, parts_of, recording
from torchdistpackage.families.found import TRAINED
from torchdistpackage.families.table import BlockOrder, FoundModel
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.layout.table import SplitTable
from torchdistpackage.models.transformers_experts import share_experts
from torchdistpackage.models.transformers_small import Sample, module_of, moved_away
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.parallelize import parallelize
from torchdistpackage.thread_ranks.run import run_ranks
from torchdistpackage.tools.undisturbed import keep_random_states
from torchdistpackage.topology.mesh import Mesh, topology

_TOLERANCE = 1e-3
"""Largest difference in float32 that counts as equal; a wrong split differs by much more."""
_SMALLEST = 1e-4
"""A gradient counts as this part of the largest one at least: of some there is but rounding."""
_LAST_BITS = 4
"""A gradient may differ by this many times what a change of the last bits of all weights does."""
_MOST_ROUNDING = 1e-2
"""But not by more: a model that is less sure of its own gradients is none to hold ranks to."""
_LIMIT_S = 120.0
Gradients = dict[str, Tensor]


def try_tensor(model: Any, model_facts: FoundModel, sample: Sample, num_ranks: int) -> str | None:
    """Return why so many ranks do not compute what `model` does; None: they do.

    model: a small copy in float32. model_facts: facts read from it, with its cuts.
    """
    copied = moved_away(model).train(model.config.model_type in TRAINED)
    twins = [deepcopy(copied) for _ in range(num_ranks)]  # some keep what a forward has made
    expected = _alone(copied, sample, model_facts.aliases)
    table, layouts = model_facts.table, model_facts.layouts

    stops: dict[int, str] = {}

    def on_rank(rank: int) -> ParityRecord:
        group = tpc.get_group("tensor")
        twin = twins[rank]
        record = ParityRecord({"tensor": rank})
        try:
            parallelize(twin, table, group)
            if model_facts.shared_experts:
                share_experts(twin, layouts, tpc.get_group("expert"), group)
            _fill(twin, copied, model_facts, layouts, group)
            with recording(parts_of(twin), record, first_call=True):
                logits = sample.outputs(twin)
            if model_facts.splits_head:
                sizes = even_sizes(model_facts.sizes.vocab, group.size())
                logits = collectives.gather(logits, -1, group, sizes)
            sample.loss(logits).backward()
        except Exception as error:  # whatever the forward of a class that nobody has seen raises
            stops[rank] = module_of(error, twin)
            raise
        record.results = [logits.detach()]
        record.grads = _gradients(twin, model_facts, layouts, group)
        return record

    layout = topology([("tensor", num_ranks)], num_ranks)
    run = run_ranks(on_rank, layout, limit_s=_LIMIT_S, queued=False)
    if run.finding is not None:
        where = next((stops[x] for x in run.finding.ranks if x in stops), type(model).__name__)
        return f"{num_ranks} ranks stop in {where} ({run.finding.kind})"
    records: list[ParityRecord] = list(run.results)  # type: ignore[arg-type]
    finding = _first_difference(expected, records, layouts)
    if finding is not None and finding.what.startswith("gradients"):
        rounding = min(
            _LAST_BITS * _rounding(copied, sample, expected, model_facts.aliases), _MOST_ROUNDING
        )
        if rounding > _TOLERANCE:
            finding = _first_difference(expected, records, layouts, rounding)
    return None if finding is None else finding.brief


def _rounding(
    model: nn.Module, sample: Sample, expected: ParityRecord, aliases: Mapping[str, str]
) -> float:
    """Return how much of a gradient changes, at most, where the last bits of all weights do.

    A class that puts activations on a sphere and stretches them, as Dory does, magnifies rounding
    a thousandfold, and ranks add in another order than one process.
    """
    moved = deepcopy(model)
    with torch.no_grad(), keep_random_states():
        torch.manual_seed(3)
        for parameter in moved.parameters():
            infinity = torch.full_like(parameter, torch.inf).copysign_(torch.randn_like(parameter))
            parameter.copy_(torch.nextafter(parameter, infinity))
    grads = _alone(moved, sample, aliases).grads
    least = _SMALLEST * max(x.abs().max().item() for x in expected.grads.values())
    return max(
        float((grads[name] - x).abs().max() / max(x.abs().max().item(), least))
        for name, x in expected.grads.items()
    )


def _first_difference(
    full_record: ParityRecord,
    records: Sequence[ParityRecord],
    layouts: Mapping[str, Layout],
    rounding: float = _TOLERANCE,
) -> ParityFinding | None:
    """Return the first difference of the ranks from the copy, gradients by each rank's own part.

    rounding: by how much of its largest number a gradient may differ.
    """
    axes = {"tensor": len(records)}
    outputs = replace(full_record, grads={})
    by = elementwise_within(_TOLERANCE)
    if (finding := first_difference(outputs, records, axes, by)) is not None:
        return finding
    mesh = Mesh((("tensor", len(records)),))
    largest = max(x.abs().max().item() for x in full_record.grads.values())
    by = elementwise_within(rounding, least_noise=_TOLERANCE * _SMALLEST * largest)
    for rank, record in enumerate(records):
        parts: Gradients = {}
        for name, x in full_record.grads.items():
            parts[name] = torch.empty(local_shape(layouts[name], mesh, rank))
            copy_part(parts[name], x, layouts[name], mesh, rank)
        shard_record = replace(record, initial=parts, modules={}, results=[])
        finding = first_difference(ParityRecord({}, grads=parts), [shard_record], axes, by)
        if finding is not None:
            return finding
    return None


def _alone(model: Any, sample: Sample, aliases: Mapping[str, str]) -> ParityRecord:
    """Return what the copy computes in one process."""
    record = ParityRecord({})
    with recording(parts_of(model), record, first_call=True):
        logits = sample.outputs(model)
    model.zero_grad()
    sample.loss(logits).backward()
    named = {aliases.get(name, name): p for name, p in model.named_parameters()}
    record.grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    model.zero_grad()
    record.results = [logits.detach()]
    return record


@torch.no_grad()
def _fill(
    twin: nn.Module,
    full_model: nn.Module,
    model_facts: FoundModel,
    layouts: Mapping[str, Layout],
    group: Group,
) -> None:
    """Fill the parameters of `twin` that were made without values, such as those of shared
    experts.
    """
    if not model_facts.shared_experts:
        return
    mesh, true = (
        Mesh((("expert", 1), ("tensor", group.size()))),
        dict(full_model.named_parameters()),
    )
    for name, parameter in twin.named_parameters():
        if layouts[name].view == "expert":
            copy_part(parameter, true[name], layouts[name], mesh, group.rank())


def _gradients(
    twin: nn.Module, model_facts: FoundModel, layouts: Mapping[str, Layout], group: Group
) -> Gradients:
    """Return the gradients of this rank's shards, by the names of the model."""
    gradients: Gradients = {}
    for name, parameter in twin.named_parameters():
        owner = model_facts.aliases.get(name, name)
        if parameter.grad is not None:
            partial = bool(layouts[owner].unreduced)
            g = parameter.grad
            gradients[owner] = primitives.all_reduce(g.clone(), group) if partial else g
    return gradients


# -- the order of the layers ---------------------------------------------------------------------


@dataclass
class _WatchedCalls:
    """The inputs and outputs of the layers by path, in the order of their calls; see `_watched`."""

    read: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    made: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    again: bool = False
    into_norm: set[str] = field(default_factory=set[str])


@torch.no_grad()
def order_of(model: Any, sample: Sample, blocks: str, table: SplitTable) -> BlockOrder:
    """Return the order of the layers that `table` lists in the blocks of `model`, a small copy.

    blocks: path of the list of blocks.
    """
    unknown = BlockOrder(is_listed=False)
    parts: dict[str, list[str]] = {}
    for path, cut in table.layers.items():
        block = _block(blocks, path)
        if not block:
            continue
        if cut.kind not in ("column", "row"):
            return unknown
        parts.setdefault(block, []).append(path)
    if not parts or any(_block(blocks, path) for path in table.experts):
        return unknown
    plain = _seen(model, sample, table)
    called = [path for path in plain.read if _block(blocks, path)]
    if plain.again or called != [path for paths in parts.values() for path in paths]:
        return unknown
    follows: set[bool] = set()
    for paths in parts.values():
        rows = [path for path in paths if table.layers[path].kind == "row"]
        for row in rows[:-1]:
            moved = _seen(model, sample, table, row)
            behind = paths[paths.index(row) + 1 :]
            columns = [path for path in behind if table.layers[path].kind == "column"]
            follows |= {not torch.equal(moved.read[x], plain.read[x]) for x in columns}
    last = {paths[-1] for paths in parts.values()}
    ends = {path in plain.into_norm for path in last}
    if len(follows) > 1 or len(ends) > 1:
        return unknown
    return BlockOrder(is_parallel=follows == {False}, ends_in_norm=ends == {True})


def _block(blocks: str, path: str) -> str:
    """Return the number of the block that has a module; "" if none has."""
    inner = path.removeprefix(f"{blocks}.")
    return inner.partition(".")[0] if blocks and inner != path else ""


def _seen(model: Any, sample: Sample, table: SplitTable, moved: str = "") -> _WatchedCalls:
    """Return the calls of one forward. moved: path of a layer whose result is changed."""
    calls = _WatchedCalls()
    layers = {path: model.get_submodule(path) for path in table.layers}
    with _watched(model, layers, calls, moved):
        sample.outputs(model)
    return calls


@contextmanager
def _watched(
    model: nn.Module, layers: Mapping[str, nn.Module], calls: _WatchedCalls, moved: str
) -> Iterator[None]:
    """Note what the layers read and make, and which results another module with weights reads."""
    hooks: list[Any] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        # a norm gets the very values that the layer made, and no sum of them
        tensors = [x for x in args if isinstance(x, Tensor)]
        for path, value in calls.made.items():
            if any(x.data_ptr() == value.data_ptr() and x.shape == value.shape for x in tensors):
                calls.into_norm.add(path)

    def note(path: str) -> Any:
        def behind(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            calls.again |= path in calls.read
            calls.read[path] = args[0].clone()
            calls.made[path] = output + 1.0 if path == moved else output
            return calls.made[path]

        return behind

    listed = {id(layer) for layer in layers.values()}
    for module in model.modules():
        if module._parameters and id(module) not in listed:
            hooks.append(module.register_forward_pre_hook(before))
    hooks += [layer.register_forward_hook(note(path)) for path, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
