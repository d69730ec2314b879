"""Find how the ranks of a context group can share the sequences of a class of transformers.

Two ranks, threads of this process, run a small copy on their parts of a sequence; logits and the
gradient of every parameter are compared with the copy's own. The first trial is of our own
attention. Where a module's output differs though what it is given does not, the next one lets its
states cross the ranks, if it is a recurrent layer of a known form, and else, or if that is not
right either, gives it the whole sequence; after these, attention is the class's own function over
all keys.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.head_tasks import ModelHead
from torchdistpackage.families.found import TRAINED
from torchdistpackage.families.table import ContextWay
from torchdistpackage.models.transformers_calls import arguments_of
from torchdistpackage.models.transformers_meta import ALONE
from torchdistpackage.models.transformers_small import (
    Sample,
    module_of,
    moved_away,
    sample_ids,
    small_models,
)
from torchdistpackage.parallel.context.hugging_face import (
    ATTENDS,
    attend_over,
    attending,
    inputs_of,
    makes_positions,
)
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.order import SequenceOrder
from torchdistpackage.parallel.context.recurrent import has_form
from torchdistpackage.parallel.context.sequence import gather_sequence
from torchdistpackage.thread_ranks.run import run_ranks
from torchdistpackage.topology.mesh import topology

NUM_RANKS = 2
_TOLERANCE = 1e-3
"""Largest difference in float32 that counts as equal; a wrong way differs by much more."""
_SMALLEST = 1e-4
"""A gradient counts as this part of the largest one at least."""
_MOST_TRIALS = 8
_LIMIT_S = 120.0


@dataclass
class _Watched:
    """What the modules of one copy were given and returned, by (path, number of the call), in the
    order in which the calls ended."""

    calls: dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]] = field(
        default_factory=dict[tuple[str, int], tuple[list[Tensor], list[Tensor]]]
    )
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    grads: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def watch(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            if path and not isinstance(module, nn.ModuleList):
                module.register_forward_hook(self._note(path), with_kwargs=True)

    def _note(self, path: str) -> Any:
        def behind(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            number = 0
            while (path, number) in self.calls:
                number += 1
            tensors_in, made = (
                [x.detach().clone() for x in leaves_of(value) if isinstance(x, Tensor)]
                for value in ((args, kwargs), output)
            )
            self.calls[path, number] = tensors_in, made

        return behind


@dataclass(frozen=True)
class _ContextDifference:
    """A difference of ranks from one process. path: of the module; empty: none is to blame."""

    path: str
    text: str


def found_context(config_dict: Mapping[str, Any], head: ModelHead | None = None) -> ContextWay:
    """Return how context ranks share the sequences of the model of a config.json."""
    return _found(json.dumps(dict(config_dict), sort_keys=True, default=str), head)


@lru_cache(maxsize=8)
def _found(text: str, head: ModelHead | None) -> ContextWay:
    config_dict = json.loads(text)
    problem = f"transformers makes no small copy of {config_dict.get('model_type')} to try it on"
    with ALONE:
        for small in small_models(config_dict, head=head):
            way = try_context(small, Sample(sample_ids(small.config)[:1], is_causal=head is None))
            if not way.problem:
                return way
            problem = way.problem
    return ContextWay(problem=problem)


def try_context(model: Any, sample: Sample) -> ContextWay:
    """Return the first way in which ranks compute what `model`, a small copy in float32, does."""
    copied = moved_away(model).train(model.config.model_type in TRAINED)
    expected = _alone(copied, sample)
    begins = [ContextWay(), ContextWay("keys")]
    if arguments_of(copied, {"position_ids": None}):  # its own may begin at another number
        begins += [replace(way, positions=False) for way in begins]
    problem = ""
    for begin in begins:
        way = _gathering(copied, sample, begin, expected)
        if not way.problem and way.gathered:
            way = _swapping(copied, sample, way, expected)
        if not way.problem:
            return way
        problem = problem or way.problem
    return ContextWay(problem=problem)


def _alone(model: Any, sample: Sample) -> _Watched:
    """Return what the copy computes in one process."""
    record, alone = _Watched(), deepcopy(model)
    record.watch(alone)
    logits = sample.outputs(alone)
    sample.loss(logits).backward()
    record.logits = logits.detach()
    record.grads = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    return record


def _swapping(model: Any, sample: Sample, way: ContextWay, alone: _Watched) -> ContextWay:
    """Return `way` as it is where gathered modules may get all of some samples, or without that, or
    with the problem of two samples.

    alone: what the copy computes of one sample.
    """
    two = replace(sample, ids=torch.cat((sample.ids, sample.ids.flip(1))))
    expected = _alone(model, two)
    difference = None
    for swaps in (True, False):
        if swaps and _shares_arguments(model, way, alone):
            continue
        tried = replace(way, swaps=swaps)
        if (difference := _tried(model, two, tried, expected, set())) is None:
            return tried
    text = "" if difference is None else difference.text
    return replace(way, problem=text)


def _shares_arguments(model: nn.Module, way: ContextWay, alone: _Watched) -> bool:
    """Return whether a gathered module is given a tensor whose first dim is not that of samples: it
    might have as many rows as a run has samples.

    alone: the calls for one sample.
    """
    return any(
        x.dim() >= 2 and x.shape[0] not in (1, alone.logits.shape[1])
        for (path, _), (tensors, _) in alone.calls.items()
        if type(model.get_submodule(path)).__name__ in way.gathered
        for x in tensors
    )


def _gathering(model: Any, sample: Sample, way: ContextWay, expected: _Watched) -> ContextWay:
    """Return `way` with the modules that are scanned or gathered, or with the problem left."""
    for _ in range(_MOST_TRIALS):
        attends = set[str]()
        difference = _tried(model, sample, way, expected, attends)
        if difference is None:
            return way
        if not difference.path and way.scanned:  # as where states change outputs less than rounding
            way = replace(way, scanned=(), gathered=(*way.gathered, *way.scanned))
            continue
        module_class = type(model.get_submodule(difference.path))
        kind = module_class.__name__
        is_for_keys = difference.path in attends and way.attends == "parts"
        if (
            not difference.path
            or is_for_keys
            or kind in way.gathered
            or not _is_inside_a_block(model, difference.path)
        ):
            return replace(way, problem=difference.text)
        if kind not in way.scanned and has_form(module_class):
            way = replace(way, scanned=(*way.scanned, kind))
            continue
        scanned = tuple(x for x in way.scanned if x != kind)
        way = replace(way, scanned=scanned, gathered=(*way.gathered, kind))
    name = type(model).__name__
    problem = f"{name} mixes tokens in more than {_MOST_TRIALS} kinds of modules"
    return replace(way, problem=problem)


def _is_inside_a_block(model: nn.Module, path: str) -> bool:
    """Return whether a module is neither the model, its base class nor one of its blocks, nor
    holds them: what is gathered is to be a part of a layer."""
    module = model.get_submodule(path)
    if any(isinstance(x, nn.ModuleList) and len(x) > 1 for x in module.modules()):
        return False
    return not path.rpartition(".")[2].isdigit()


def _tried(
    model: Any, sample: Sample, way: ContextWay, expected: _Watched, attends: set[str]
) -> _ContextDifference | None:
    """Return where two ranks differ, or None. attends: gets the paths of modules that call
    transformers' attention functions."""
    twins = [deepcopy(model) for _ in range(NUM_RANKS)]
    stops: dict[int, str] = {}
    length = sample.ids.shape[1]

    def on_rank(rank: int) -> _Watched:
        group = tpc.get_group("context")
        sequence, twin, record = ContextSequence(group, "all_gather"), twins[rank], _Watched()
        record.watch(twin)
        attend_over(twin, sequence, way.attends, way.gathered, way.swaps, way.scanned)
        try:
            ids = sequence.part(sample.ids)
            mask, positions = inputs_of(
                sequence, way.attends, ids.shape[1], len(ids), None, ids.device
            )
            arguments = {"position_ids": positions} if way.positions else {}
            arguments = arguments_of(twin, arguments | {"use_cache": False})
            arguments |= {} if mask is None else {"attention_mask": mask}
            with attending(sequence, None):
                output = twin(input_ids=ids, return_dict=True, **arguments)
            outputs = output.logits if hasattr(output, "logits") else output.last_hidden_state
            logits = gather_sequence(outputs, 1, seq_len=length, group=group)
            sample.loss(logits).backward()
            record.logits = logits.detach()
        except Exception as error:  # whatever the forward of a class that nobody has seen raises
            stops[rank] = module_of(error, twin)
            raise
        for name, parameter in twin.named_parameters():
            if parameter.grad is not None:
                record.grads[name] = primitives.all_reduce(parameter.grad.clone(), group)
        return record

    layout = topology([("context", NUM_RANKS)], NUM_RANKS)
    run = run_ranks(on_rank, layout, limit_s=_LIMIT_S, queued=False)
    for path, module in twins[0].named_modules():
        if module.__dict__.get(ATTENDS):
            attends.add(path)
    if run.finding is not None:
        where = next((stops[x] for x in run.finding.ranks if x in stops), type(model).__name__)
        text = f"{NUM_RANKS} ranks with parts of a sequence stop in {where}"
        path = where.partition(" ")[0]
        return _ContextDifference(path if path in dict(model.named_modules()) else "", text)
    records: list[_Watched] = list(run.results)  # type: ignore[arg-type]
    order = SequenceOrder(length, NUM_RANKS)
    if _is_right(expected, records):
        return None
    for (path, number), (tensors_in, made) in expected.calls.items():
        parts = [record.calls.get((path, number), ([], [])) for record in records]
        kind = type(model.get_submodule(path)).__name__
        ids = not makes_positions(kind)
        inputs = [
            _off(x, [p[0][i : i + 1] for p in parts], order)
            for i, x in enumerate(tensors_in)
            if ids or x.is_floating_point()
        ]
        outputs = [_off(x, [p[1][i : i + 1] for p in parts], order) for i, x in enumerate(made)]
        if max(inputs, default=0.0) <= _TOLERANCE < max(outputs, default=0.0):
            text = (
                f"{path} ({kind}) of a small copy does not compute on {NUM_RANKS} ranks what it "
                f"does on the whole sequence: it differs by {max(outputs):.1e} of its largest "
                f"number"
            )
            return _ContextDifference(path, text)
    return _ContextDifference("", _gradient_text(model, expected, records))


