"""Every published step beside its prediction, for the page docs/predicted_steps.md.

The page is computed only from published.py and devices.py, so a change of the model changes the
page, and a test holds that it is up to date.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torchdistpackage.predict.devices import DEVICES, Accelerator
from torchdistpackage.predict.published import ROWS, SOURCES, PublishedStep, is_checked
from torchdistpackage.predict.published_memory import MEMORY_ROWS, MEMORY_SOURCES, PublishedMemory
from torchdistpackage.predict.step import StepTime, step_time
from torchdistpackage.predict.step_memory import ALLOCATOR_SHARE, reserved_bytes, step_memory

MEAN_BAR, WORST_BAR, UNFITTED_BAR = 0.05, 0.10, 0.15
"""Bars for the errors of rows marked "check": for their mean and the worst on a fitted
device, and each on another one."""

_MISSED: dict[str, tuple[str, ...]] = {
    "GPT-OSS in bfloat16 is predicted too fast on all devices, and no source says why": (
        "b200-120bb",
    ),
    "its source limits the power of its B200, and does not say whether that of these cards": (
        "mi300x-8ba",
        "mi300x-8bb",
    ),
}
"""Why check rows miss their bar: for each reason the numbers of rows."""
MISSED = {number: why for why, numbers in _MISSED.items() for number in numbers}


@dataclass(frozen=True, slots=True)
class PredictedRow:
    """A published step and its prediction."""

    row: PublishedStep
    predicted: StepTime

    @property
    def device(self) -> Accelerator:
        return DEVICES[self.row.device]

    @property
    def error(self) -> float:
        """Return predicted over published, minus one."""
        return self.predicted.total / self.row.seconds - 1


@lru_cache(maxsize=1)
def compare() -> tuple[PredictedRow, ...]:
    """Predict each published step."""
    return tuple(PredictedRow(x, step_time(x.sizes, x.layout, DEVICES[x.device])) for x in ROWS)


def mean_and_worst(rows: Iterable[PredictedRow]) -> tuple[float, float]:
    """Return the mean and the largest absolute error; zeros for no rows."""
    errors = [abs(each.error) for each in rows]
    return (sum(errors) / len(errors), max(errors)) if errors else (0.0, 0.0)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return how alike two rankings are: pairs in one order less those in another, over all."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    return sum((x > 0) - (x < 0) for x in signs) / max(len(signs), 1)


def rankings() -> dict[str, list[PredictedRow]]:
    """Return rows that a user would choose between, by title: one source ran one model with as many
    micro-batches on as many devices in several layouts."""
    groups: dict[object, list[PredictedRow]] = {}
    for each in compare():
        row, x = each.row, each.row.layout
        key = row.source, row.device, row.sizes, x.ranks, x.seq_len, x.num_microbatches
        if all(x != other.row.layout for other in groups.setdefault(key, [])):
            groups[key].append(each)
    several = [rows for rows in groups.values() if len(rows) > 1]
    return {
        f"{rows[0].row.title.partition(',')[0]}, {rows[0].row.layout.ranks} x "
        f"{rows[0].row.device}, {rows[0].row.layout.seq_len:,} tokens, micro-batches: "
        f"{rows[0].row.layout.num_microbatches}": rows
        for rows in several
    }


def token_seconds(rows: Iterable[PredictedRow]) -> list[tuple[float, float]]:
    """Return the predicted and the published seconds of a token, since steps have other batches."""
    return [
        (x.predicted.total / x.row.layout.step_tokens, x.row.seconds / x.row.layout.step_tokens)
        for x in rows
    ]


def table() -> str:
    """Return the generated part of the page."""
    rows = compare()
    parts = _summary(rows), _rankings(), _rows(rows), _memory(), _devices(), _sources(rows)
    return "\n\n".join(parts) + "\n"


def readme_sentence() -> str:
    """Return the sentence of README.md on the errors."""
    check = [each for each in compare() if each.row.use == "check"]
    fitted = [each for each in check if each.device.is_fitted]
    others = [each for each in check if not each.device.is_fitted]
    mean, worst = mean_and_worst(fitted)
    missed = sum(misses_bar(each) for each in others)
    return (
        f"{len(fitted)} predicted steps on the three fitted devices are off by {mean:.1%} on "
        f"average and {worst:.1%} at worst; {missed} of {len(others)} on other devices are off by "
        f"more than {UNFITTED_BAR:.0%}.\n"
    )


def _summary(predicted: tuple[PredictedRow, ...]) -> str:
    lines = ["## Errors", "", "| rows | number | mean | worst | bar |", "|---|---|---|---|---|"]
    check = [each for each in predicted if each.row.use == "check"]
    fitted = [each for each in check if each.device.is_fitted]
    kinds = (
        ("fit", [each for each in predicted if each.row.use == "fit"], "none"),
        (
            "check, on a fitted device",
            fitted,
            f"mean {MEAN_BAR:.0%}, worst {WORST_BAR:.0%}",
        ),
        (
            "check, on a device without a fit",
            [each for each in check if not each.device.is_fitted],
            f"worst {UNFITTED_BAR:.0%}",
        ),
    )
    for name, rows, bar in kinds:
        mean, worst = mean_and_worst(rows)
        lines.append(f"| {name} | {len(rows)} | {mean:.1%} | {worst:.1%} | {bar} |")
    lines += ["", "Missed by check rows:", ""]
    for why, numbers in _MISSED.items():
        errors = ", ".join(
            f"{each.row.number} ({each.error:+.1%})" for each in check if each.row.number in numbers
        )
        lines.append(f"- {errors}: {why}.")
    return "\n".join(lines)


def _rankings() -> str:
    lines = [
        "## Rankings",
        "",
        "Rows of one source in several layouts of one model, with as many micro-batches on as many "
        "devices, ranked by the seconds of a token. tau is Kendall's: 1 if all pairs are in the "
        "published order, 0 as by chance.",
        "",
        "| run | layouts | pairs | in order | tau |",
        "|---|---|---|---|---|",
    ]
    number = in_order = 0
    for title, rows in rankings().items():
        tau, pairs = kendall_tau(token_seconds(rows)), len(rows) * (len(rows) - 1) // 2
        right = round((tau + 1) * pairs / 2)
        number, in_order = number + pairs, in_order + right
        lines.append(f"| {title} | {len(rows)} | {pairs} | {right} | {tau:.2f} |")
    tau = 2 * in_order / number - 1
    lines.append(f"| all | | {number} | {in_order} | {tau:.2f} |")
    lines += ["", "No source has twenty layouts of one model on 8 or 16 cards; the bar is 0.9."]
    return "\n".join(lines)


def misses_bar(each: PredictedRow) -> bool:
    """Return whether a check row errs by more than its device allows."""
    bar = WORST_BAR if each.device.is_fitted else UNFITTED_BAR
    return each.row.use == "check" and abs(each.error) > bar


def _rows(rows: Iterable[PredictedRow]) -> str:
    lines = [
        "## Rows",
        "",
        "Seconds of a step. A term below a hundredth of the step is left out.",
        "",
        "| # | use | run | device | published | predicted | error | terms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        row, total = each.row, each.predicted.total
        terms = (f"{k} {v:.3g}" for k, v in each.predicted.terms.items() if v >= total / 100)
        cells = (
            row.number,
            row.use,
            row.title,
            row.device,
            f"{row.seconds:.4g}",
            f"{total:.4g}",
            f"{round(each.error, 3) + 0.0:+.1%}",
            ", ".join(terms),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """A published peak of memory and its prediction: kinds of tensors in GiB."""

    row: PublishedMemory
    kinds: Mapping[str, float]

    @property
    def allocated(self) -> float:
        return sum(self.kinds.values())

    @property
    def reserved(self) -> float:
        return reserved_bytes(self.kinds)

    @property
    def allocated_error(self) -> float | None:
        """Predicted over published, less one; None where no bytes of tensors are published."""
        return None if self.row.allocated is None else self.allocated / self.row.allocated - 1

    @property
    def reserved_error(self) -> float:
        return self.reserved / self.row.reserved - 1


@lru_cache(maxsize=1)
def compare_memory() -> tuple[PredictedMemory, ...]:
    """Predict each published peak of memory."""
    return tuple(
        PredictedMemory(x, {kind: n / 2**30 for kind, n in step_memory(x.sizes, x.layout).items()})
        for x in MEMORY_ROWS
    )


def _memory() -> str:
    lines = [
        "## Published memory",
        "",
        "GiB of the device that holds most: bytes of tensors (allocated), and what the caching "
        f"allocator has taken of the device (reserved), predicted as {ALLOCATOR_SHARE:.1%} more. "
        "That share is fitted on the rows marked fit, the others are held out. A kind below a "
        "hundredth is left out.",
        "",
        "| run | use | allocated | predicted | error | reserved | predicted | error | kinds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    comparisons = compare_memory()
    for each in comparisons:
        row, error = each.row, each.allocated_error
        shown = (f"{k} {v:.3g}" for k, v in each.kinds.items() if v >= each.allocated / 100)
        cells = (
            row.title,
            row.use,
            "" if row.allocated is None else f"{row.allocated:.2f}",
            f"{each.allocated:.2f}",
            "" if error is None else f"{error:+.1%}",
            f"{row.reserved:.2f}",
            f"{each.reserved:.2f}",
            f"{each.reserved_error:+.1%}",
            ", ".join(shown),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for key, text in MEMORY_SOURCES.items():
        rows = [each for each in comparisons if each.row.source == key]
        parts = [
            _mean_and_worst("allocated", [x.allocated_error for x in rows]),
            _mean_and_worst("reserved", [x.reserved_error for x in rows if x.row.use == "fit"]),
            _mean_and_worst(
                "reserved, held out", [x.reserved_error for x in rows if x.row.use == "check"]
            ),
        ]
        lines += ["", f"{text}: {'; '.join(filter(None, parts))}."]
    return "\n".join(lines)


def _mean_and_worst(name: str, errors: Iterable[float | None]) -> str:
    sizes = [abs(x) for x in errors if x is not None]
    if not sizes:
        return ""
    return f"{name} mean error {sum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}"


def _devices() -> str:
    lines = [
        "## Devices",
        "",
        "Dense TFLOP/s, memory in TB/s and GB, links in GB/s of one direction. The fit is the "
        "share of the peak, of the memory's and of the links' bandwidth; one in brackets is "
        "borrowed from a fitted device.",
        "",
        "| name | device | bfloat16 | float8 | memory | size | in a node | network | fit | "
        "checked | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in DEVICES.values():
        fit = f"{each.fit.matmul:.2f}, {each.fit.memory:.2f}, {each.fit.link:.2f}"
        float8 = f"{each.peaks['float8'] / 1e12:,.0f}" if "float8" in each.peaks else "none"
        cells = (
            f"`{each.name}`",
            each.title,
            f"{each.peak('bfloat16') / 1e12:,.0f}",
            float8,
            f"{each.memory_bytes_per_s / 1e12:.3g}",
            f"{each.memory_bytes / 1e9:.0f}",
            f"{each.node_bytes_per_s / 1e9:.0f} x {each.node_size}",
            f"{each.network_bytes_per_s / 1e9:.0f}",
            fit if each.is_fitted else f"({fit})",
            "yes" if is_checked(each.name) else "not checked",
            each.source,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sources(predicted: tuple[PredictedRow, ...]) -> str:
    lines = ["## Sources", ""]
    for key, text in SOURCES.items():
        numbers = [each.row.number for each in predicted if each.row.source == key]
        lines.append(f"- {text}: {', '.join(numbers)}.")
    assumed: dict[str, list[PredictedRow]] = {}
    for each in predicted:
        if each.row.assumed:
            assumed.setdefault(each.row.assumed, []).append(each)
    for text, rows in assumed.items():
        numbers = ", ".join(each.row.number for each in rows)
        errors = ", ".join(f"{_error_without(each.row):+.1%}" for each in rows)
        lines.append(f"- Assumed in {numbers}: {text}. Without it the errors are {errors}.")
    return "\n".join(lines)


def _error_without(row: PublishedStep) -> float:
    """Return the error of a row without its assumptions."""
    layout = replace(row.layout, **row.unassumed)  # type: ignore[arg-type]
    return PredictedRow(row, step_time(row.sizes, layout, DEVICES[row.device])).error
