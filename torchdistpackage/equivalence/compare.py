"""Find the first difference between steps that should be equal: module, size and usual cause.

`tdp prove` compares the ranks of a layout with one process, a trial of a split or of stages what
they compute with what the model alone does.

What is looked at comes in the order in which a step makes it: the first weights, the data, modules
on the way forward from the outermost inwards, the loss, gradients from the loss backwards, dropout,
buffers, the norm, and the weights after the last step. The first difference is the finding; those
that follow from it are not told.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, zip_longest

from torch import Tensor

from torchdistpackage.equivalence.arrivals import lost_row, uneven_scalar
from torchdistpackage.equivalence.backward import backward_culprit
from torchdistpackage.equivalence.causes import CAUSES, Stage
from torchdistpackage.equivalence.factor import factor_of, ratio_text
from torchdistpackage.equivalence.match import (
    PARTS,
    TOLERANCE,
    WITH_SINGLE,
    Measure,
    difference,
    missing_place,
    rows_found,
)
from torchdistpackage.equivalence.placed import (
    STATE,
    Placed,
    assembled,
    copies_differ,
    full_tensors,
    worst_gap,
)
from torchdistpackage.equivalence.record import DATA, LOSS, ParityRecord
from torchdistpackage.errors import DataError

Axes = Mapping[str, int]

SPLITS_BATCH = ("data", "expert_data", "expert")
"""Axes whose ranks have different samples."""


WHOLE_MODEL = "the model"
"""Name of a finding that names no module inside the model."""
ITS_STEP = "its step"
"""Text for the difference if a rank raised an error."""


@dataclass(frozen=True, slots=True)
class ParityFinding:
    """The first difference of a layout.

    module: where; what: of it. excess: the difference, over the largest number of the whole.
    rank: the one that differs most. cause: the usual one, as a sentence. detail: the traceback of a
        rank that raised.
    stage: the part of a run in which it shows. kind: the key of the cause in `CAUSES`; empty for an
        error. axis: those along which ranks differ from one process, as `data` or
        `data and tensor`. factor: how the ranks' numbers follow from the right ones: `x 2`, `/ 2`,
        `missing on rank 1`; empty if they do not.
    """

    module: str
    what: str
    excess: float | None
    rank: int
    cause: str
    detail: str = ""
    stage: Stage = "error"
    kind: str = ""
    axis: str = ""
    factor: str = ""

    def __str__(self) -> str:
        if self.what == ITS_STEP:
            return f"{self.module}: rank {self.rank} ends by {self.cause}"
        return (
            f"{self.module}: {self.what} of rank {self.rank} differ{self._by()}; usual cause: "
            f"{self.cause}"
        )

    @property
    def brief(self) -> str:
        """Return the module, the difference and its size: the text of every refusal of a split."""
        return f"{self.module}: {self.what} differ{self._by()}"

    def _by(self) -> str:
        factor = f" ({self.factor})" if self.factor else ""
        return (
            factor
            if self.excess is None
            else f" by {self.excess:.1e} of its largest number{factor}"
        )


def finding_of(
    stage: Stage,
    module: str,
    subject: str,
    worst: tuple[float | None, int],
    kind: str,
    more: str = "",
    factor: str = "",
) -> ParityFinding:
    """Return a finding with the sentence of its kind; more: the end of the sentence."""
    excess, rank = worst
    return ParityFinding(
        module, subject, excess, rank, CAUSES[kind] + more, stage=stage, kind=kind, factor=factor
    )


def first_difference(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure = PARTS
) -> ParityFinding | None:
    """Return the first difference of the records of a layout from that of one process, or None.

    axes: those with several ranks. measure: how tensors are compared, and when they differ.
    """
    finding = _first_difference(reference, ranks, axes, measure)
    if finding is not None and measure is PARTS and reference.singles:
        # numbers that differ in their last bit may round to two neighbours in float32
        finding = _first_difference(reference, ranks, axes, WITH_SINGLE)
    return finding


def _first_difference(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    for rank, record in enumerate(ranks):
        if record.error:
            module = _module_in(record.error, reference)
            message = record.error.removeprefix(f"{module}: ")
            finding = ParityFinding(module, ITS_STEP, None, rank, message, record.error_detail)
            # one process reads the same data without an error
            if message.startswith(DataError.__name__):
                finding = replace(finding, module=DATA, stage="samples", kind="order of data")
            return replace(finding, axis=" and ".join(axes))
    if any(record.placed_grads for record in ranks):
        # ZeRO leaves shards, which are compared as the full gradients that they make
        grads = assembled(reference.grads, [record.placed_grads for record in ranks])
        ranks = [replace(record, grads=grads) for record in ranks]
    looks = (
        _initial,
        _data,
        _labels,
        _moved,
        _casts,
        _arrivals,
        _forward,
        _loss,
        _grads,
        _buffers,
        _first_norm,
        _rates,
        _scale,
        _first_update,
        _norm,
        _weights,
        _states,
        _dropout,
        _stopped,
        _loaded,
    )
    findings = (x for look in looks if (x := look(reference, ranks, axes, measure)) is not None)
    first = next(findings, None)
    if first is None or first.axis:
        return first
    return replace(first, axis=" and ".join(axes))


def _module_in(text: str, reference: ParityRecord) -> str:
    """Return the module at the beginning of the text (`told_where` puts it there), else one whose
    name is in the text.
    """
    at = text.partition(": ")[0]
    if at in reference.modules and at:
        return at
    return next((name for name in reference.modules if name and name in text), WHOLE_MODEL)


def _owner(name: str) -> str:
    """Return the module of a parameter."""
    return name.rpartition(".")[0] or WHOLE_MODEL


def _worst(
    reference: Mapping[str, Tensor],
    by_rank: Iterable[Mapping[str, Tensor]],
    name: str,
    measure: Measure,
    noise: float = 0.0,
) -> tuple[float | None, int] | None:
    """Return the largest difference of the ranks' tensors of this name, and the rank; None: all
    fit.

    noise: a difference of so much in any element is rounding.
    """
    if noise and reference[name].numel():
        noise /= max(float(reference[name].abs().max()), 1e-30)
    differences: list[tuple[float, int]] = []
    for rank, tensors in enumerate(by_rank):
        if name in tensors:
            gap = measure.apart(tensors[name], reference[name])
            differences.append((float("inf") if gap is None else gap, rank))
    worst, rank = max(differences, default=(0.0, 0))
    if worst <= max(measure.tolerance, noise):
        return None
    return (None if worst == float("inf") else worst), rank


def _largest(tensors: Mapping[str, Tensor]) -> float:
    """Return the largest absolute value in these tensors."""
    return max((float(x.abs().max()) for x in tensors.values() if x.numel()), default=0.0)


def _initial(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the initial weights."""
    for name in reference.initial:
        if (
            worst := _worst(reference.initial, (r.initial for r in ranks), name, measure)
        ) is not None:
            subject = f"the first weights ({name})"
            return finding_of("start", _owner(name), subject, worst, "initial weights")
    return None