def _off(full: Tensor, parts: Sequence[Sequence[Tensor]], order: SequenceOrder) -> float:
    """Return how much the ranks' parts differ from a tensor of the whole sequence, relative to its
    largest number; 0 where they cannot be compared, as masks."""
    if not all(parts):
        return 0.0
    if not (
        full.is_floating_point() or full.is_complex()
    ):  # ids and positions: any difference counts
        full, parts = full.double(), [[part[0].double()] for part in parts]
    slices = [part[0] for part in parts]
    num = order.lengths[0]
    for dim in (1, 0):
        if full.dim() > dim and full.shape[dim] == order.seq_len:
            expected_shape = (*full.shape[:dim], num, *full.shape[dim + 1 :])
            if any(x.shape != expected_shape for x in slices):
                return 0.0
            worst = 0.0
            for x, ranges in zip(slices, order.parts, strict=True):
                expected = torch.cat([full.narrow(dim, r.start, len(r)) for r in ranges], dim)
                worst = max(worst, float((x - expected).abs().max()))
            return worst / max(float(full.abs().max()), 1e-6)
    if any(x.shape != full.shape for x in slices):
        return 0.0
    return max(float((x - full).abs().max()) for x in slices) / max(float(full.abs().max()), 1e-6)


def _is_right(expected: _Watched, records: Sequence[_Watched]) -> bool:
    """Return whether logits and gradients of all ranks are those of one process."""
    largest = max(float(x.abs().max()) for x in expected.grads.values())
    for record in records:
        off = (record.logits - expected.logits).abs().max()
        if float(off) > _TOLERANCE * float(expected.logits.abs().max()):
            return False
        if record.grads.keys() != expected.grads.keys():
            return False
        for name, x in expected.grads.items():
            least = max(float(x.abs().max()), _SMALLEST * largest)
            if float((record.grads[name] - x).abs().max()) > _TOLERANCE * least:
                return False
    return True


def _gradient_text(model: Any, expected: _Watched, records: Sequence[_Watched]) -> str:
    worst, where = 0.0, type(model).__name__
    for name, x in expected.grads.items():
        scale = max(float(x.abs().max()), 1e-6)
        for record in records:
            off = float((record.grads.get(name, torch.zeros_like(x)) - x).abs().max()) / scale
            if off > worst:
                worst, where = off, name
    return (
        f"on {NUM_RANKS} ranks the gradient of {where} of a small copy of {type(model).__name__} "
        f"differs by {worst:.1e} of its largest number"
    )
