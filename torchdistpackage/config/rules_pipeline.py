"""Rules of the pipeline section: its stages, chunks and files."""

from functools import lru_cache
from pathlib import Path

from torchdistpackage.config.rules import Rule, rule
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import AUTO, CUSTOM, SCHEDULES
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import CostsFile, read_costs
from torchdistpackage.schedule.generators import MAX_CELLS, TWO_CHUNKS, num_chunks
from torchdistpackage.schedule.resolve import csv_text, from_csv


def piece_names(layers: int) -> tuple[str, ...]:
    """Return the pieces of a built-in model; stages may be cut between any two of them."""
    halves = (f"blocks.{i}.{half}" for i in range(layers) for half in ("attention", "mlp"))
    return ("embed", *halves, "head")


def num_stages(config: RunConfig) -> int:
    """Return the number of pipeline stages; with schedule=auto, the smallest number it may choose.

    Raises:
        ScheduleError: pipeline.file has the number, and cannot be read.
    """
    name, chunks = config.pipeline.schedule, config.pipeline.chunks
    if name == CUSTOM:
        return custom_schedule(config).num_stages
    return config.parallel.pipe * num_chunks(name, chunks)


def custom_schedule(config: RunConfig) -> Schedule:
    """Return the checked schedule of `pipeline.file`, with its messages.

    Raises:
        ScheduleError: it cannot be read or run; names file and line.
    """
    assert config.pipeline.file is not None
    path = Path(config.pipeline.file)
    parsed = _parse(csv_text(path), path.stem)
    if isinstance(parsed, ScheduleError):
        raise ScheduleError(f"{path}: {parsed}") from parsed
    return parsed


@lru_cache(maxsize=2)
def _parse(text: str, name: str) -> Schedule | ScheduleError:
    """Parse a CSV, or return its error.

    The error is returned instead of raised so that the cache holds it too: several rules read the
    same file for each possible number of ranks.
    """
    try:
        return from_csv(text, name=name)
    except ScheduleError as error:
        return error


def measured_costs(config: RunConfig) -> CostsFile | None:
    """Return the costs in the file of `pipeline.costs`, or None without one.

    Raises:
        ScheduleError: the file cannot be read; names file and key.
    """
    path = config.pipeline.costs
    return None if path is None else read_costs(path)


@rule("pipeline.file", "pipeline.schedule", "pipeline.microbatches", "parallel.pipe")
def _file_is_a_schedule(c: RunConfig, world_size: int | None) -> str | None:
    name, file = c.pipeline.schedule, c.pipeline.file
    if name != CUSTOM:
        unread = f"pipeline.file={file} has no effect with pipeline.schedule={name}"
        return None if file is None else f"{unread}; remove it, or set schedule to {CUSTOM}"
    if file is None:
        return (
            f"pipeline.schedule={CUSTOM} needs pipeline.file, a CSV with a row for each pipe rank"
        )
    try:
        schedule = custom_schedule(c)
    except ScheduleError as error:
        return str(error)
    ranks, number = len(schedule.programs), schedule.num_microbatches
    if ranks != c.parallel.pipe:
        return (
            f"{file} is a schedule of {ranks} ranks, but parallel.pipe={c.parallel.pipe}; set pipe "
            f"to {ranks}, or name another file"
        )
    if number != c.pipeline.microbatches:
        return (
            f"{file} is a schedule of {number} microbatches, but pipeline.microbatches="
            f"{c.pipeline.microbatches}; set microbatches to {number}, or name another file"
        )
    idle = [i for i in range(ranks) if not schedule.stages_of(i)]
    if idle:
        return f"{file} gives rank {idle[0]} no stage; add a stage to its row, or remove rows"
    if schedule.has_backward:
        return None
    return f"{file} has no backward, so it trains nothing; add backwards"


@rule("parallel.pipe", "pipeline.chunks", "pipeline.schedule", "pipeline.microbatches")
def _schedule_is_no_slip(c: RunConfig, world_size: int | None) -> str | None:
    name, number = c.pipeline.schedule, c.pipeline.microbatches
    if name == CUSTOM:
        return None
    most, stages = MAX_CELLS[name == AUTO], num_stages(c)
    if stages * number <= most:
        return None
    return (
        f"pipeline.microbatches={number} on {stages} stages makes {stages * number:,} passes, more "
        f"than the {most:,} that pipeline.schedule={name} allows; set microbatches to "
        f"{max(most // stages, 1)} or less, or use fewer stages"
    )


