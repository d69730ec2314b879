"""`tdp schedule`: a pipeline schedule as a picture and in numbers, with no file and no device."""

from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.errors import ConfigError
from torchdistpackage.schedule import draw
from torchdistpackage.schedule.actions import Kind, to_csv
from torchdistpackage.schedule.generate import GENERATORS, build
from torchdistpackage.schedule.simulate import DEFAULT_COSTS, simulate


def _cost(of: str) -> typer.models.OptionInfo:
    # Whole numbers, because a cell of the table is one unit; any ratio can be written with two.
    return typer.Option(metavar="N", min=1, help=f"Time units of one {of}.")


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(GENERATORS)}.")],
    stages: Annotated[int, typer.Option(metavar="P", help="Pipeline stages, one a rank.")],
    microbatches: Annotated[int, typer.Option(metavar="M", help="Microbatches in one round.")],
    forward_cost: Annotated[int, _cost("forward")] = int(DEFAULT_COSTS[Kind.F]),
    backward_cost: Annotated[int, _cost("backward")] = int(DEFAULT_COSTS[Kind.B]),
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it into this file.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write its actions into this file.")
    ] = None,
) -> None:
    """Show a pipeline schedule and how long its ranks are idle."""
    built = build(name, stages, microbatches)
    timeline = simulate(built, {Kind.F: float(forward_cost), Kind.B: float(backward_cost)})
    idle, turns = stages - 1, microbatches + stages - 1
    lines = [
        f"{name}, {stages} stages, {microbatches} microbatches; "
        f"a forward takes {forward_cost}, a backward {backward_cost}",
        "",
        draw.table(timeline),
        "",
        f"total              {timeline.total:g} units",
        f"bubble             {timeline.bubble:.1%}",
        f"(p-1)/(m+p-1)      {idle}/{turns} = {idle / turns:.1%}",
        f"live microbatches  {' '.join(map(str, timeline.peak_live))}   (at most, by stage)",
    ]
    for path, text in ((svg, draw.svg(timeline)), (csv, to_csv(built) + "\n")):
        if path is not None:
            _write(path, text)
            lines.append(f"wrote {path}")
    typer.echo("\n".join(lines))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from error
