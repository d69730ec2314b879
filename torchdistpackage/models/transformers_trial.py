"""Whether tensor ranks that share a model by rules compute what it does: tried on a small copy.

The ranks are threads of this process, which talk in memory (thread_ranks). Each splits the copy as
it would the model; logits and the gradient of every parameter are compared with the copy's own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.families.found import TRAINED, table_of
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
"""Of float32, relative to the largest element; what is wrong is off by much more."""
_SMALLEST = 1e-4
"""A gradient counts as this part of the largest one at least: of some there is but rounding."""
_LIMIT_S = 120.0
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class _UnsplitRun:
    """What the copy computes in one process. outputs: of its modules, in the order of calls."""

    logits: Tensor
    gradients: Gradients
    outputs: Mapping[str, Tensor]


def try_tensor(model: Any, found: FoundModel, ids: Tensor, num_ranks: int) -> str | None:
    """Why so many ranks do not compute what `model` does; None: they do.

    model: a small copy in float32. found: what was read of it, with its cuts. ids (B, S).
    """
    copied = deepcopy(model).train(model.config.model_type in TRAINED)
    _move_away(copied)
    twins = [deepcopy(copied) for _ in range(num_ranks)]  # some keep what a forward has made
    expected = _alone(copied, ids, found.aliases)
    table, layouts = table_of(found)

    stops: dict[int, str] = {}

    def on_rank(rank: int) -> tuple[Tensor, Gradients, str | None]:
        group = tpc.get_group("tensor")
        twin = twins[rank]
        try:
            parallelize(twin, table, group)
            if found.shared_experts:
                share_experts(twin, layouts, tpc.get_group("expert"), group)
            _fill(twin, copied, found, layouts, group)
            seen = dict[str, Tensor]()
            with _recorded(twin, seen):
                logits = twin(input_ids=ids, use_cache=False, return_dict=True).logits
            if found.cuts.head:
                logits = SplitVocab(group, found.sizes.vocab).join(logits)
            _loss(logits, ids).backward()
        except Exception as error:  # whatever the forward of a class that nobody has seen raises
            stops[rank] = module_of(error, twin)
            raise
        gradients = _gradients(twin, found, layouts, group)
        return logits.detach(), gradients, _first_difference(seen, expected.outputs)

    layout = topology([("tensor", num_ranks)], num_ranks)
    run = run_ranks(on_rank, layout, limit_s=_LIMIT_S, queued=False)
    if run.finding is not None:
        where = next((stops[x] for x in run.finding.ranks if x in stops), type(model).__name__)
        return f"{num_ranks} ranks stop in {where} ({run.finding.kind})"
    mesh = Mesh((("tensor", num_ranks),))
    for rank, (logits, gradients, differs) in enumerate(run.results):  # type: ignore[misc]
        if (off := _distance(logits, expected.logits)) > _TOLERANCE:
            where = differs or "its logits"
            return f"the first that differs is {where}, and the logits are off by {off:.1e}"
        least = _SMALLEST * max(x.abs().max().item() for x in expected.gradients.values())
        for name, whole in expected.gradients.items():
            part = torch.empty(local_shape(layouts[name], mesh, rank))
            copy_part(part, whole, layouts[name], mesh, rank)
            if name not in gradients:
                return f"{name} has no gradient on rank {rank}"
            if (off := _distance(gradients[name], part, least)) > _TOLERANCE:
                return f"the gradient of {name} is off by {off:.1e}"
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


def _alone(model: Any, ids: Tensor, aliases: Mapping[str, str]) -> _UnsplitRun:
    seen = dict[str, Tensor]()
    with _recorded(model, seen):
        logits = model(input_ids=ids, use_cache=False, return_dict=True).logits
    model.zero_grad()
    _loss(logits, ids).backward()
    named = {aliases.get(name, name): p for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    model.zero_grad()
    return _UnsplitRun(logits.detach(), gradients, seen)


@contextmanager
def _recorded(model: nn.Module, seen: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the first tensor of each module's first output is put into `seen` by its path."""

    def note(path: str, module: nn.Module, args: object, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and path not in seen:
            seen[path] = first.detach()

    named = model.named_modules()
    handles = [m.register_forward_hook(partial(note, path)) for path, m in named if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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


def _first_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    for path, x in expected.items():
        y = found.get(path)
        if y is not None and y.shape == x.shape and _distance(y, x) > _TOLERANCE:
            return path
    return None


def _distance(found: Tensor, expected: Tensor, least: float = 1e-6) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not found.is_floating_point() or not expected.numel():
        return float((found != expected).any())
    scale = expected.abs().max().clamp(min=least)
    return ((found - expected).abs().max() / scale).item()