@rule("pipeline.chunks", "pipeline.schedule")
def _chunks_fit_schedule(c: RunConfig, world_size: int | None) -> str | None:
    name, chunks = c.pipeline.schedule, c.pipeline.chunks
    if chunks is None or name == AUTO:
        return None
    setting = f"pipeline.chunks={chunks} with pipeline.schedule={name}"
    if name == CUSTOM:
        return f"{setting}, whose file gives each rank its stages; remove chunks"
    if chunks == 1 or name in TWO_CHUNKS:
        return None
    others = [n for n in SCHEDULES if n in TWO_CHUNKS]
    return (
        f"{setting}, which has one stage on each rank; remove chunks, or set schedule to "
        f"{', '.join(others)} or {AUTO}"
    )


@rule(
    "parallel.pipe",
    "model.layers",
    "model.name",
    "pipeline.chunks",
    "pipeline.schedule",
    "pipeline.file",
    "pipeline.microbatches",
)
def _stages_have_pieces(c: RunConfig, world_size: int | None) -> str | None:
    pipe, layers, name = c.parallel.pipe, c.model.layers, c.pipeline.schedule
    if c.model.name is None or (name == CUSTOM and _file_is_a_schedule.message(c, world_size)):
        return None
    stages, pieces = num_stages(c), len(piece_names(layers))
    if stages <= pieces:
        return None
    chunks = stages // pipe
    whose = "pipeline.chunks" if c.pipeline.chunks else f"pipeline.schedule={name}"
    each = f" x {chunks} chunks (of {whose})" if chunks > 1 else ""
    fits = pieces // chunks
    offer = f"set pipe to {fits} or less, or " if fits else ""
    return (
        f"parallel.pipe={pipe}{each} makes {stages} stages, but model.layers={layers} gives "
        f"{pieces} pieces: the embedding, the attention and MLP of each layer, and the head; "
        f"{offer}set layers to {-(-(stages - len(piece_names(0))) // 2)} or more"
    )


@rule("pipeline.costs", "pipeline.partition")
def _costs_are_there(c: RunConfig, world_size: int | None) -> str | None:
    try:
        costs = measured_costs(c)
    except ScheduleError as error:
        return str(error)
    if c.pipeline.partition != "time":
        return None
    if costs is None:
        return (
            "pipeline.partition=time needs the seconds of each piece; set pipeline.costs to a file "
            "with them, such as the costs.yaml that a pipeline run writes to its folder"
        )
    if not costs.pieces:
        return (
            f"pipeline.partition=time needs the seconds of each piece, but {c.pipeline.costs} has "
            f"no `pieces`; use the costs.yaml of a run, or set partition to cost"
        )
    return None


@rule(
    "pipeline.costs",
    "pipeline.schedule",
    "pipeline.chunks",
    "pipeline.partition",
    "parallel.pipe",
    "model.layers",
    "model.name",
    "pipeline.file",
    "pipeline.microbatches",
)
def _costs_are_of_this_run(c: RunConfig, world_size: int | None) -> str | None:
    if _costs_are_there.message(c, world_size) or _file_is_a_schedule.message(c, world_size):
        return None
    costs, pipe, auto = measured_costs(c), c.parallel.pipe, c.pipeline.schedule == AUTO
    if costs is None:
        return None
    try:
        if costs.pieces and c.model.name is not None:
            costs.check_pieces(piece_names(c.model.layers))
        elif costs.pieces and c.pipeline.partition == "time":
            return None  # a user's own model, whose pieces are known only once it is built
        elif not auto or c.pipeline.chunks is not None:
            costs.of(num_stages(c))
        elif costs.num_stages is None:
            return (
                f"{costs.source} has one number for all stages, so a stage would cost the same "
                f"however many there are; set pipeline.chunks, or add `pieces` to the file"
            )
        elif costs.num_stages % pipe:
            return (
                f"{costs.source} has costs of {costs.num_stages} stages, which parallel.pipe="
                f"{pipe} ranks cannot share evenly; use the costs.yaml of this run"
            )
    except ScheduleError as error:
        return str(error)
    return None


PIPELINE_RULES = tuple(x for x in tuple(globals().values()) if isinstance(x, Rule))
