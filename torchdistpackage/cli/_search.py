"""The layouts that `tdp plan --search` found, as it prints and writes them."""

import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import cast

import typer

from torchdistpackage.cli._common import wrap
from torchdistpackage.cli._elastic import node_span
from torchdistpackage.cli._step_time import seconds_text
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.slurm import header, time_seconds
from torchdistpackage.config.types import MAX_RANKS
from torchdistpackage.config.yaml_loader import write
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import atomic_write
from torchdistpackage.harness.bench.profile import Profile
from torchdistpackage.launch.slurm.job import job_shape
from torchdistpackage.launch.slurm.queue import query_queue
from torchdistpackage.plan.layout_search import RankedLayout, SearchResult, search
from torchdistpackage.plan.layout_space import LayoutChoice
from torchdistpackage.plan.measured import measured_device, measured_fabric
from torchdistpackage.plan.run_plan import local_procs
from torchdistpackage.plan.step_time import device_of
from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import DEVICES, Accelerator
from torchdistpackage.predict.error_table import MEAN_BAR, UNFITTED_BAR
from torchdistpackage.text import text_table

AXES = ("data", "pipe", "context", "tensor", "expert")
_TRIED = (
    "micro-batches are powers of two samples or all of a rank's, in numbers that their schedule is "
    "published for"
)
"""The restrictions on the space of a search (`plan/layout_space.py`)."""
_MORE = (2, 4, 8, 16, 32, 64)
"""Multiples of the ranks that are tried where nothing fits."""


def search_text(
    source: str,
    overrides: Sequence[str],
    world_size: int | None,
    ranks_per_node: int | None,
    nodes: str | None,
    device: str | None,
    profile: tuple[Path, Profile] | None,
    apply: int | None,
    queue: bool = False,
) -> str:
    """Return the best layouts of a run on its ranks, or on each number of nodes of a span.

    Raises:
        ConfigError: no device is named, nothing fits, or `apply` names no layout.
    """
    searched = LayoutChoice.overrides()
    names = {x.partition("=")[0] for x in searched}
    other_overrides = [x for x in overrides if x.partition("=")[0].strip() not in names]
    run = load(source, [*other_overrides, *searched])
    shape = job_shape(run) if run.launch.slurm else None
    per_node = ranks_per_node or (None if shape is None else shape.tasks_per_node)
    if queue:
        if apply is not None:
            raise typer.BadParameter("writes no layout; remove --apply", param_hint="--queue")
        if shape is None or per_node is None:
            raise typer.BadParameter(
                "needs a job; add launch.slurm to the file", param_hint="--queue"
            )
        fewest = shape.nodes[0]
        near = (fewest // 4, fewest // 2, fewest, 2 * fewest, 4 * fewest)
        counts = [n for n in near if n] if nodes is None else node_span(nodes)
        return _queue(run, counts, per_node, device, profile)
    if nodes is None:
        worlds = [world_size or (shape.world_sizes[0] if shape else local_procs(run))]
    else:
        span = node_span(nodes)
        if per_node is None:
            raise typer.BadParameter(
                "the file has no launch.slurm; add --ranks-per-node K", param_hint="--nodes"
            )
        worlds = [number * per_node for number in span]
    if apply is not None and len(worlds) > 1:
        raise typer.BadParameter(
            "writes one layout; search one number of nodes", param_hint="--apply"
        )
    parts: list[str] = []
    for world in worlds:
        accelerator, fabric = _links(run, world, per_node, device, profile)
        error = model_error(accelerator)
        result = search(
            run, world, accelerator, ranks_per_node=per_node, fabric=fabric, error=error
        )
        if not result.found and len(worlds) > 1:
            parts.append(wrap(f"{world} ranks: {_nothing(run, world, accelerator, result)}"))
            continue
        if not result.found:
            why = _nothing(run, world, accelerator, result)
            raise ConfigError(f"{why}{_what_would(run, world, accelerator, per_node, fabric)}")
        choices = simpler_first(result, accelerator)
        parts.append(_table(run, world, per_node, accelerator, result, choices))
        if apply is not None:
            parts.append(_write(source, run, world, choices, apply))
    return "\n\n".join(parts)


def _queue(
    run: RunConfig,
    counts: Sequence[int],
    per_node: int,
    device: str | None,
    profile: tuple[Path, Profile] | None,
) -> str:
    """Return when the run could start and would end on each number of nodes, by Slurm's answers."""
    options = header(run.launch.slurm)
    state, limit = query_queue(options.get("partition")), options.get("time")
    limit_s = inf if limit is None else time_seconds(limit) or inf
    now_s = time.time()
    rows: list[Sequence[object]] = [("NODES", "START", "STEP", "RUN", "DONE", "LAYOUT")]
    ends: dict[int, float] = {}
    for number in counts:
        start_s = state.start_s(number, now_s, limit_s)
        if start_s is None:
            why = f"partition {state.partition} has {state.total} nodes"
            why = why if number > state.total else "Slurm expects too few nodes to be free"
            rows.append((number, "never", "", "", "", why))
            continue
        world = number * per_node
        accelerator, fabric = _links(run, world, per_node, device, profile)
        result = search(run, world, accelerator, ranks_per_node=per_node, fabric=fabric, number=1)
        begins = "now" if start_s <= now_s else f"in {_hours(start_s - now_s)}"
        if not result.found:
            rows.append((number, begins, "", "", "", "no layout fits"))
            continue
        best = result.found[0]
        ends[number] = start_s + best.time.run_seconds
        rows.append(
            (
                number,
                begins,
                seconds_text(best.time.step.total),
                _hours(best.time.run_seconds),
                f"in {_hours(ends[number] - now_s)}",
                _degrees(best),
            )
        )
    lines = [
        f"{run.run.name} on partition {state.partition}: {state.idle} of {state.total} idle",
        text_table(rows, last_left=True),
    ]
    if ends:
        first = min(ends, key=lambda number: ends[number])
        lines.append(f"finished first on {first} nodes")
    lines.append(
        wrap(
            "each start assumes that jobs take their full time limit and that no waiting job is "
            "delayed; a run that takes longer than one job waits in the queue again"
        )
    )
    return "\n".join(lines)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.3g} h"


