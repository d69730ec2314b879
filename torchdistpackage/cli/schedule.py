"""`tdp schedule`: draw and simulate a pipeline schedule, without a device."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import wrap
from torchdistpackage.errors import ConfigError, ScheduleError
from torchdistpackage.schedule import draw
from torchdistpackage.schedule.actions import ActionKind, Schedule
from torchdistpackage.schedule.autoschedule import synthesize
from torchdistpackage.schedule.costs import StageCosts, read_costs
from torchdistpackage.schedule.draw import trace
from torchdistpackage.schedule.engine import DEFAULT_COSTS, Timeline, simulate
from torchdistpackage.schedule.generators import GENERATORS, MAX_CELLS, build, canonical, num_chunks
from torchdistpackage.schedule.resolve import csv_text, from_csv, to_csv
from torchdistpackage.text import terminal_width

WIDEST_CELLS = 200


def _cost(of: ActionKind, words: str) -> typer.models.OptionInfo:
    # Integers, because a cell of the table is one unit; two integers can express any ratio.
    text = f"Time of one {words} on every stage, in units; default: {DEFAULT_COSTS[of]:g}."
    return typer.Option(metavar="N", min=1, help=text)


def _file(content: str) -> typer.models.OptionInfo:
    return typer.Option(metavar="FILE", help=f"Write {content} to FILE.")


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"One of {', '.join(GENERATORS)}; auto, which searches for the shortest order; or "
            "a file FILE.csv in the format of torch.distributed.pipelining.",
        ),
    ],
    stages: Annotated[
        int | None,
        typer.Option(
            metavar="P",
            help="Number of pipeline ranks. Each holds V stages (--chunks), P x V in all.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", help="Number of microbatches in a step.")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="V",
            help="Number of stages on each pipeline rank; default: the schedule's own.",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML or JSON file with the costs forward, backward (or input and weight) and "
            "message, each one number or a list with a number for each stage.",
        ),
    ] = None,
    forward_cost: Annotated[int | None, _cost(ActionKind.F, "forward")] = None,
    backward_cost: Annotated[int | None, _cost(ActionKind.B, "backward")] = None,
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Number of steps to simulate, with no barrier between them."
        ),
    ] = 1,
    svg: Annotated[Path | None, _file("a drawing (SVG)")] = None,
    png_file: Annotated[
        Path | None,
        typer.Option(
            "--png", metavar="FILE", help="Write a drawing to FILE (PNG); needs matplotlib."
        ),
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a Chrome trace to FILE (JSON)."),
    ] = None,
    csv: Annotated[Path | None, _file("the computations in torch's format (CSV)")] = None,
) -> None:
    """Show a pipeline schedule and its bubble."""
    costs_of, words = _costs(costs, forward_cost, backward_cost)
    order = _schedule(name, stages, microbatches, chunks, costs_of)
    timeline = simulate(order, costs_of(order.num_stages), steps)
    unit = 1.0 if costs is None and _is_whole(timeline) else _unit(timeline)
    written: list[str] = []
    for path, content in (
        (svg, lambda: draw.svg(timeline).encode()),
        (png_file, lambda: draw.png(timeline)),
        (trace_file, lambda: trace(timeline).encode()),
        (csv, lambda: to_csv(order).encode()),
    ):
        if path is not None:
            _write(path, content())
            written.append(f"wrote {path}")
    typer.echo("\n".join([*_report(order, timeline, words, unit, steps), *written]))


def _schedule(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None,
    costs: Callable[[int], StageCosts],
) -> Schedule:
    if Path(name).suffix.lower() != ".csv":
        if name != "auto":
            name = canonical(name)
        if ranks is None or microbatches is None:
            raise ConfigError(
                f"{name} needs the number of pipe ranks and microbatches; give --stages P and "
                f"--microbatches M"
            )
        most = MAX_CELLS[name == "auto"]
        if (cells := ranks * microbatches * num_chunks(name, chunks)) > most:
            raise ConfigError(
                f"{name}: {microbatches:,} microbatches in all stages are {cells:,} passes, more "
                f"than the {most:,} allowed; use fewer microbatches or stages"
            )
        if name != "auto":
            return build(name, ranks, microbatches, chunks)
        v = 1 if chunks is None else chunks
        return synthesize(ranks, microbatches, costs(max(ranks * v, 1)), chunks=v)
    text = csv_text(Path(name))
    try:
        order = from_csv(text, Path(name).stem.replace(" ", "_"))
    except ScheduleError as error:
        raise ConfigError(f"{name}: {error}") from error
    sizes = (
        ("--stages", "pipe ranks", ranks, len(order.programs)),
        ("--microbatches", "microbatches", microbatches, order.num_microbatches),
        ("--chunks", "stages on each", chunks, order.num_stages // len(order.programs)),
    )
    for option, words, requested, in_file in sizes:
        if requested is not None and requested != in_file:
            raise ConfigError(f"{name} has {in_file} {words}, not {requested}; remove {option}")
    return order


def _costs(
    path: Path | None, forward: int | None, backward: int | None
) -> tuple[Callable[[int], StageCosts], str]:
    """Return a function from a number of stages to their costs, and a description of the costs."""
    if path is None:
        numbers = {
            ActionKind.F: float(forward or DEFAULT_COSTS[ActionKind.F]),
            ActionKind.B: float(backward or DEFAULT_COSTS[ActionKind.B]),
        }
        words = f"a forward takes {numbers[ActionKind.F]:g}, a backward {numbers[ActionKind.B]:g}"
        return partial(StageCosts.of, numbers), words
    if forward is not None or backward is not None:
        raise ConfigError(
            "--costs has the cost of every action; remove --forward-cost and --backward-cost"
        )
    return read_costs(path).of, f"costs of {path}"


def _is_whole(timeline: Timeline) -> bool:
    return all(span.end.is_integer() for row in timeline.spans for span in row)


def _unit(timeline: Timeline) -> float:
    """Return the time of one cell of the table: half the shortest action, or more to fit it."""
    spans = [span for row in timeline.spans for span in row if span.end > span.start]
    shortest = min((span.end - span.start for span in spans), default=1.0)
    return max(shortest / 2, timeline.total / WIDEST_CELLS)


def _report(order: Schedule, timeline: Timeline, costs: str, unit: float, steps: int) -> list[str]:
    ranks, microbatches = len(order.programs), order.num_microbatches
    idle, slots = ranks - 1, microbatches + ranks - 1
    chunks = "" if order.num_stages == ranks else f" on {ranks} pipe ranks"
    repeated = "" if steps == 1 else f", {steps} steps"
    head = (
        f"{order.name}, {order.num_stages} stages{chunks}, {microbatches} microbatches{repeated}; "
    )
    drawing = [
        wrap(head + costs),
        "",
        draw.table(timeline, unit, terminal_width()),
        "",
    ]
    lines = [
        f"total              {timeline.total:g} units",
        f"bubble             {timeline.bubble:.1%}",
        f"by pipe rank       {' '.join(f'{bubble:.1%}' for bubble in timeline.bubbles)}",
        f"(p-1)/(m+p-1)      {idle}/{slots} = {idle / slots:.1%}",
        f"live microbatches  {' '.join(map(str, timeline.peak_live))}   (at most, by stage)",
    ]
    if chunks:
        live = " ".join(map(str, timeline.peak_live_of_rank))
        lines.append(f"                   {live}   (at most, by pipe rank)")
    return [*drawing, wrap("\n".join(lines), indent=" " * 19)]


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        advice = "name a file in it" if path.is_dir() else "name a file in a folder that exists"
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {advice}") from error
