"""Whether tensor ranks that share a model by rules compute what it does: tried on a small copy.

The ranks are threads of this process, which talk in memory (thread_ranks). Each splits the copy as
it would the model; logits and the gradient of every parameter are compared with the copy's own.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.equivalence.compare import ParityFinding, first_difference
from torchdistpackage.equivalence.match import elementwise_within
from torchdistpackage.equivalence.record import ParityRecord, parts_of, recording
from torchdistpackage.families.found import TRAINED
from torchdistpackage.families.table import FoundModel
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.transformers_experts import share_experts
from torchdistpackage.models.transformers_stops import module_of
from torchdistpackage.models.transformers_vocab import SplitVocab
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.parallelize import parallelize
from torchdistpackage.thread_ranks.run import run_ranks
from torchdistpackage.tools.undisturbed import keep_random_states
from torchdistpackage.topology.mesh import Mesh, topology

_TOLERANCE = 1e-3
"""Of float32; what is wrong is off by much more."""
_SMALLEST = 1e-4
"""A gradient counts as this part of the largest one at least: of some there is but rounding."""
_LIMIT_S = 120.0
Gradients = dict[str, Tensor]


def try_tensor(model: Any, found: FoundModel, ids: Tensor, num_ranks: int) -> str | None:
    """Why so many ranks do not compute what `model` does; None: they do.

    model: a small copy in float32. found: what was read of it, with its cuts. ids (B, S).
    """
    copied = deepcopy(model).train(model.config.model_type in TRAINED)
    _move_away(copied)
    twins = [deepcopy(copied) for _ in range(num_ranks)]  # some keep what a forward has made
    expected = _alone(copied, ids, found.aliases)
    table, layouts = found.table, found.layouts

    stops: dict[int, str] = {}

    def on_rank(rank: int) -> ParityRecord:
        group = tpc.get_group("tensor")
        twin = twins[rank]
        record = ParityRecord({"tensor": rank})
        try:
            parallelize(twin, table, group)
            if found.shared_experts:
                share_experts(twin, layouts, tpc.get_group("expert"), group)
            _fill(twin, copied, found, layouts, group)
            with recording(parts_of(twin), record, first_call=True):
                logits = twin(input_ids=ids, use_cache=False, return_dict=True).logits
            if found.splits_head:
                logits = SplitVocab(group, found.sizes.vocab).join(logits)
            _loss(logits, ids).backward()
        except Exception as error:  # whatever the forward of a class that nobody has seen raises
            stops[rank] = module_of(error, twin)
            raise
        record.results = [logits.detach()]
        record.grads = _gradients(twin, found, layouts, group)
        return record

    layout = topology([("tensor", num_ranks)], num_ranks)
    run = run_ranks(on_rank, layout, limit_s=_LIMIT_S, queued=False)
    if run.finding is not None:
        where = next((stops[x] for x in run.finding.ranks if x in stops), type(model).__name__)
        return f"{num_ranks} ranks stop in {where} ({run.finding.kind})"
    records: list[ParityRecord] = list(run.results)  # type: ignore[arg-type]
    finding = _first_difference(expected, records, layouts)
    return None if finding is None else finding.brief


def _first_difference(
    whole: ParityRecord, records: Sequence[ParityRecord], layouts: Mapping[str, Layout]
) -> ParityFinding | None:
    """Return the first difference of the ranks from the copy, gradients by each rank's own part."""
    axes = {"tensor": len(records)}
    outputs = replace(whole, grads={})
    by = elementwise_within(_TOLERANCE)
    if (finding := first_difference(outputs, records, axes, by)) is not None:
        return finding
    mesh = Mesh((("tensor", len(records)),))
    largest = max(x.abs().max().item() for x in whole.grads.values())
    by = elementwise_within(_TOLERANCE, least_noise=_TOLERANCE * _SMALLEST * largest)
    for rank, record in enumerate(records):
        parts: Gradients = {}
        for name, x in whole.grads.items():
            parts[name] = torch.empty(local_shape(layouts[name], mesh, rank))
            copy_part(parts[name], x, layouts[name], mesh, rank)
        own = replace(record, initial=parts, modules={}, results=[])
        finding = first_difference(ParityRecord({}, grads=parts), [own], axes, by)
        if finding is not None:
            return finding
    return None


@torch.no_grad()
def _move_away(model: nn.Module) -> None:
    """Weights away from where they begin, so that what is zero there counts."""
    with keep_random_states():
        torch.manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def _alone(model: Any, ids: Tensor, aliases: Mapping[str, str]) -> ParityRecord:
    """Return what the copy computes in one process."""
    record = ParityRecord({})
    with recording(parts_of(model), record, first_call=True):
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
    model.zero_grad()
    _loss(logits, ids).backward()
    named = {aliases.get(name, name): p for name, p in model.named_parameters()}
    record.grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    model.zero_grad()
    record.results = [logits.detach()]
    return record


@torch.no_grad()
def _fill(
    twin: nn.Module,
    whole: nn.Module,
    found: FoundModel,
    layouts: Mapping[str, Layout],
    group: Group,
) -> None:
    """Parts that were made without values, as those of experts that ranks share."""
    if not found.shared_experts:
        return
    mesh, true = Mesh((("expert", 1), ("tensor", group.size()))), dict(whole.named_parameters())
    for name, parameter in twin.named_parameters():
        if layouts[name].view == "expert":
            copy_part(parameter, true[name], layouts[name], mesh, group.rank())


def _gradients(
    twin: nn.Module, found: FoundModel, layouts: Mapping[str, Layout], group: Group
) -> Gradients:
    """Those of this rank's parts, by the names of the model."""
    gradients: Gradients = {}
    for name, parameter in twin.named_parameters():
        own = found.aliases.get(name, name)
        if parameter.grad is not None:
            partial = bool(layouts[own].unreduced)
            g = parameter.grad
            gradients[own] = primitives.all_reduce(g.clone(), group) if partial else g
    return gradients
