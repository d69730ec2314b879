"""`tdp checkpoint`: show, verify, compare, convert and remove checkpoints, in one process.

It makes no process group and holds at most one tensor of each checkpoint at a time, so it can run
on a login node. A checkpoint is named by its folder, or by a run's folder for the run's latest.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from torchdistpackage.checkpoint.catalog import (
    CheckpointInfo,
    checkpoints_of,
    tensor_rows,
)
from torchdistpackage.checkpoint.catalog import (
    verify as verify_files,
)
from torchdistpackage.checkpoint.commit import candidates, damage, latest, remove_checkpoint
from torchdistpackage.checkpoint.formats.table import FORMATS, SOURCES, TARGETS
from torchdistpackage.checkpoint.manifest import NAME, read_manifest
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.cli._common import refusal
from torchdistpackage.config.load import load
from torchdistpackage.errors import CheckpointError, ConfigError
from torchdistpackage.launch.run_folder import only_writer
from torchdistpackage.lazy import resolve
from torchdistpackage.run_files import CHECKPOINTS, RESOLVED
from torchdistpackage.text import size_text, text_table

_SOURCE = "torchdistpackage.checkpoint.formats.source:checkpoint_source"
_COMPARE = "torchdistpackage.checkpoint.compare"
_NAMES = "torchdistpackage.checkpoint.formats.names"
_IMPORT = "torchdistpackage.checkpoint.formats.importing:write_checkpoint"
_SHOWN = 40
_ALL = Retention(last=1 << 20)
"""The retention of a folder without a run: keep all, because nothing prunes it."""
_MAX_THREADS = 8

# readable=False: the code that reads the folder refuses an unreadable one with a better message.
Where = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_FOLDER", readable=False, help="Folder of a run, or of its checkpoints."
    ),
]
One = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="Folder step_NNNNNN, or folder of a run for its latest."
    ),
]
Names = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="YAML file that renames tensors, in lines `our name: their name`; * matches a part "
        "of a name.",
    ),
]
Weights = Annotated[bool, typer.Option("--weights-only", help="Leave out the optimizer state.")]

checkpoint = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@checkpoint.command()
def ls(where: Where) -> None:
    """List checkpoints, newest first, and the rule that keeps each."""
    folder = _folder(where)
    infos = checkpoints_of(folder, _retention(folder))
    if not infos:
        typer.echo(f"{folder} has no checkpoints")
        return
    rows: list[Sequence[object]] = [
        ("STEP", "AGE", "SIZE", "TOKENS", "LOSS", "VAL_LOSS", "LAYOUT", "STATE")
    ]
    rows += [_row(info) for info in infos]
    typer.echo(text_table(rows, last_left=True, num_keys=1))


@checkpoint.command()
def show(
    path: One,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Also show mean, standard deviation, least and largest value of each tensor, and "
            "how many values are NaN or infinite.",
        ),
    ] = False,
) -> None:
    """Show the tensors of a checkpoint: type, shape, size and pieces."""
    path = _one(path)
    manifest, rows = read_manifest(path), tensor_rows(path)
    total = sum(row.num_bytes for row in rows)
    typer.echo(f"{path}: step {manifest.step}, {manifest.tokens:,} tokens, {size_text(total)}")
    if manifest.degrees:
        typer.echo("written under " + " ".join(f"{a}={n}" for a, n in manifest.degrees))
    for name, value in manifest.facts.items():
        typer.echo(f"{name}: {value}")
    head: list[object] = ["TENSOR", "DTYPE", "SHAPE", "SIZE", "PIECES"]
    table: list[Sequence[object]] = [head + ["MEAN", "STD", "MIN", "MAX", "NONFINITE"] * stats]
    source = resolve(_SOURCE)(path) if stats else None
    for tensor in rows:
        row: list[object] = [
            tensor.name,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "-",
            size_text(tensor.num_bytes),
            tensor.cut,
        ]
        if source is not None:
            of_tensor = resolve(f"{_COMPARE}:stats_of")(source.read(tensor.name))
            numbers = (of_tensor.mean, of_tensor.std, of_tensor.smallest, of_tensor.largest)
            row += [f"{number:.4g}" for number in numbers] + [str(of_tensor.num_nonfinite)]
        table.append(row)
    typer.echo(text_table(table, num_left=2, num_keys=1))


@checkpoint.command()
def verify(where: Where) -> None:
    """Check every file of one or all checkpoints by its checksum.

    The exit code is 1 if a file is damaged.
    """
    paths = [where] if (where / NAME).exists() else candidates(_folder(where))
    if not paths:
        raise refusal("tdp checkpoint verify", [f"{where} has no checkpoints"])
    total = sum(_readable_bytes(path) for path in paths)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    problems = dict[Path, list[str]]()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=total)
        for path in paths:
            problems[path] = verify_files(path, lambda n: bar.advance(task, n), num_threads)
    for path, damages in problems.items():
        typer.echo(f"{path}: {'; '.join(damages) or 'every checksum agrees'}")
    if any(problems.values()):
        raise typer.Exit(1)


@checkpoint.command()
def diff(
    one: One,
    other: Annotated[
        Path, typer.Argument(metavar="OTHER", help="Another checkpoint, or run for its latest.")
    ],
    most: Annotated[
        int, typer.Option("--most", metavar="N", min=1, help="Largest number of tensors to show.")
    ] = _SHOWN,
) -> None:
    """Compare the tensors of two checkpoints, whatever their layouts.

    The exit code is 1 if they differ.
    """
    sources = [resolve(_SOURCE)(_one(path)) for path in (one, other)]
    differences = sorted(resolve(f"{_COMPARE}:differences")(*sources), key=lambda x: (-x[2], x[0]))
    if not differences:
        num_same = len(sources[0].tensors.keys() & sources[1].tensors.keys())
        typer.echo(f"all {num_same} tensors are equal")
        return
    rows: list[Sequence[object]] = [("TENSOR", "LARGEST DIFFERENCE", "")]
    for name, note, largest in differences[:most]:
        rows.append((name, "" if math.isinf(largest) and note else f"{largest:.6g}", note))
    typer.echo(text_table(rows, num_left=1, last_left=True))
    if len(differences) > most:
        typer.echo(f"... and {len(differences) - most} more (--most N shows them)")
    typer.echo(f"{len(differences)} tensors differ")
    raise typer.Exit(1)


@checkpoint.command()
def export(
    path: One,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File or folder to create.")],
    to: Annotated[str, typer.Option(metavar="|".join(TARGETS), help="Format to write.")],
    names: Names = None,
    weights_only: Weights = False,
) -> None:
    """Write a checkpoint in the format of another library."""
    if to not in TARGETS:
        raise refusal(
            "tdp checkpoint export", [f"--to {to} is unknown; use one of {', '.join(TARGETS)}"]
        )
    if FORMATS[to].is_model:
        _export_hf(path, target, names)
        return
    path = _one(path)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise refusal(
            "tdp checkpoint export",
            [f"{target} exists already; name a file or folder that does not"],
        )
    if problem := damage(path, checksums=True):
        raise CheckpointError(f"{path} is damaged: {problem}; name another checkpoint")
    source = resolve(_SOURCE)(path)
    source = source.only(lambda name: "#" not in name) if weights_only else source
    if names is not None:
        source = resolve(f"{_NAMES}:as_theirs")(source, resolve(f"{_NAMES}:read_names")(names))
    _write(lambda: resolve(FORMATS[to].write)(source, target), target)
    typer.echo(f"{path} -> {target}: {len(source.tensors)} tensors")


@checkpoint.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="File or folder to read.")],
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FOLDER", help="Run, or folder of checkpoints, to add the checkpoint to."
        ),
    ],
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="|".join(SOURCES),
            help="Format of SOURCE; suffix: files of each rank named by get_mp_ckpt_suffix.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Step of the checkpoint; default: the one in SOURCE, or 0."
        ),
    ] = None,
    names: Names = None,
    weights_only: Weights = False,
) -> None:
    """Make a checkpoint from the tensors of another library."""
    problems = []
    if from_ not in SOURCES:
        problems.append(f"--from {from_} is unknown; use one of {', '.join(SOURCES)}")
    if not source.exists():
        problems.append(f"{source}: there is no such file or folder")
    if problems:
        raise refusal("tdp checkpoint import", problems)
    tensors: Any = resolve(FORMATS[from_].read)(source)
    num_in_source = len(tensors.tensors)
    tensors = tensors.only(lambda name: "#" not in name) if weights_only else tensors
    if names is not None:
        tensors = resolve(f"{_NAMES}:as_ours")(tensors, resolve(f"{_NAMES}:read_names")(names))
    tensors = _of_step(tensors, step, source)
    into = folder / CHECKPOINTS if _is_run(folder) else folder
    written: Any = None

    def write() -> None:
        nonlocal written
        written = resolve(_IMPORT)(tensors, into)

    _write(write, into)
    typer.echo(f"{source} -> {written}: {len(tensors.tensors)} of {num_in_source} tensors")


@checkpoint.command()
def prune(
    where: Where,
    keep_last: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Keep the newest N; default: checkpoint.keep_last of the run."
        ),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Keep multiples of N steps; default: checkpoint.keep_every of the run.",
        ),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="Keep the one with the lowest LOSS, such as val_loss; default: "
            "checkpoint.keep_best of the run.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove the checkpoints; without it only list them.")
    ] = False,
) -> None:
    """List, or with --yes remove, the checkpoints that no rule keeps."""
    folder = _folder(where)
    retention = _retention(folder)
    keep = Retention(
        retention.last if keep_last is None else keep_last,
        retention.every if keep_every is None else keep_every,
        retention.best if keep_best is None else keep_best,
    )

    def doomed() -> list[CheckpointInfo]:
        infos = checkpoints_of(folder, keep)
        return [x for x in infos if x.problem is None and not x.kept_by]

    if not yes:
        going = doomed()
        for info in going:
            typer.echo(f"{info.path.name}  {size_text(info.size_bytes)}")
        total = sum(info.size_bytes for info in going)
        typer.echo(
            f"{len(going)} would be removed ({size_text(total)}); pass --yes to remove them"
            if going
            else "no checkpoint would be removed"
        )
        return
    run = folder.parent if folder.name == CHECKPOINTS else folder
    with only_writer(run.absolute()):  # a run that saves now would prune at the same time
        going = [info for info in doomed() if remove_checkpoint(info.path)]
    total = sum(info.size_bytes for info in going)
    typer.echo(f"removed {len(going)} ({size_text(total)})")


def _folder(where: Path) -> Path:
    """Return the folder of checkpoints of a run, or `where` itself if it is not a run."""
    if not where.is_dir():
        raise ConfigError(
            f"{where}: there is no such folder; name the folder of a run or of its checkpoints"
        )
    return where / CHECKPOINTS if _is_run(where) else where


def _is_run(folder: Path) -> bool:
    return (folder / CHECKPOINTS).is_dir() or (folder / RESOLVED).is_file()


def _one(path: Path) -> Path:
    """Return `path` if it is a checkpoint, else the latest checkpoint in that run or folder."""
    if (path / NAME).exists():
        return path
    checkpoint_path = latest(_folder(path))
    if checkpoint_path is None:
        raise CheckpointError(
            f"{path} is not a complete checkpoint and contains none; tdp checkpoint ls {path} "
            "lists what is there"
        )
    return checkpoint_path


def _retention(folder: Path) -> Retention:
    """Return the retention of the run that `folder` belongs to; without a run keep all."""
    resolved = folder.parent / RESOLVED
    if not resolved.is_file():
        return _ALL
    section = load(resolved, ["model.weights=null"]).checkpoint
    return Retention(section.keep_last, section.keep_every, section.best_fact)


def _row(info: CheckpointInfo) -> tuple[str, ...]:
    age = str(timedelta(seconds=int(max(time.time() - info.saved_s, 0))))
    if info.problem is not None:
        name = info.path.name.removeprefix("step_")
        return name, age, size_text(info.size_bytes), "", "", "", "", f"damaged: {info.problem}"
    losses = [info.facts.get(name) for name in ("loss", "val_loss")]
    shown = [f"{x:.4f}" if isinstance(x, float) else "" for x in losses]
    kept_by = ", ".join(info.kept_by) or "removed at the next save"
    state = ("latest, " if info.is_latest else "") + kept_by
    state = state.replace(f"keep_last={_ALL.last}", "kept")
    size = size_text(info.size_bytes)
    return str(info.step), age, size, f"{info.tokens:,}", *shown, info.layout, state


def _readable_bytes(path: Path) -> int:
    try:
        return sum(facts.size_bytes for facts in read_manifest(path).files.values())
    except CheckpointError:
        return 0


def _of_step(source: Any, step: int | None, path: Path) -> Any:
    facts = {**source.facts, "imported_from": str(path)}
    return replace(source, facts=facts, step=source.step if step is None else step)


def _write(write: Callable[[], None], target: Path) -> None:
    try:
        write()
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror}; name another place, or make room there"
        ) from error


def _export_hf(path: Path, target: Path, names: Path | None) -> None:
    if names is not None:
        raise refusal(
            "tdp checkpoint export",
            ["--names is not for --to hf, which takes the names of transformers; remove it"],
        )
    run = path if _is_run(path) else path.parent.parent
    export_run: Any = resolve("torchdistpackage.cli.export:export")
    export_run(run, target, checkpoint=None if path == run else path)
