"""Compare a run with its prediction: the wrong term, its error, and a possible explanation.

The compared terms are known to both sides: a run records how long its ranks computed, waited for
calls over each axis, and updated weights (ranks.jsonl); the remainder of a step is its host's. On a
device queue a rank's phases include its waits, so there computation and its waits are one term. A
number explains a term if changing it makes the prediction equal the measurement. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.run_rows import Row, mapping, numbers
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.step_time import StepPrediction
from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.links import LinkModel
from torchdistpackage.predict.step import HOST_CALL_S, StepTime
from torchdistpackage.report.run import Run

COMPUTE, ON_DEVICE, OPTIMIZER, HOST = (
    "compute",
    "compute and exposed",
    "optimizer",
    "host and framework",
)
_PIPE, _SEVERAL = "bubble and pipe", "exposed, several axes"
_AXES = ("tensor", "context", "expert", "data")
_MOST_ROWS = 100
"""Number of last rows of ranks.jsonl whose median is compared; the first row, in which ranks warm
up, is left out."""
_MOST_FACTOR = 256.0
"""Largest factor by which a number is multiplied or divided in trials."""
_HALVINGS = 30
_LEAST_SHARE = 0.02
"""Fraction of a step below which a difference needs no explanation."""


@dataclass(frozen=True, slots=True)
class ComparedTerm:
    """Seconds of a step that have one cause."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """A value of a device's or link's number that makes the prediction equal the measurement.

    name: its place in a cluster profile. before, after: its value in the profile, and this one.
    """

    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A run and its prediction. step: its seconds, as one term. steps: the first and the last
    counted step. terms: they add up to the step. wrong: the term that differs most; None if none
    differs much. explanation: of `wrong`, or None.
    """

    step: ComparedTerm
    steps: tuple[int, int]
    terms: tuple[ComparedTerm, ...]
    wrong: ComparedTerm | None
    explanation: Explanation | None


def compare_run(plan: Plan, prediction: StepPrediction, folder: Path) -> RunComparison:
    """Compare the run in `folder` with the prediction of its plan.

    Raises:
        ConfigError: it is not a run folder, has no numbers of ranks yet, or ran on other ranks.
    """
    rows = _rows(plan, folder)
    measured = _measured(rows)
    names = tuple(measured)
    predicted = _grouped(prediction.step(), names)
    terms = tuple(ComparedTerm(name, predicted[name], measured[name]) for name in names)
    step = ComparedTerm("step", sum(predicted.values()), sum(measured.values()))
    wrong = max(terms, key=lambda term: abs(term.difference_s))
    named: ComparedTerm | None = wrong
    explanation = None
    if abs(wrong.difference_s) < _LEAST_SHARE * step.measured_s:
        named = None
    else:
        explanation = _explain(prediction, wrong, names)
    return RunComparison(step, (rows[0]["step"], rows[-1]["step"]), terms, named, explanation)


def _rows(plan: Plan, folder: Path) -> list[Row]:
    rows = [row for row in Run(folder).ranks if len(_busy(row)) == len(numbers(row.get("time_s")))]
    rows = [row for row in rows if _busy(row)]
    if not rows:
        raise ConfigError(
            f"{folder} has no numbers of its ranks (ranks.jsonl), which a run writes every "
            f"log.every steps; compare a run that has logged a step"
        )
    if (ranks := len(numbers(rows[-1]["time_s"]))) != plan.world_size:
        raise ConfigError(
            f"{folder} ran on {ranks} ranks, but the plan has {plan.world_size}; plan the file and "
            f"the keys of that run, such as {folder / 'resolved.yaml'}"
        )
    return rows[1:][-_MOST_ROWS:] or rows


def _measured(rows: list[Row]) -> dict[str, float]:
    """Return the median seconds of each term, for the rank that computed longest in each row."""
    terms_of_rows = [_terms_of(row) for row in rows]
    return {
        name: median(terms.get(name, 0.0) for terms in terms_of_rows) for name in terms_of_rows[-1]
    }


def _busy(row: Row) -> list[float]:
    """Return the seconds in which each rank computed forward and backward."""
    phases = mapping(row, "phases")
    passes = (numbers(phases.get(name)) for name in ("forward", "backward"))
    return [sum(pair) for pair in zip(*passes, strict=False)]


def _terms_of(row: Row) -> dict[str, float]:
    phases, waits, busy = mapping(row, "phases"), mapping(row, "waits"), _busy(row)
    rank = busy.index(max(busy))

    def of_rank(values: object) -> float:
        each = numbers(values)
        return each[rank] if rank < len(each) else 0.0

    waited = {axis: of_rank(values) for axis, values in waits.items()}
    is_queued = not any(waited.values())
    terms = {ON_DEVICE if is_queued else COMPUTE: busy[rank]}
    if not is_queued:
        terms |= {f"exposed {axis}": waited[axis] for axis in _AXES if axis in waited}
        if "pipe" in waited:
            terms[_PIPE] = waited["pipe"]
        others = [x for axis, x in waited.items() if axis not in (*_AXES, "pipe")]
        terms[_SEVERAL] = sum(others)
    terms[OPTIMIZER] = of_rank(phases.get("optimizer"))
    terms[HOST] = max(of_rank(row.get("time_s")) - sum(terms.values()), 0.0)
    return terms


