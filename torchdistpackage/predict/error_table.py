"""Every published step beside its prediction, for the page docs/predicted_steps.md.

The page is computed only from published.py and devices.py, so a change of the model changes the
page, and a test holds that it is up to date.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from torchdistpackage.predict.devices import DEVICES, Accelerator
from torchdistpackage.predict.published import ROWS, SOURCES, PublishedStep, is_checked
from torchdistpackage.predict.published_memory import MEMORY_ROWS, MEMORY_SOURCES, PublishedMemory
from torchdistpackage.predict.step import StepTime, step_time
from torchdistpackage.predict.step_memory import step_memory

MEAN_BAR, WORST_BAR, UNFITTED_BAR = 0.05, 0.10, 0.15
"""Bars for the errors of rows marked "check": for their mean and the worst on a fitted
device, and each on another one."""

_MISSED: dict[str, tuple[str, ...]] = {
    "GPT-OSS in bfloat16 is predicted too fast on every device, and no source says why": (
        "b200-120bb",
        "gb200-120b",
        "gb300-120b",
    ),
    "the same, and the source does not say how fast the network cards are; the data sheet of B300 "
    "has 800 Gbit/s": ("b300-120ba", "b300-120bb"),
    "software on this device reaches less than the share that it borrows from H100": (
        "mi300x-70ba",
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


def table() -> str:
    """Return the generated part of the page."""
    rows = compare()
    parts = _summary(rows), _rows(rows), _memory(), _devices(), _sources(rows)
    return "\n\n".join(parts) + "\n"


def readme_sentence() -> str:
    """Return the sentence of README.md on the errors."""
    check = [each for each in compare() if each.row.use == "check"]
    fitted = [each for each in check if each.device.is_fitted]
    others = [each for each in check if not each.device.is_fitted]
    mean, worst = mean_and_worst(fitted)
    missed = sum(misses_bar(each) for each in others)
    return (
        f"{len(fitted)} steps on the two fitted devices err by {mean:.1%} in the mean and "
        f"{worst:.1%} at worst; {missed} of {len(others)} steps on other devices err by more than "
        f"{UNFITTED_BAR:.0%}.\n"
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


def memory_error(row: PublishedMemory) -> float:
    """Return predicted over published bytes, minus one."""
    return sum(step_memory(row.sizes, row.layout).values()) / 2**30 / row.gib - 1


def _memory() -> str:
    lines = [
        "## Published memory",
        "",
        "GiB of the device that holds most. Predicted are bytes of tensors (allocated); what the "
        "caching allocator has taken of the device (reserved) is more by pieces that it cannot "
        "use. A kind below a hundredth is left out.",
        "",
        "| run | counts | published | predicted | error | kinds |",
        "|---|---|---|---|---|---|",
    ]
    for row in MEMORY_ROWS:
        kinds = step_memory(row.sizes, row.layout)
        total = sum(kinds.values())
        shown = (f"{k} {v / 2**30:.3g}" for k, v in kinds.items() if v >= total / 100)
        cells = (
            row.title,
            row.counts,
            f"{row.gib:.2f}",
            f"{total / 2**30:.2f}",
            f"{memory_error(row):+.1%}",
            ", ".join(shown),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for key, text in MEMORY_SOURCES.items():
        errors = [abs(memory_error(row)) for row in MEMORY_ROWS if row.source == key]
        mean, worst = sum(errors) / len(errors), max(errors)
        lines += ["", f"{text}: mean error {mean:.1%}, worst {worst:.1%}."]
    return "\n".join(lines)


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
