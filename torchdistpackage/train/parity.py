"""Compare steps of a run's own configuration, reduced and in float64, on several layouts: `tdp
prove`.

The model and the batch become smaller, with the same classes; every layout takes the samples of one
process. parity_steps.py has the ranks' steps.
"""

import inspect
import math
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchdistpackage.equivalence.causes import CAUSES
from torchdistpackage.equivalence.compare import (
    ITS_STEP,
    ParityFinding,
    alone_difference,
    failure_of,
    first_difference,
)
from torchdistpackage.equivalence.record import ParityRecord
from torchdistpackage.errors import TorchDistError
from torchdistpackage.harness.parity.layout_ranks import records_of
from torchdistpackage.harness.parity.layouts import ParityReport, text_of
from torchdistpackage.harness.pool import RankPool, Ranks
from torchdistpackage.launch.entrypoint import user_object
from torchdistpackage.plan.parity_plan import (
    ComparedOption,
    ComparedRuns,
    ParityRun,
    parity_run,
    smaller_layouts,
)
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.smaller_arguments import with_smaller_arguments
from torchdistpackage.plan.user_code import add_user_code
from torchdistpackage.train.parity_steps import ONE_PROCESS, record_run

_LIMIT_S = 600.0
"""Limit in seconds for the steps of one layout; there may be more ranks than cores."""
_PRELOAD = (record_run.__module__, "torch._dynamo")
"""Modules that are loaded once: otherwise each of 15 ranks, in sets of 1, 2, 4 and 8, would import
them."""


def compare_plan(
    plan: Plan, say: Callable[[str], None], pool: RankPool | None = None, layouts: str = "all"
) -> ParityReport:
    """Compare layouts of a plan with one process, using a reduced model; layouts: see `parity_run`.

    Your own model is reduced through its constructor's arguments (smaller_arguments.py), or
    compared in full size if that is impossible. say: takes lines of progress.

    Raises:
        ConfigError: the plan has one rank.
        TorchDistError: one process alone fails.
    """
    config = plan.config
    if config.model.target is None:
        return compare_run(parity_run(plan, layouts), pool, say, narrow=layouts == "this")
    add_user_code(os.environ)
    defaults = _defaults(user_object(config.model.target))
    small = with_smaller_arguments(config, defaults)
    if small is not config:
        try:
            changed = plan.changed(lambda _: small)
            report = compare_run(parity_run(changed, layouts), pool, say, narrow=layouts == "this")
        except TorchDistError as error:
            wrong = str(error).strip().splitlines()[-1]
        else:
            raised = [x for _, x in report.findings if x is not None and x.what == ITS_STEP]
            if not raised:
                return report
            wrong = raised[0].cause
        say(f"smaller arguments do not do ({wrong}); compared in its own size")
    return compare_run(parity_run(plan, layouts), pool, say, narrow=layouts == "this")