def _grouped(step: StepTime, names: tuple[str, ...]) -> dict[str, float]:
    """Return the predicted seconds under the names of the measured terms."""
    seconds_of = dict.fromkeys(names, 0.0)
    for term, seconds in step.terms.items():
        if term in seconds_of:
            name = term
        elif ON_DEVICE in seconds_of:
            name = ON_DEVICE
        elif term in ("bubble", "exposed pipe") and _PIPE in seconds_of:
            name = _PIPE
        else:
            name = COMPUTE
        seconds_of[name] += seconds
    return seconds_of


# -- what explains a term -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Number:
    """A number of a device or its links. changed: returns the prediction with the number multiplied
    by a factor.
    """

    name: str
    value: float
    changed: Callable[[StepPrediction, float], StepPrediction]


def _explain(
    prediction: StepPrediction, wrong: ComparedTerm, names: tuple[str, ...]
) -> Explanation | None:
    """Return the number that needs the smallest factor to make the prediction equal the
    measurement.
    """

    def predicted(each: _Number, factor: float) -> float:
        return _grouped(each.changed(prediction, factor).step(), names)[wrong.name]

    explanations: list[tuple[float, Explanation]] = []
    for each in _numbers(prediction.device, prediction.fabric, wrong.name):
        low, high = 1 / _MOST_FACTOR, _MOST_FACTOR
        rises = predicted(each, high) > predicted(each, low)
        least, most = sorted((predicted(each, low), predicted(each, high)))
        if not least <= wrong.measured_s <= most:
            continue
        for _ in range(_HALVINGS):
            middle = (low * high) ** 0.5
            if (predicted(each, middle) < wrong.measured_s) == rises:
                low = middle
            else:
                high = middle
        distance = max(low, 1 / low)
        explanations.append((distance, Explanation(each.name, each.value, each.value * low)))
    return min(explanations, key=lambda pair: pair[0])[1] if explanations else None


def _numbers(device: Accelerator, fabric: Fabric, term: str) -> list[_Number]:
    """Return the numbers that a term depends on, by their names in a cluster profile."""
    matmuls = _Number("device.matmuls, operations/s", _matmul_rate(device), _with_matmuls)
    memory = _Number("device.bytes_per_s", device.memory_bytes_per_s, _with_memory)
    call_s = _Number("device.call_s", device.call_s or HOST_CALL_S, _with_call)
    if term in (COMPUTE, ON_DEVICE):
        return [matmuls, memory]
    if term == OPTIMIZER:
        return [memory]
    if term == HOST:
        return [call_s]
    links = (("node", fabric.node), ("network", fabric.network))
    return [
        number
        for link, model in links
        for number in (
            _Number(
                f"lines, {link}: bus_bytes_per_s",
                _line_value(fabric, link, model).bytes_per_s,
                lambda x, factor, link=link: _with_link(x, link, 1.0, factor),
            ),
            _Number(
                f"lines, {link}: latency_s",
                _line_value(fabric, link, model).latency_s,
                lambda x, factor, link=link: _with_link(x, link, factor, 1.0),
            ),
        )
    ]


def _matmul_rate(device: Accelerator) -> float:
    """Return the operations per second of the largest measured matmul, or the reachable fraction of
    the data sheet's peak."""
    if device.matmul_times:
        return max(times[-1][0] / times[-1][1] for times in device.matmul_times.values())
    return device.peak("bfloat16") * device.clock * device.fit.matmul


def _line_value(fabric: Fabric, link: str, model: LinkModel) -> LinkModel:
    """Return the measured line of all-reduces over a link, else another measured line, else the
    device's link."""
    lines = {
        name: link_model for (name, where), link_model in fabric.measured.items() if where == link
    }
    return lines.get("all_reduce") or next(iter(lines.values()), model)


def _with_matmuls(x: StepPrediction, factor: float) -> StepPrediction:
    times = {
        dtype: tuple((flops, seconds / factor) for flops, seconds in points)
        for dtype, points in x.device.matmul_times.items()
    }
    clock = x.device.clock if times else x.device.clock * factor
    return replace(x, device=replace(x.device, matmul_times=times, clock=clock))


def _with_memory(x: StepPrediction, factor: float) -> StepPrediction:
    speed = x.device.memory_bytes_per_s * factor
    return replace(x, device=replace(x.device, memory_bytes_per_s=speed))


def _with_call(x: StepPrediction, factor: float) -> StepPrediction:
    return replace(x, device=replace(x.device, call_s=(x.device.call_s or HOST_CALL_S) * factor))


def _with_link(x: StepPrediction, link: str, latency: float, speed: float) -> StepPrediction:
    def scaled(link_model: LinkModel) -> LinkModel:
        return LinkModel(link_model.latency_s * latency, link_model.bytes_per_s * speed)

    fabric = x.fabric
    measured: Mapping[tuple[str, str], LinkModel] = {
        key: scaled(link_model) if key[1] == link else link_model
        for key, link_model in fabric.measured.items()
    }
    node = scaled(fabric.node) if link == "node" else fabric.node
    network = scaled(fabric.network) if link == "network" else fabric.network
    return replace(x, fabric=replace(fabric, node=node, network=network, measured=measured))
