"""Read what nvidia-smi reports of a node's GPUs: memory errors, clocks, heat and links. No torch.

Facts explain a finding and never make one: an idle GPU lowers its clocks and its link.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import Runner, run_command

TIMEOUT_S = 10.0
"""Seconds after which nvidia-smi is given up: with a broken GPU it may hang."""
FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "temperature.gpu",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
_UNCORRECTED = "ecc.errors.uncorrected.volatile.total"
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal limit",
    0x40: "hardware thermal limit",
    0x80: "hardware power brake",
}
"""Bits of `clocks_throttle_reasons.active` that lower clocks under load."""


class GpuFacts(NamedTuple):
    """The answer of nvidia-smi: a row for each GPU by field, and what stands out, in words.

    error: why there is no answer, or "".
    """

    rows: tuple[Mapping[str, str], ...] = ()
    findings: tuple[str, ...] = ()
    error: str = ""


def gpu_facts(runner: Runner = run_command, timeout_s: float = TIMEOUT_S) -> GpuFacts:
    """Ask nvidia-smi about all GPUs of this node and their NVLinks; it never raises."""
    query = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    try:
        answer = runner(query, timeout_s=timeout_s)
        if answer.code:
            return GpuFacts(error=answer.why)
        rows = parse_rows(answer.out)
        links = runner(("nvidia-smi", "nvlink", "--status"), timeout_s=timeout_s)
    except (LaunchError, OSError) as error:
        return GpuFacts(error=str(error))
    inactive = inactive_links(links.out) if links.code == 0 else {}
    findings = [*(text for row in rows for text in _findings(row))]
    findings += [f"GPU {index}: {number} NVLinks inactive" for index, number in inactive.items()]
    return GpuFacts(rows, tuple(findings))


def parse_rows(text: str) -> tuple[Mapping[str, str], ...]:
    """Parse the csv lines; those with another number of fields are left out."""
    lines = ([field.strip() for field in line.split(",")] for line in text.splitlines())
    return tuple(
        dict(zip(FIELDS, fields, strict=True)) for fields in lines if len(fields) == len(FIELDS)
    )


def inactive_links(text: str) -> dict[str, int]:
    """Return the number of inactive links by index of the GPU in `nvidia-smi nvlink --status`.

    A GPU without any active link has none to lose.
    """
    inactive: dict[str, int] = {}
    active: set[str] = set()
    index = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("GPU "):
            index = line.removeprefix("GPU ").partition(":")[0]
        elif line.startswith("Link ") and line.endswith("<inactive>"):
            inactive[index] = inactive.get(index, 0) + 1
        elif line.startswith("Link "):
            active.add(index)
    return {index: number for index, number in inactive.items() if index in active}


def throttles(mask: str) -> Sequence[str]:
    """Return the reasons in a bit mask such as 0x0000000000000008 for which clocks are lowered."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return ()
    return [name for bit, name in _THROTTLES.items() if bits & bit]


def _findings(row: Mapping[str, str]) -> Iterator[str]:
    gpu = f"GPU {row['index']}"
    errors = row[_UNCORRECTED]
    if errors.isdecimal() and int(errors):
        yield f"{gpu}: {errors} uncorrected memory errors"
    if reasons := throttles(row["clocks_throttle_reasons.active"]):
        yield (
            f"{gpu}: clocks lowered by {', '.join(reasons)} ({row['clocks.sm']} of "
            f"{row['clocks.max.sm']} MHz, {row['temperature.gpu']} C)"
        )
    width, most = row["pcie.link.width.current"], row["pcie.link.width.max"]
    if width.isdecimal() and most.isdecimal() and int(width) < int(most):
        yield f"{gpu}: PCIe link has {width} of {most} lanes"
