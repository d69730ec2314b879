"""Runs one report through the prover, planted on every rank, and judges what is found."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from tests.replay.reports import RANDOMNESS, Report
from torchdistpackage.config.load import loads
from torchdistpackage.errors import TorchDistError
from torchdistpackage.harness.pool import RankPool, Ranks
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.parity_plan import parity_run
from torchdistpackage.plan.run_plan import make_plan

OWN_AXES = ("data", "expert", "tensor")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a report.

    result: `caught`, `refused` or `missed`. axis, module, kind: of the finding. says: its line.
    """

    name: str
    result: str
    axis: tuple[str, ...] = ()
    module: str = ""
    kind: str = ""
    says: str = ""
    is_named: bool = False
    is_told: bool = False

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


class PlantedPool:
    """A pool of ranks that make a mistake; `name`: of the plant, or empty for none."""

    def __init__(self, pool: RankPool, name: str):
        self._pool, self._name = pool, name

    def __call__(self, world_size: int) -> Any:
        return PlantedRanks(self._pool(world_size), self._name)


class PlantedRanks:
    def __init__(self, ranks: Ranks, name: str):
        self._ranks, self._name = ranks, name
        self.world_size = ranks.world_size

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not self._name:
            return self._ranks.run(fn, *args, **kwargs)
        return self._ranks.run(run_planted, self._name, fn, *args, **kwargs)


def run_planted(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` while this rank makes a mistake."""
    from tests.replay.plants import PLANTS

    with PLANTS[name]():
        return fn(*args, **kwargs)


def findings(
    report: Report,
    pool: RankPool,
    layouts: str = "all",
    *,
    is_planted: bool = True,
    resumes: bool = True,
) -> Any:
    """Return (axes, finding or None) of every layout of the report, with or without its plant.

    layouts: of a run, as `tdp prove --layouts` has it. resumes: also stop and resume, which is the
    last that is compared.
    """
    if not report.is_run:
        own_loop: Any = resolve("tests.replay.own_loop:planted")
        batch: Any = resolve("tests.replay.own_loop:batch")
        compare: Any = resolve("torchdistpackage.harness.parity.api:compare_layouts")
        axes = [{axis: 2} for axis in sorted(report.axis) if axis in OWN_AXES]
        right: dict[str, str] = resolve("tests.replay.own_loop:RIGHT")
        name = report.name if is_planted else right.get(report.name, "")
        return compare(own_loop(name), batch, axes, pool=pool).findings
    changes = {x.partition("=")[0]: x for x in report.changes}
    config = loads("launch: {local: {procs: null}}", overrides=[*changes.values()])
    degrees = config.parallel
    ranks = degrees.data * degrees.pipe * degrees.context * degrees.tensor
    plan = make_plan(config, ranks)
    compare: Any = resolve("torchdistpackage.train.parity:compare_run")
    planted: Any = PlantedPool(pool, report.name if is_planted else "")
    return compare(parity_run(plan, layouts), planted, resumes=resumes).findings


def replay(report: Report, pool: RankPool, layouts: str = "all") -> Outcome:
    """Return what the prover says of the planted report."""
    resumes = "resume" in report.axis or report.kind == RANDOMNESS
    try:
        found = findings(report, pool, layouts, resumes=resumes)
        if not resumes and report.is_run and not any(x for _, x in found):
            found = findings(report, pool, layouts)
    except TorchDistError as error:
        text = str(error).strip()
        is_named = any(re.search(x, text) for x in report.module)
        return Outcome(report.name, "refused", says=text[:300], is_named=is_named, is_told=is_named)
    first: tuple[Mapping[str, int], Any] | None = next((x for x in found if x[1]), None)
    if first is None:
        return Outcome(report.name, "missed")
    axes, finding = first
    along = frozenset(finding.axis.split(" and ")) if finding.axis else frozenset(axes)
    is_axis = report.axis in (along, frozenset(axes))
    is_module = any(re.search(x, finding.module) for x in report.module)
    kind = finding.kind or finding.stage
    return Outcome(
        report.name,
        "caught",
        tuple(axes),
        finding.module,
        kind,
        str(finding)[:300],
        is_axis and is_module,
        kind in report.says,
    )


def without_plant(report: Report) -> str:
    """Return the changes of the report's run, or the loop of it."""
    return " ".join(report.changes) or f"own loop of {report.name}"


def alarms(
    reports: Iterable[Report], pool: RankPool, known: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, str]]:
    """Yield each run or loop that is not known yet, and what is found in it without a plant; empty:
    nothing.
    """
    seen = set(known)
    for report in reports:
        key = without_plant(report)
        if key not in seen:
            seen.add(key)
            try:
                wrong = [str(x) for _, x in findings(report, pool, is_planted=False) if x]
            except TorchDistError as error:
                wrong = [str(error)]
            yield key, "; ".join(wrong)