def _defaults(target: Callable[..., object]) -> dict[str, Any]:
    """Return the default of each argument of `target` that has one."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {x.name: x.default for x in parameters if x.default is not x.empty}


def compare_run(
    run: ParityRun,
    pool: RankPool | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    resumes: bool = True,
    narrow: bool = False,
) -> ParityReport:
    """Compare every layout of the run with one process.

    resumes: also stop and resume, and load the save of one process. narrow: if the first layout
    differs, compare layouts with fewer axes to name the axis.

    Raises:
        TorchDistError: one process alone fails.
    """
    noun = "layout" if len(run.layouts) == 1 else "layouts"
    say(f"comparing {len(run.layouts)} {noun} with one process")
    theirs = () if run.whole.model.hf is None else ("transformers.modeling_utils",)
    rank_pool = pool or RankPool(run.most_ranks, timeout_s=_LIMIT_S, preload=(*_PRELOAD, *theirs))
    with ExitStack() as stack:
        if pool is None:
            stack.callback(rank_pool.close)
        saves = ""
        if resumes:
            saves = stack.enter_context(tempfile.TemporaryDirectory(prefix="tdp-prove-"))
        began = time.monotonic()
        reference, wide = _one_process(run, rank_pool(1), saves)
        if failure := failure_of(reference):
            raise TorchDistError(f"one process alone fails: {failure}")
        say(f"one process: {time.monotonic() - began:.0f} s")
        if (alone := alone_difference(reference)) is not None:
            runs = ComparedRuns(run.whole, run.whole, wide=wide, saves=resumes)
            return ParityReport([({}, alone)], [runs])
        findings: list[tuple[dict[str, int], ParityFinding | None]] = []
        sources: list[ComparedRuns] = []
        for feature in run.features:
            runs = _runs_of(feature, wide)
            if (changed := _changed(feature, rank_pool(1), runs)) is not None:
                findings.append(({}, changed))
                sources.append(runs)
                say(f"one process, {feature.name}: differs in {changed.module}")
        todo = deque(run.layouts)
        number = 0
        while todo:
            axes, config = todo.popleft()
            number += 1
            began = time.monotonic()
            name = text_of(axes).replace(" ", "").replace(",", "-")
            ranks = rank_pool(math.prod(axes.values()))
            options = (dict(axes), saves, name, False, False, wide)
            records = records_of(ranks, record_run, config, *options)
            finding = first_difference(reference, records, axes)
            findings.append((axes, finding))
            sources.append(ComparedRuns(run.whole, config, wide=wide, saves=resumes))
            verdict = "the same" if finding is None else f"differs in {finding.module}"
            took = f"{time.monotonic() - began:.0f} s"
            say(f"{number} of {number + len(todo)}, {text_of(axes)}: {verdict}, {took}")
            if finding is not None and finding.detail:
                say(finding.detail)
            if finding is not None and narrow and len(axes) > 1 and number == 1:
                # which axis it is shows with fewer of them
                todo.extendleft(reversed(smaller_layouts(run, axes).layouts))
    order = sorted(range(len(findings)), key=lambda number: len(findings[number][0]))
    return ParityReport([findings[i] for i in order], [sources[i] for i in order])


def _one_process(run: ParityRun, ranks: Ranks, saves: str) -> tuple[ParityRecord, bool]:
    """Return the record of one process, and whether what it computes in float32 was made float64.

    That is tried first for classes of transformers, whose norms go on in float32, and otherwise if
    some module does so. What fails with it is compared as it is.
    """
    wide_first = run.whole.model.hf is not None

    def recorded(wide: bool) -> ParityRecord:
        if saves:
            shutil.rmtree(Path(saves) / ONE_PROCESS, ignore_errors=True)
        options = (run.whole, {}, saves, ONE_PROCESS, False, False, wide)
        return records_of(ranks, record_run, *options)[0]

    record = recorded(wide_first)
    if record.error if wide_first else record.singles:
        other = recorded(not wide_first)
        if not other.error:
            return other, not wide_first
        if not wide_first:
            record = recorded(wide_first)  # its saves are what layouts load
    return record, wide_first


_CHANGES = {"accumulation": "accumulation", "recompute": "recompute", "compile": "compiled"}
"""Name of an option -> kind of the mistake if gradients or outputs change with it."""


def _runs_of(feature: ComparedOption, wide: bool) -> ComparedRuns:
    # a compiler, too, would get float64 where it asks for float32
    wide = wide and feature.name != "compile"
    return ComparedRuns(feature.without, feature.having, feature.alike, feature.dropout, wide)


def _changed(feature: ComparedOption, ranks: Ranks, runs: ComparedRuns) -> ParityFinding | None:
    """Return what an option changes in one process; None: nothing."""
    options = ({}, "", ONE_PROCESS, runs.alike, runs.dropout, runs.wide)
    without, having = (
        records_of(ranks, record_run, config, *options) for config in (runs.one, runs.having)
    )
    # rounds are fed other parts of the samples of a step
    having = [replace(record, inputs=[]) for record in having]
    if runs.alike:
        # they have batches of unlike sizes, so later steps come to other samples
        without, having = ([x.of_first_step() for x in records] for records in (without, having))
    finding = first_difference(without[0], having, {feature.name: 1})
    kinds = ("", "uneven means", "order of data", "auxiliary loss", "scaled loss")
    if finding is None or finding.kind in kinds:
        return finding
    kind = _CHANGES[feature.name]
    return replace(finding, kind=kind, cause=CAUSES[kind])