def _degrees(layout: RankedLayout) -> str:
    parallel = layout.plan.config.parallel
    sizes = [f"{x}={getattr(parallel, x)}" for x in AXES if getattr(parallel, x) != 1]
    return " ".join([*sizes, *([f"zero={parallel.zero}"] if parallel.zero else [])])


def _links(
    run: RunConfig,
    world: int,
    per_node: int | None,
    name: str | None,
    profile: tuple[Path, Profile] | None,
) -> tuple[Accelerator, Fabric | None]:
    if profile is not None and name is None:
        path, cluster = profile
        device = measured_device(cluster, run, path, world, per_node)
        return device, measured_fabric(cluster, device, per_node)
    device = device_of(run, name)
    if device is None:
        raise ConfigError(
            f"--search needs a device: pass --device NAME, or name the type of GPU in "
            f"launch.slurm, such as gpus-per-node: h100:8, or pass --profile FILE that tdp comm "
            f"bench --profile measured; the devices are {', '.join(DEVICES)}"
        )
    return device, None


def model_error(device: Accelerator) -> float:
    """Return the relative error of predicted steps that the tests of predict hold, the mean of a
    device with a fit and the worst of others."""
    return MEAN_BAR if device.is_fitted else UNFITTED_BAR


def simpler_first(result: SearchResult, device: Accelerator) -> list[RankedLayout]:
    """Return the layouts with those that are as fast as the fastest within the model's error first,
    the simplest of all such layouts before them."""
    assert result.simplest is not None
    limit = result.found[0].time.step.total * (1 + model_error(device))

    def key(each: RankedLayout) -> tuple[float, float]:
        seconds = each.time.step.total
        return (each.choice.complexity if seconds <= limit else float("inf"), seconds)

    simplest = result.simplest
    others = sorted((x for x in result.found if x is not simplest), key=key)
    return [simplest, *others][: len(result.found)]


