"""`tdp schedule`: a pipeline schedule as a picture and in numbers, with no device."""

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
    # Integers, because a cell of the table is one unit; any ratio can be written with two.
    text = f"Time units of one {words} on every stage; default: {DEFAULT_COSTS[of]:g}."
    return typer.Option(metavar="N", min=1, help=text)


def _file(what: str) -> typer.models.OptionInfo:
    return typer.Option(metavar="FILE", help=f"Write {what}.")


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"One of {', '.join(GENERATORS)}, auto (the shortest order found for the costs), "
            "or a file FILE.csv in the format of torch.distributed.pipelining.",
        ),
    ],
    stages: Annotated[
        int | None,
        typer.Option(
            metavar="P",
            help="Pipeline ranks. Each holds V stages (--chunks), P x V in all.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", help="Microbatches in a step.")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            metavar="V", help="Stages on each pipeline rank; default: the schedule's own."
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML or JSON file of costs: forward, backward (or input and weight) and message, "
            "each one number or a list with a number for each stage.",
        ),
    ] = None,
    forward_cost: Annotated[int | None, _cost(ActionKind.F, "forward")] = None,
    backward_cost: Annotated[int | None, _cost(ActionKind.B, "backward")] = None,
    steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Number of consecutive steps, with no barrier between them."
        ),
    ] = 1,
    svg: Annotated[Path | None, _file("a drawing (SVG)")] = None,
    png_file: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Write a drawing (PNG); needs matplotlib."),
    ] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace (JSON).")
    ] = None,
    csv: Annotated[Path | None, _file("the computations in torch's format (CSV)")] = None,
) -> None:
    """Show a pipeline schedule and its bubble."""
    read, words = _costs(costs, forward_cost, backward_cost)
    made = _schedule(name, stages, microbatches, chunks, read)
    taken = read(made.num_stages)
    timeline = simulate(made, taken, steps)
    unit = 1.0 if costs is None and _is_whole(timeline) else _unit(timeline)
    written: list[str] = []
    for path, content in (
        (svg, lambda: draw.svg(timeline).encode()),
        (png_file, lambda: draw.png(timeline)),
        (trace_file, lambda: trace(timeline).encode()),
        (csv, lambda: to_csv(made).encode()),
    ):
        if path is not None:
            _write(path, content())
            written.append(f"wrote {path}")
    typer.echo("\n".join([*_report(made, timeline, words, unit, steps), *written]))


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
            raise ConfigError(f"{name} needs --stages P (pipe ranks) and --microbatches M")
        most = MAX_CELLS[name == "auto"]
        if (cells := ranks * microbatches * num_chunks(name, chunks)) > most:
            raise ConfigError(
                f"{name}: {microbatches:,} microbatches in all stages are {cells:,} passes; at "
                f"most {most:,} are made"
            )
        if name != "auto":
            return build(name, ranks, microbatches, chunks)
        v = 1 if chunks is None else chunks
        return synthesize(ranks, microbatches, costs(max(ranks * v, 1)), chunks=v)
    text = csv_text(Path(name))
    try:
        made = from_csv(text, Path(name).stem.replace(" ", "_"))
    except ScheduleError as error:
        raise ConfigError(f"{name}: {error}") from error
    held = (
        ("--stages", "pipe ranks", ranks, len(made.programs)),
        ("--microbatches", "microbatches", microbatches, made.num_microbatches),
        ("--chunks", "stages on each", chunks, made.num_stages // len(made.programs)),
    )
    for option, words, asked, found in held:
        if asked is not None and asked != found:
            raise ConfigError(f"{name} has {found} {words}, not {asked}; leave {option} out")
    return made


def _costs(
    path: Path | None, forward: int | None, backward: int | None
) -> tuple[Callable[[int], StageCosts], str]:
    """The costs of so many stages, and how to say them."""
    if path is None:
        numbers = {
            ActionKind.F: float(forward or DEFAULT_COSTS[ActionKind.F]),
            ActionKind.B: float(backward or DEFAULT_COSTS[ActionKind.B]),
        }
        words = f"a forward takes {numbers[ActionKind.F]:g}, a backward {numbers[ActionKind.B]:g}"
        return partial(StageCosts.of, numbers), words
    if forward is not None or backward is not None:
        raise ConfigError("--costs says what all actions cost; leave out the other cost options")
    return read_costs(path).of, f"costs of {path}"


def _is_whole(timeline: Timeline) -> bool:
    return all(span.end.is_integer() for row in timeline.spans for span in row)


def _unit(timeline: Timeline) -> float:
    """Half the shortest action a cell, unless the table would be too wide."""
    spans = [span for row in timeline.spans for span in row if span.end > span.start]
    shortest = min((span.end - span.start for span in spans), default=1.0)
    return max(shortest / 2, timeline.total / WIDEST_CELLS)


def _report(made: Schedule, timeline: Timeline, costs: str, unit: float, steps: int) -> list[str]:
    ranks, microbatches = len(made.programs), made.num_microbatches
    idle, slots = ranks - 1, microbatches + ranks - 1
    chunks = "" if made.num_stages == ranks else f" on {ranks} pipe ranks"
    repeated = "" if steps == 1 else f", {steps} steps"
    head = f"{made.name}, {made.num_stages} stages{chunks}, {microbatches} microbatches{repeated}; "
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