def _data(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the samples that the ranks read."""
    if not reference.inputs or not any(record.inputs for record in ranks):
        return None
    for number, tensor in enumerate(reference.inputs):
        fed = [(rank, r.inputs[number]) for rank, r in enumerate(ranks) if len(r.inputs) > number]
        for rank, samples in fed:
            gap = difference(samples, tensor)
            if gap is not None and gap > TOLERANCE:
                return finding_of("samples", DATA, "samples", (gap, rank), "order of data")
        read_rows = set().union(*(rows_found(samples, tensor) for _, samples in fed))
        if fed and any(samples.shape[1:] == tensor.shape[1:] for _, samples in fed):
            missing = sorted(set(range(tensor.shape[0])) - read_rows)
            if missing:
                more = f": sample {missing[0]} is on no rank"
                last = fed[-1][0]
                return finding_of("samples", DATA, "samples", (None, last), "same samples", more)
    return None


def _labels(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the targets of the ranks' micro-batches."""
    for tensor in reference.targets[:1]:
        for rank, record in enumerate(ranks):
            for targets in record.targets[:1]:
                gap = difference(targets, tensor)
                if gap is not None and gap > TOLERANCE:
                    return finding_of("samples", DATA, "targets", (gap, rank), "labels")
    return None


def _moved(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Find weights that change before the update of the first step."""
    for rank, record in enumerate(ranks):
        for name in record.moved:
            if name not in reference.moved:
                subject = f"weights before the update ({name})"
                return finding_of("update", _owner(name), subject, (None, rank), "updated weights")
    return None


def _arrivals(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Find rows that no stage received, with another row in their place."""
    if "pipe" not in axes or (lost := lost_row(reference, ranks)) is None:
        return None
    module, rank, row = lost
    more = f": row {row} is on no rank"
    return finding_of("forward", module, "inputs", (None, rank), "stale activations", more)


def _forward(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the outputs of modules, from the outermost inwards."""
    wrong = {
        n: x for n in reference.modules if (x := _output(reference, ranks, n, measure)) is not None
    }
    if reference.results:
        # where what comes out is known, a module inside counts only if that differs
        if (worst := _results(reference, ranks, measure)) is None:
            return None
        wrong[""] = worst
    # a part of a sum is as it should be; whether somebody adds it up, its parent shows
    partial = {name for name in wrong if _is_partial(reference, ranks, name, measure)}
    tops = [n for n in wrong if not any(_is_inside(n, x) for x in reference.modules if x != n)]
    if not tops:
        return None
    if "pipe" in axes:
        # a block that a border cuts shows nothing; what is in it comes before later blocks
        outer = {x for x in reference.modules if not _is_cut(x, ranks)}
        tops = [
            n
            for n in wrong
            if n in tops or not (n in partial or any(_is_inside(n, x) for x in outer - {n}))
        ]
    module = "" if "" in wrong else tops[0]
    while inner := [
        x for x in wrong if x not in partial and x != module and _level(x, module, reference)
    ]:
        # what is wrong because its inputs are, comes of its parent's own lines
        right = [name for name in inner if _has_right_inputs(reference, ranks, name, measure)]
        right = right or [
            name for name in inner if _has_right_inputs(reference, ranks, name, measure, False)
        ]
        if not right:
            break
        module = right[0]
    sums = any(_is_inside(name, module) for name in partial)
    kind = _forward_kind(reference, ranks, module, axes, sums, measure)
    if "pipe" in axes and module and not _has_right_inputs(reference, ranks, module, measure):
        kind = "message changed"
    factor = ""
    if module in reference.modules and (full := reference.modules[module].outputs):
        firsts = {
            rank: r.modules[module].outputs[0]
            for rank, r in enumerate(ranks)
            if module in r.modules and r.modules[module].outputs
        }
        factor = factor_of(firsts, full[0], axes)
    return finding_of("forward", module or WHOLE_MODEL, "outputs", wrong[module], kind, "", factor)


def _results(
    reference: ParityRecord, ranks: Sequence[ParityRecord], measure: Measure
) -> tuple[float | None, int] | None:
    """Return how far the model's outputs are off, and on which rank; None: all are right."""
    for number, full in enumerate(reference.results):
        gaps = (measure.apart(record.results[number], full) for record in ranks)
        differences = [(float("inf") if x is None else x, rank) for rank, x in enumerate(gaps)]
        worst, rank = max(differences)
        if worst > measure.tolerance:
            return (None if worst == float("inf") else worst), rank
    return None


def _has_right_inputs(
    reference: ParityRecord,
    ranks: Sequence[ParityRecord],
    name: str,
    measure: Measure,
    with_tables: bool = True,
) -> bool:
    """Return True if the inputs of a module are right on all ranks.

    with_tables: else only those of the first one's shape, and not masks and positions.
    """
    by_rank = [r.modules[name].inputs for r in ranks if name in r.modules]
    full = reference.modules[name].inputs
    if not with_tables and not (full and full[0].is_floating_point()):
        return False
    chosen = [with_tables or x.shape == full[0].shape for x in full]
    gaps = [
        _lists([*compress(inputs, chosen)], [*compress(full, chosen)], measure)
        for inputs in by_rank
    ]
    firsts = [x[0] for x in by_rank if x]
    is_right = all(x is None or x <= measure.tolerance for x in gaps)
    return is_right and not _is_missing(firsts, full, measure)


def _is_cut(name: str, ranks: Sequence[ParityRecord]) -> bool:
    """Return True if ranks with a module have other modules inside it."""
    inside = [
        {x for x in record.modules if _is_inside(x, name)}
        for record in ranks
        if name in record.modules
    ]
    return any(x != inside[0] for x in inside)


def _is_inside(name: str, other: str) -> bool:
    """Return True if the module `name` is inside `other`."""
    return other == "" or name.startswith(f"{other}.")


def _level(name: str, parent: str, reference: ParityRecord) -> bool:
    """Return True if a module is inside another one with no known module in between."""
    if not _is_inside(name, parent):
        return False
    between = (x for x in reference.modules if x not in (name, parent))
    return not any(_is_inside(name, x) and _is_inside(x, parent) and x != "" for x in between)


def _output(
    reference: ParityRecord, ranks: Sequence[ParityRecord], name: str, measure: Measure
) -> tuple[float | None, int] | None:
    """Return the largest difference of a module's outputs, and the rank; None: all fit."""
    differences: list[tuple[float, int]] = []
    for rank, record in enumerate(ranks):
        # a block that a border between stages cuts is not whole on either
        parts = (x for x in reference.modules if _is_inside(x, name))
        if name in record.modules and all(x in record.modules for x in parts):
            gap = _lists(record.modules[name].outputs, reference.modules[name].outputs, measure)
            if gap is not None:
                differences.append((gap, rank))
    worst, rank = max(differences, default=(0.0, 0))
    if worst > measure.tolerance:
        return worst, rank
    if _is_missing(_first_outputs(ranks, name), reference.modules[name].outputs, measure):
        return None, differences[-1][1]  # each is a part, and another one is on no rank
    return None


def _is_missing(tensors: Sequence[Tensor], full: Sequence[Tensor], measure: Measure) -> bool:
    """Return True if the ranks hold slices of a tensor and some slice is on no rank."""
    if not measure.finds_parts:
        return False
    parts = [x for x in tensors if full and measure.apart(x, full[0]) is not None]
    return bool(parts) and len(parts) == len(tensors) and missing_place(parts, full[0])


def _lists(
    tensors: Sequence[Tensor], reference: Sequence[Tensor], measure: Measure
) -> float | None:
    """Return the largest difference of tensors that can be compared."""
    gaps = [measure.apart(a, b) for a, b in zip(tensors, reference, strict=False)]
    return max((x for x in gaps if x is not None), default=None)


def _first_outputs(ranks: Sequence[ParityRecord], name: str) -> list[Tensor]:
    """Return the first output of a module on each rank that has it."""
    calls = [r.modules[name].outputs for r in ranks if name in r.modules]
    return [outputs[0] for outputs in calls if outputs]


def _is_partial(
    reference: ParityRecord, ranks: Sequence[ParityRecord], name: str, measure: Measure
) -> bool:
    """Return True if the ranks' outputs of a module add up to the full one."""
    if name not in reference.modules:
        return False
    outputs, full = _first_outputs(ranks, name), reference.modules[name].outputs
    if len(outputs) < 2 or not full or any(x.shape != full[0].shape for x in outputs):
        return False
    if not full[0].is_floating_point() or all(x.equal(outputs[0]) for x in outputs):
        return False  # what all ranks have alike is divided by their number
    # in float64, so that the order of the ranks does not change the comparison
    total = sum((x.double() for x in outputs), start=0 * full[0].double())
    return float((total - full[0]).abs().max()) <= measure.tolerance * float(full[0].abs().max())


def _forward_kind(
    reference: ParityRecord,
    ranks: Sequence[ParityRecord],
    name: str,
    axes: Axes,
    sums: bool,
    measure: Measure,
) -> str:
    """Return the kind of mistake that makes outputs wrong.

    sums: the outputs of a module inside add up to the whole one's.
    """
    outputs = _first_outputs(ranks, name)
    all_equal = all(x.shape == outputs[0].shape and bool((x == outputs[0]).all()) for x in outputs)
    if (sums and not all_equal) or _is_partial(reference, ranks, name, measure):
        return "sum is missing"
    if sums or _are_shifted(outputs, reference.modules[name].outputs if name else ()):
        return "added on every rank"
    short_name = name.rpartition(".")[2].lower()
    if "norm" in short_name or short_name in ("ln", "bn"):
        return "norm over a shard"
    if "context" in axes or any(part in short_name for part in ("pos", "mask", "att", "rotary")):
        return "mask or positions"
    if set(axes) & set(SPLITS_BATCH):
        return "statistics of a rank"
    return "wrong sum"


def _are_shifted(outputs: Sequence[Tensor], full: Sequence[Tensor]) -> bool:
    """Return True if all rows of a module's outputs are off by one vector, as by a bias."""
    if not outputs or not full or full[0].dim() < 2 or not full[0].is_floating_point():
        return False
    if any(x.shape != full[0].shape for x in outputs):
        return False
    gaps = [(x - full[0]).flatten(0, -2) for x in outputs]
    largest = TOLERANCE * float(full[0].abs().max())
    if len(gaps[0]) < 2 or all(float(gap.abs().max()) <= largest for gap in gaps):
        return False
    return all(float((gap - gap[0]).abs().max()) <= largest for gap in gaps)


def _loss(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the losses."""
    losses_of_ranks = [record.losses for record in ranks if record.losses]
    if not losses_of_ranks or not reference.losses:
        return None
    mean = sum(losses[0] for losses in losses_of_ranks) / len(losses_of_ranks)
    gap = abs(mean - reference.losses[0]) / max(abs(reference.losses[0]), 1e-30)
    if gap <= measure.tolerance:
        return None
    ratio = mean / reference.losses[0] if reference.losses[0] else 0.0
    is_scaled = any(abs(ratio - f) < 1e-6 for n in _sizes(axes) for f in (n, 1 / n))
    worst = max(
        range(len(losses_of_ranks)), key=lambda i: abs(losses_of_ranks[i][0] - reference.losses[0])
    )
    splits_tokens = {*SPLITS_BATCH, "context", "accumulation"} & set(axes)
    kind, more = "uneven means" if splits_tokens or not axes else "loss of a shard", ""
    if set(axes) == {"pipe"}:
        kind = "other targets"
    if is_scaled:
        kind, more = "scaled loss", f": it is {ratio:.4g} times"
    factor = ratio_text(ratio, axes)
    return finding_of("loss", LOSS, "the loss", (gap, worst), kind, more, factor)


def _sizes(axes: Axes) -> list[int]:
    """Return the sizes of the axes, and their product."""
    sizes = [size for size in axes.values() if size > 1]
    product = 1
    for size in sizes:
        product *= size
    return [*sizes, product]


def _grads(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the gradients, without the effect of clipping."""
    unclipped, factors = _without_clipping(reference, ranks, measure)
    finding = _first_grad(reference, unclipped, axes, measure)
    wrong = {rank: x for rank, x in factors.items() if abs(x - 1) > measure.tolerance}
    if finding is not None or not wrong:
        return finding
    # all are right but for one factor on each rank
    rank = max(wrong, key=lambda each: abs(wrong[each] - 1))
    sizes = _sizes(axes)
    if any(abs(wrong[rank] * x - 1) < 1e-6 for n in sizes for x in (n, 1 / n)):
        return _first_grad(reference, ranks, axes, measure)
    where, what = "the gradient norm", "what clipping multiplies gradients by"
    gap, factor = abs(wrong[rank] - 1), ratio_text(wrong[rank], axes)
    return finding_of("norm", where, what, (gap, rank), "norm", "", factor)


def _without_clipping(
    reference: ParityRecord, ranks: Sequence[ParityRecord], measure: Measure
) -> tuple[Sequence[ParityRecord], Mapping[int, float]]:
    """Return the records with gradients from before clipping by the norm, and by rank what clipping
    has multiplied them by; the records themselves and no factors if clipping is not the cause.

    One wrong gradient changes the norm, and so all gradients by one factor. If all differ, and some
    fit once that factor is taken out, the others are those that were wrong.
    """
    noise = max(measure.noise * _largest(reference.grads), measure.least_noise)
    names = [name for name, x in reference.grads.items() if float(x.abs().max()) > noise]

    def wrong(kept_records: Sequence[ParityRecord]) -> list[str]:
        return [
            n
            for n in names
            if _worst(reference.grads, (r.grads for r in kept_records), n, measure, noise)
        ]

    if len(names) < 2 or len(wrong(ranks)) < len(names):
        return ranks, {}
    scaled, by_rank = list[ParityRecord](), dict[int, float]()
    for rank, record in enumerate(ranks):
        same = [
            n
            for n in names
            if n in record.grads and record.grads[n].shape == reference.grads[n].shape
        ]
        factors = sorted(_factor(record.grads[n], reference.grads[n]) for n in same)
        factor = factors[len(factors) // 2] if factors else 1.0
        by_rank[rank] = factor
        grads = {n: x / factor for n, x in record.grads.items()} if factor > 0 else record.grads
        scaled.append(replace(record, grads=grads))
    return (scaled, by_rank) if len(wrong(scaled)) < len(names) else (ranks, {})


def _factor(tensor: Tensor, reference: Tensor) -> float:
    """Return by how much the first tensor is longer along the second."""
    # float64, because factors such as 0.9997 must be told from rounding
    tensor, reference = tensor.double().flatten(), reference.double().flatten()
    return float(tensor @ reference / (reference @ reference))


def _first_grad(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the gradients, from the loss backwards."""
    order = {name: position for position, name in enumerate(reference.modules)}
    names = sorted(reference.grads, key=lambda name: order.get(name.rpartition(".")[0], -1))
    # a gradient that is zero by nature, as of a bias of keys, is what rounding leaves of a sum
    noise = max(measure.noise * _largest(reference.grads), measure.least_noise)
    for name in reversed(names):  # the backward comes to the last module first
        # ZeRO leaves a rank no whole gradient of any parameter
        held_by = [(i, r) for i, r in enumerate(ranks) if r.grads and name in r.initial]
        missing = [i for i, r in held_by if name not in r.grads]
        if missing:
            subject, worst = f"no gradient ({name})", (None, missing[0])
            factor = f"missing on rank {missing[0]}"
            return finding_of("gradient", _owner(name), subject, worst, "not reached", "", factor)
        if (
            worst := _worst(reference.grads, (r.grads for r in ranks), name, measure, noise)
        ) is not None:
            grads = {i: r.grads[name] for i, r in enumerate(ranks) if name in r.grads}
            early = reference.early.get(name)
            kind, more = _grad_kind(reference.grads[name], [*grads.values()], axes, early)
            if kind == "wrong backward" and copies_differ(name, [r.placed_grads for r in ranks]):
                kind, more = "gradient not summed", f" over all of {' and '.join(axes)}"
            factor = factor_of(grads, reference.grads[name], axes)
            module, subject = _owner(name), f"gradients ({name})"
            if (culprit := backward_culprit(reference, ranks, axes)) is not None:
                module, subject = culprit.module, "gradients of its inputs"
                worst = culprit.difference, culprit.rank
            if (scalar := uneven_scalar(reference, ranks, module)) is not None:
                kind, more, factor = "auxiliary loss", "", ratio_text(scalar[1], axes)
            return finding_of("gradient", module, subject, worst, kind, more, factor)
    return None


def _grad_kind(
    reference: Tensor, grads: Sequence[Tensor], axes: Axes, early: Tensor | None
) -> tuple[str, str]:
    """Return the kind of mistake that makes a gradient wrong, and what to add to its sentence.

    early: the gradient before the last accumulated round; None: there is one round.
    """
    if early is not None:
        for part, which in ((reference - early, "the last round"), (early, "earlier rounds")):
            gaps = [difference(x, part) for x in grads]
            if all(gap is not None and gap <= TOLERANCE for gap in gaps):
                return "accumulation", f": it is that of {which}"
    alike = all(x.shape == grads[0].shape for x in grads)
    if alike and grads[0].shape == reference.shape:
        # in float64, so that the order of the ranks does not change the comparison
        total = sum((x.double() for x in grads), start=0 * reference.double())
        for factor in (1.0, 1.0 / len(grads), *(1.0 / size for size in _sizes(axes))):
            apart = difference(total * factor, reference)
            if apart is not None and apart <= TOLERANCE and not _are_equal(grads):
                return "gradient not summed", f" over {' and '.join(axes)}"
    for size in _sizes(axes):
        for factor in (size, 1 / size):
            # in float64, so that the division adds no rounding of its own
            apart = [difference(x.double() / factor, reference) for x in grads]
            if all(x is not None and x <= TOLERANCE for x in apart):
                kind = "gradient summed" if factor > 1 else "gradient divided"
                return kind, f": it is {factor:.4g} times that of one process"
    if alike and grads[0].shape == reference.shape and not _are_equal(grads):
        return "gradient not summed", f" in full over {' and '.join(axes)}, as ranks differ"
    return "wrong backward", ""


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    return all((difference(x, tensors[0]) or 0.0) <= TOLERANCE for x in tensors[1:])


def _dropout(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the dropout masks of ranks along each axis, and those of a rank's micro-batches."""
    if (repeated := _repeated(ranks)) is not None:
        return repeated
    shares = math.prod(size for axis, size in axes.items() if axis not in ("tensor", "pipe"))
    for name in {n: None for record in ranks for n in record.masks}:
        masks = [(rank, r.coord, r.masks[name]) for rank, r in enumerate(ranks) if name in r.masks]
        for i, (_, replica, mask) in enumerate(masks):
            for rank, other, second in masks[i + 1 :]:
                differing_axes = [axis for axis in axes if replica.get(axis) != other.get(axis)]
                if mask.shape != second.shape or mask.numel() < 16 or len(differing_axes) != 1:
                    continue
                same = bool((mask == second).all())
                if same and differing_axes[0] in SPLITS_BATCH:
                    return finding_of(
                        "random", name, "dropout masks", (None, rank), "dropout alike"
                    )
                split = (
                    name in reference.masks
                    and mask.numel() * shares < reference.masks[name].numel()
                )
                if not same and differing_axes[0] == "tensor" and not split:
                    return finding_of(
                        "random", name, "dropout masks", (None, rank), "dropout apart"
                    )
                if same and differing_axes[0] == "tensor" and split:
                    kind = "dropout alike on shards"
                    return finding_of("random", name, "dropout masks", (None, rank), kind)
    return None


def _repeated(ranks: Sequence[ParityRecord]) -> ParityFinding | None:
    """Return the dropout of which two micro-batches of a rank have one mask, or None."""
    for rank, record in enumerate(ranks):
        for name in record.repeated:
            subject, more = "dropout masks", ": two micro-batches have one mask"
            return finding_of("random", name, subject, (None, rank), "dropout alike", more)
    return None


def _buffers(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the buffers."""
    for name in reference.buffers:
        if (
            worst := _worst(reference.buffers, (r.buffers for r in ranks), name, measure)
        ) is not None:
            return finding_of("buffer", _owner(name), f"a buffer ({name})", worst, "buffer")
    return None


def _first_norm(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the gradient norms of the first step, which no update has changed yet."""
    firsts = [replace(r, norms=r.norms[:1]) for r in ranks]
    return _norm(reference, firsts, axes, measure)


def _norm(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the gradient norms."""
    for rank, record in enumerate(ranks):
        for norm, full in zip(record.norms, reference.norms, strict=False):
            gap = abs(norm - full) / max(abs(full), 1e-30)
            if not gap <= measure.tolerance:  # NaN is a difference too
                factor = ratio_text(norm / full, axes) if full else ""
                where = "the gradient norm"
                return finding_of("norm", where, "the norm", (gap, rank), "norm", "", factor)
    return None


def _rates(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the learning rates."""
    for rank, record in enumerate(ranks):
        for step, (rate, right) in enumerate(zip(record.rates, reference.rates, strict=False), 1):
            gap = abs(rate - right) / max(abs(right), 1e-30)
            if gap > TOLERANCE:
                where, subject = "the learning rate", f"the rate of step {step}"
                return finding_of("update", where, subject, (gap, rank), "learning rate")
    return None


def _scale(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare what the first update multiplies gradients by, as clipping does."""
    if not reference.scale:
        return None
    for rank, record in enumerate(ranks):
        if record.scale is None:
            continue
        gap = abs(record.scale / reference.scale - 1)
        if gap > measure.tolerance:
            where, what = "the gradient norm", "what clipping multiplies gradients by"
            ratio = record.scale / reference.scale
            factor = ratio_text(ratio, axes)
            if abs(reference.scale - 1) <= TOLERANCE:  # nothing is clipped
                for size in _sizes(axes):
                    if min(abs(ratio - size), abs(ratio - 1 / size)) <= TOLERANCE:
                        kind = "gradient summed" if ratio > 1 else "gradient divided"
                        where, what = "the update", "what it multiplies gradients by"
                        return finding_of("update", where, what, (gap, rank), kind, "", factor)
            return finding_of("norm", where, what, (gap, rank), "norm", "", factor)
    return None


def _first_update(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the weights after the first step."""
    subject = "weights after the first step"
    finding = _updated(reference, ranks, axes, measure, lambda r: r.updated, subject)
    if finding is not None:
        return finding
    weights = {n: x for n, x in full_tensors(reference.placed_update).items() if STATE not in n}
    return _placed(reference, weights, [r.placed_update for r in ranks], "update", subject, measure)


def _weights(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the weights after the last step."""
    subject = "weights after the steps"
    finding = _updated(reference, ranks, axes, measure, lambda r: r.weights, subject)
    if finding is not None:
        return finding
    later = [(abs(a - b) / max(abs(b), 1e-30)) for r in ranks if len(ranks) == 1
             for a, b in zip(r.losses, reference.losses, strict=False)]  # fmt: skip
    if later and max(later) > TOLERANCE:
        return finding_of("update", LOSS, "the loss", (max(later), 0), "update")
    return None


def _updated(
    reference: ParityRecord,
    ranks: Sequence[ParityRecord],
    axes: Axes,
    measure: Measure,
    weights_of: Callable[[ParityRecord], Mapping[str, Tensor]],
    subject: str,
) -> ParityFinding | None:
    """Compare the weights that steps have left."""
    full = weights_of(reference)
    least, largest = measure.noise * _largest(reference.grads), _largest(full)
    for name in full:
        # an optimizer that divides by the size of a gradient makes steps of its rounding
        is_noise = name in reference.grads and float(reference.grads[name].abs().max()) <= least
        noise = measure.tolerance * largest if is_noise else 0.0
        worst = _worst(full, (weights_of(r) for r in ranks), name, measure, noise)
        if worst is None:
            continue
        moves = {
            rank: weights[name] - r.initial[name]
            for rank, r in enumerate(ranks)
            if name in (weights := weights_of(r)) and name in r.initial
        }
        factor = ""
        if name in reference.initial:
            factor = factor_of(moves, full[name] - reference.initial[name], axes, 1e-6)
        kind = "learning rate" if factor and not factor.startswith("missing") else "update"
        if kind == "update" and _decays(moves, reference.initial.get(name), full[name]):
            kind = "weight decay"
        return finding_of("update", _owner(name), f"{subject} ({name})", worst, kind, "", factor)
    return None


def _decays(moves: Mapping[int, Tensor], initial: Tensor | None, full: Tensor) -> bool:
    """Return True if the ranks' updates differ from the right one by a share of the weight."""
    if initial is None or not bool(initial.any()):
        return False
    for move in moves.values():
        if move.shape != initial.shape:
            return False
        residual = move - (full - initial)
        share = float((residual * initial).sum() / initial.square().sum())
        if share == 0 or float((residual - share * initial).abs().max()) > 1e-6 * float(
            residual.abs().max()
        ):
            return False
    return bool(moves)


def _states(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare weights and optimizer states after the last step, wherever ZeRO keeps them."""
    full, placed = full_tensors(reference.placed), [r.placed for r in ranks]
    weights = {name: x for name, x in full.items() if STATE not in name}
    subject = "weights after the steps"
    finding = _placed(reference, weights, placed, "update", subject, measure)
    if finding is not None:
        return finding
    states = {name: x for name, x in full.items() if STATE in name}
    kind, subject = "optimizer state", "optimizer states"
    finding = _placed(reference, states, placed, kind, subject, measure)
    if finding is not None:
        return finding
    return _searched(reference, ranks, lambda r: r.states, kind, subject, measure)


def _searched(
    reference: ParityRecord,
    ranks: Sequence[ParityRecord],
    tensors_of: Callable[[ParityRecord], Mapping[str, Tensor]],
    kind: str,
    subject: str,
    measure: Measure,
) -> ParityFinding | None:
    """Compare weights and optimizer states that may be any shard of the full ones."""
    least = measure.noise * _largest(reference.grads)
    for name in tensors_of(reference):
        parameter = name.partition(STATE)[0]
        grad = reference.grads.get(parameter)
        if grad is not None and float(grad.abs().max()) <= least:
            continue
        worst = _worst(tensors_of(reference), map(tensors_of, ranks), name, measure)
        if worst is None and not any(name in tensors_of(r) for r in ranks):
            worst = None, 0
        if worst is not None:
            return finding_of("state", _owner(parameter), f"{subject} ({name})", worst, kind)
    return None


def _placed(
    reference: ParityRecord,
    full: Mapping[str, Tensor],
    ranks: Sequence[Placed],
    kind: str,
    subject: str,
    measure: Measure,
) -> ParityFinding | None:
    """Compare tensors whose place is known."""
    if not any(ranks):
        return None
    least = measure.noise * _largest(reference.grads)
    largest = _largest(full)
    for name, right in full.items():
        parameter, _, state = name.partition(STATE)
        grad = reference.grads.get(parameter)
        is_noise = grad is not None and float(grad.abs().max()) <= least
        if is_noise and state:
            continue
        tolerance = max(measure.tolerance, measure.tolerance * largest if is_noise else 0.0)
        worst = worst_gap(name, right, ranks, tolerance)
        if worst is not None:
            stage: Stage = "state" if kind != "update" else "update"
            return finding_of(stage, _owner(parameter), f"{subject} ({name})", worst, kind)
    return None


_RESUMED: dict[str, Stage] = {
    "data after a resume": "samples",
    "random state after a resume": "random",
    "state after a resume": "state",
}
"""Kinds in the order in which one makes the next."""
_NO_MODULE = {"data after a resume": DATA, "random state after a resume": "the random state"}


def failure_of(one: ParityRecord) -> str:
    """Return why one process is nothing to compare with: its error, or the first step whose loss or
    gradient norm is not finite; "" if it can be compared.
    """
    for step, (loss, norm) in enumerate(zip_longest(one.losses, one.norms, fillvalue=0.0), 1):
        for what, number in (("loss", loss), ("gradient norm", norm)):
            if not one.error and not math.isfinite(number):
                return f"its {what} of step {step} is {number}"
    return one.error


def alone_difference(one: ParityRecord) -> ParityFinding | None:
    """Return what is wrong in one process by itself: numbers in 16 or 8 bits, a dropout mask that
    comes twice, or what a stop and resume change; None: nothing.
    """
    narrow = _casts(ParityRecord({}), [one], {}, PARTS)
    for finding in (narrow, _repeated([one])):
        if finding is not None:
            return replace(finding, axis="one process")
    return stopped_difference([one], {})


def _casts(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Find numbers that are rounded to 16 or 8 bits on ranks, but not in one process."""
    for rank, record in enumerate(ranks):
        for name, dtype in record.casts.items():
            if name not in reference.casts:
                module, subject = name or WHOLE_MODEL, f"numbers in {dtype}"
                return finding_of("precision", module, subject, (None, rank), "precision")
    return None


def stopped_difference(ranks: Sequence[ParityRecord], axes: Axes) -> ParityFinding | None:
    """Return the difference after a run was stopped and resumed, or None."""
    gaps = [(gap, rank) for rank, record in enumerate(ranks) for gap in record.resume_gaps]
    if not gaps:
        return None
    # after a stop comes a step, in which what differs on one rank reaches the others
    events = [f"{step}after stop {number}" for number in (1, 2) for step in ("", "a step ")]
    # other samples on one rank make other states on all
    order = [*_RESUMED, *{gap.kind: None for gap, _ in gaps}]
    gap, rank = min(gaps, key=lambda x: (events.index(x[0].when), order.index(x[0].kind)))
    only = {rank for other, rank in gaps if (other.kind, other.when) == (gap.kind, gap.when)}
    parameter, _, _ = gap.what.partition(STATE)
    tensor = gap.kind in ("state after a resume", "weights after a resume")
    module = _owner(parameter) if tensor and "." in parameter else WHOLE_MODEL
    module = _NO_MODULE.get(gap.kind, module)
    factor = f"on rank {', '.join(map(str, sorted(only)))}" if len(only) < len(ranks) else ""
    subject = f"{gap.what} {gap.when}"
    stage = _RESUMED.get(gap.kind, "resume")
    finding = finding_of(stage, module, subject, (gap.excess, rank), gap.kind, "", factor)
    return replace(finding, axis=" and ".join([*axes, "resume"]))


def _stopped(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare runs that were stopped and resumed with those that were not."""
    return stopped_difference(ranks, axes)


def _loaded(
    reference: ParityRecord, ranks: Sequence[ParityRecord], axes: Axes, measure: Measure
) -> ParityFinding | None:
    """Compare the state after the save of one process is loaded, and one step later."""
    kind = "loaded elsewhere"
    full = full_tensors(reference.placed_loaded)
    subject = "the loaded save of one process"
    loaded = [r.placed_loaded for r in ranks]
    finding = _placed(reference, full, loaded, kind, subject, measure)
    if finding is not None:
        return finding
    if any(r.loaded for r in ranks):
        return _searched(reference, ranks, lambda r: r.loaded, kind, subject, measure)
    full, placed_after = full_tensors(reference.placed_after), [r.placed_after for r in ranks]
    return _placed(reference, full, placed_after, kind, f"a step after {subject}", measure)