def _table(
    run: RunConfig,
    world: int,
    per_node: int | None,
    device: Accelerator,
    result: SearchResult,
    layouts: Sequence[RankedLayout],
) -> str:
    rows: list[Sequence[object]] = [
        ("", "TOKENS/S", "STEP", "GiB", *map(str.upper, AXES), "ZERO", "BATCHES", "ORDER", "PAYS")
    ]
    for number, layout in enumerate(layouts, 1):
        parallel, pipeline = layout.plan.config.parallel, layout.plan.config.pipeline
        rounds = layout.plan.rounds
        batches = f"{rounds} x " * (rounds > 1) + str(pipeline.microbatches)
        order = pipeline.schedule if parallel.pipe > 1 else "-"
        order += f" {layout.choice.chunks}" * (layout.choice.chunks > 1)
        rows.append(
            (
                number,
                f"{layout.tokens_per_s:,.0f}",
                seconds_text(layout.time.step.total),
                f"{layout.peak_bytes / 2**30:.1f}",
                *(getattr(parallel, axis) for axis in AXES),
                parallel.zero,
                batches,
                order,
                _pays(layout),
            )
        )
    fast = layouts[0].time.step.total
    best = result.found[0].time.step.total
    error = model_error(device)
    alike = sum(x.time.step.total <= best * (1 + error) for x in layouts)
    where = "" if per_node is None else f", {per_node} on a node"
    head = wrap(
        f"{run.run.name} on {world} ranks{where} ({device.name}): the fastest of "
        f"{result.num_valid:,} valid combinations of degrees and micro-batches, each with all "
        "schedules, stages of ZeRO and orders of ranks, that fit in "
        f"{result.limit_bytes / 2**30:.1f} GiB on a rank"
    )
    notes: list[str] = []
    if alike > 1:
        notes.append(
            f"{alike} of them are within {error:.0%} of the fastest, the error of predictions on "
            "this device; the first row is the simplest of these"
            + (f", {fast / best - 1:.1%} slower than the fastest" if fast > best else "")
        )
    notes.append("a short run of two or three of them tells which is faster on your cluster")
    lines = [wrap(f"note  {text}", indent=" " * 6) for text in notes]
    keys = [_keys(number, layout, world) for number, layout in enumerate(layouts, 1)]
    return "\n".join(
        [head, wrap(_TRIED), "", text_table(rows, last_left=True), "", *lines, "", *keys]
    )


def _pays(each: RankedLayout) -> str:
    """Return the largest term besides the computation of the model."""
    terms = {name: s for name, s in each.time.step.terms.items() if name != "compute"}
    name = max(terms, key=lambda x: terms[x])
    return f"{name} {terms[name] / each.time.step.total:.1%}"


def _keys(number: int, each: RankedLayout, world: int) -> str:
    """Return the lines of YAML of a layout."""
    keys = each.choice.keys(world)
    written = {
        section: {k: v for k, v in values.items() if v is not None}
        for section, values in keys.items()
    }
    lines = [
        f"{section}: {{{', '.join(f'{k}: {_plain(v)}' for k, v in values.items())}}}"
        for section, values in written.items()
    ]
    return "\n".join([f"# {number}", *lines])


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, cast('tuple[object, ...]', value)))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write(source: str, run: RunConfig, world: int, layouts: Sequence[RankedLayout], n: int) -> str:
    """Write a copy of the file with the keys of a layout; return the line to print."""
    if not 1 <= n <= len(layouts):
        raise ConfigError(f"--apply {n}: the layouts are 1 to {len(layouts)}; choose one of them")
    config = layouts[n - 1].choice.of(run, world)
    path = Path(source).with_name(f"{Path(source).stem}-layout{n}.yaml")
    head = f"# layout {n} of tdp plan {Path(source).name} --search on {world} ranks\n"
    text = head + write(config.model_dump(mode="python", exclude_defaults=True))
    if path.exists() or path.is_symlink():
        raise ConfigError(f"--apply {n}: {path} exists; move it away first")
    try:
        atomic_write(path, text)
    except OSError as error:
        raise ConfigError(f"--apply {n}: {path} cannot be written: {error.strerror}") from error
    return f"wrote {path}"


def _nothing(run: RunConfig, world: int, device: Accelerator, result: SearchResult) -> str:
    if not result.num_valid:
        return (
            f"no degrees of {world} ranks pass the rules: "
            f"data.global_batch={run.data.global_batch}, model.heads={run.model.heads} and "
            f"data.seq_len={run.data.seq_len} cannot all be divided by them; change the number of "
            "ranks or data.global_batch"
        )
    limit = result.limit_bytes / 1e9
    if result.least_bytes is not None and result.least_bytes > result.limit_bytes:
        return (
            f"no layout of {world} ranks fits in the {limit:.3g} GB that a rank of {device.name} "
            f"may hold: even the smallest takes at least {result.least_bytes / 1e9:.4g} GB"
        )
    return f"no layout of {world} ranks may run: {result.refusal}"


def _what_would(
    run: RunConfig, world: int, device: Accelerator, per_node: int | None, fabric: Fabric | None
) -> str:
    """Return the end of a message where nothing fits: on how many ranks something does."""
    for times in _MORE:
        if world * times > MAX_RANKS:
            break
        more = search(run, world * times, device, ranks_per_node=per_node, fabric=fabric, number=1)
        if more.found:
            return f"; {world * times} ranks would do, or more memory with train.memory_gb"
    return (
        f"; no number up to {world * _MORE[-1]} ranks would do: use weights of bf16, a smaller "
        f"micro-batch by a larger data.global_batch, or a smaller model"
    )
