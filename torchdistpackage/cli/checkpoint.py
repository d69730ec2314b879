"""`tdp checkpoint`: checkpoints looked at, compared, converted and removed, by one process.

No process group is made, and never more than one tensor of each checkpoint is held, so a login node
will do. A checkpoint is named by its folder, or by a run's, which stands for the latest.
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
from torchdistpackage.checkpoint.manifest import NAME, read_manifest
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.cli._common import refusal
from torchdistpackage.config.load import load
from torchdistpackage.errors import CheckpointError, ConfigError
from torchdistpackage.launch.run_folder import only_writer
from torchdistpackage.lazy import resolve
from torchdistpackage.run_files import CHECKPOINTS, RESOLVED
from torchdistpackage.text import size_text, text_table

FORMATS = ("torch", "safetensors", "dcp", "hf")
SOURCES = ("torch", "safetensors", "dcp", "suffix")
_FILES = "torchdistpackage.checkpoint.formats.files"
_DCP = "torchdistpackage.checkpoint.formats.dcp"
_SOURCE = "torchdistpackage.checkpoint.formats.source:checkpoint_source"
_COMPARE = "torchdistpackage.checkpoint.compare"
_NAMES = "torchdistpackage.checkpoint.formats.names"
_IMPORT = "torchdistpackage.checkpoint.formats.importing:write_checkpoint"
WRITERS = {
    "torch": f"{_FILES}:write_torch",
    "safetensors": f"{_FILES}:write_safetensors_file",
    "dcp": f"{_DCP}:write_dcp",
}
READERS = {
    "torch": f"{_FILES}:read_torch",
    "safetensors": f"{_FILES}:read_safetensors",
    "dcp": f"{_DCP}:read_dcp",
    "suffix": f"{_FILES}:read_suffixed",
}
_SHOWN = 40
_ALL = Retention(last=1 << 20)
"""Of a folder without a run, which nothing prunes."""
_MAX_THREADS = 8

# A folder that may not be read is refused by its reader, which says who can change that.
Where = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_FOLDER", readable=False, help="Run, or its checkpoints."),
]
One = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="Folder step_NNNNNN; of a run the latest.")
]
Names = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML with lines `ours: theirs`; * is a part of a name."),
]
Weights = Annotated[
    bool, typer.Option("--weights-only", help="Leave the state of the optimizer out.")
]

checkpoint = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@checkpoint.command()
def ls(where: Where) -> None:
    """List checkpoints, newest first, and what keeps each."""
    folder = _folder(where)
    found = checkpoints_of(folder, _retention(folder))
    if not found:
        typer.echo(f"{folder} has no checkpoints")
        return
    rows: list[Sequence[object]] = [
        ("STEP", "AGE", "SIZE", "TOKENS", "LOSS", "VAL_LOSS", "LAYOUT", "STATE")
    ]
    rows += [_row(info) for info in found]
    typer.echo(text_table(rows, last_left=True, num_keys=1))


@checkpoint.command()
def show(
    path: One,
    stats: Annotated[
        bool, typer.Option("--stats", help="Also mean, deviation, extremes and NaN of each tensor.")
    ] = False,
) -> None:
    """Show tensors with shapes, types, and how they are cut."""
    path = _one(path)
    manifest, rows = read_manifest(path), tensor_rows(path)
    total = sum(row[3] for row in rows)
    typer.echo(f"{path}: step {manifest.step}, {manifest.tokens:,} tokens, {size_text(total)}")
    if manifest.degrees:
        typer.echo("written under " + " ".join(f"{a}={n}" for a, n in manifest.degrees))
    for name, value in manifest.facts.items():
        typer.echo(f"{name}: {value}")
    head: list[object] = ["TENSOR", "DTYPE", "SHAPE", "SIZE", "PIECES"]
    table: list[Sequence[object]] = [head + ["MEAN", "STD", "MIN", "MAX", "NONFINITE"] * stats]
    source = resolve(_SOURCE)(path) if stats else None
    for name, dtype, shape, num_bytes, cut in rows:
        row: list[object] = [
            name,
            dtype,
            "x".join(map(str, shape)) or "-",
            size_text(num_bytes),
            cut,
        ]
        if source is not None:
            found = resolve(f"{_COMPARE}:stats_of")(source.read(name))
            numbers = (found.mean, found.std, found.smallest, found.largest)
            row += [f"{number:.4g}" for number in numbers] + [str(found.num_nonfinite)]
        table.append(row)
    typer.echo(text_table(table, num_left=2, num_keys=1))


@checkpoint.command()
def verify(where: Where) -> None:
    """Compare the checksum of every file.

    The exit code is 1 if one is damaged.
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
    for path, found in problems.items():
        typer.echo(f"{path}: {'; '.join(found) or 'every checksum agrees'}")
    if any(problems.values()):
        raise typer.Exit(1)


@checkpoint.command()
def diff(
    one: One,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="Another checkpoint, alike.")],
    most: Annotated[
        int, typer.Option("--most", metavar="N", min=1, help="Tensors that are shown.")
    ] = _SHOWN,
) -> None:
    """Compare two checkpoints, of any layouts.

    The exit code is 1 if they differ.
    """
    sources = [resolve(_SOURCE)(_one(path)) for path in (one, other)]
    found = sorted(resolve(f"{_COMPARE}:differences")(*sources), key=lambda x: (-x[2], x[0]))
    same = len(sources[0].tensors.keys() & sources[1].tensors.keys())
    if not found:
        typer.echo(f"all {same} tensors are equal")
        return
    rows: list[Sequence[object]] = [("TENSOR", "LARGEST DIFFERENCE", "")]
    for name, what, largest in found[:most]:
        rows.append((name, "" if math.isinf(largest) and what else f"{largest:.6g}", what))
    typer.echo(text_table(rows, num_left=1, last_left=True))
    if len(found) > most:
        typer.echo(f"... and {len(found) - most} more")
    typer.echo(f"{len(found)} tensors differ")
    raise typer.Exit(1)


@checkpoint.command()
def export(
    path: One,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="File or folder to create.")],
    to: Annotated[str, typer.Option(metavar="|".join(FORMATS), help="Format.")],
    names: Names = None,
    weights_only: Weights = False,
) -> None:
    """Write a checkpoint in the format of another library."""
    if to not in FORMATS:
        raise refusal("tdp checkpoint export", [f"--to {to}: use {', '.join(FORMATS)}"])
    if to == "hf":
        _export_hf(path, target, names)
        return
    path = _one(path)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise refusal("tdp checkpoint export", [f"{target} is there; name another"])
    if problem := damage(path, checksums=True):
        raise CheckpointError(f"{path} is damaged: {problem}; name another checkpoint")
    source = resolve(_SOURCE)(path)
    source = source.only(lambda name: "#" not in name) if weights_only else source
    if names is not None:
        source = resolve(f"{_NAMES}:as_theirs")(source, resolve(f"{_NAMES}:read_names")(names))
    _write(lambda: resolve(WRITERS[to])(source, target), target)
    typer.echo(f"{path} -> {target}: {len(source.tensors)} tensors")


@checkpoint.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="File or folder to read.")],
    folder: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="Where the checkpoint goes.")
    ],
    from_: Annotated[
        str,
        typer.Option(
            "--from", metavar="|".join(SOURCES), help="Format; suffix: of get_mp_ckpt_suffix."
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Its step; default: as in the file, or 0."),
    ] = None,
    names: Names = None,
    weights_only: Weights = False,
) -> None:
    """Make a checkpoint of tensors of another library."""
    problems = [] if from_ in SOURCES else [f"--from {from_}: use {', '.join(SOURCES)}"]
    if not source.exists():
        problems.append(f"{source}: there is no such file or folder")
    if problems:
        raise refusal("tdp checkpoint import", problems)
    found: Any = resolve(READERS[from_])(source)
    number = len(found.tensors)
    found = found.only(lambda name: "#" not in name) if weights_only else found
    if names is not None:
        found = resolve(f"{_NAMES}:as_ours")(found, resolve(f"{_NAMES}:read_names")(names))
    found = _of_step(found, step, source)
    into = folder / CHECKPOINTS if _is_run(folder) else folder
    written: Any = None

    def write() -> None:
        nonlocal written
        written = resolve(_IMPORT)(found, into)

    _write(write, into)
    typer.echo(f"{source} -> {written}: {len(found.tensors)} tensors, of {number} there")


@checkpoint.command()
def prune(
    where: Where,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Default: the run's.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Default: the run's.")
    ] = None,
    keep_best: Annotated[
        str | None, typer.Option(metavar="FACT", help="Such as val_loss. Default: the run's.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; else they are shown.")] = False,
) -> None:
    """Show, or with --yes remove, what retention does not keep."""
    folder = _folder(where)
    own = _retention(folder)
    keep = Retention(
        own.last if keep_last is None else keep_last,
        own.every if keep_every is None else keep_every,
        own.best if keep_best is None else keep_best,
    )

    def doomed() -> list[CheckpointInfo]:
        found = checkpoints_of(folder, keep)
        return [x for x in found if x.problem is None and not x.kept_by]

    if not yes:
        going = doomed()
        for info in going:
            typer.echo(f"{info.path.name}  {size_text(info.size_bytes)}")
        total = sum(info.size_bytes for info in going)
        typer.echo(
            f"{len(going)} would go ({size_text(total)}); --yes removes them" if going else "none"
        )
        return
    run = folder.parent if folder.name == CHECKPOINTS else folder
    with only_writer(run.absolute()):  # a run that saves meanwhile would prune too
        going = [info for info in doomed() if remove_checkpoint(info.path)]
    total = sum(info.size_bytes for info in going)
    typer.echo(f"removed {len(going)} ({size_text(total)})")


def _folder(where: Path) -> Path:
    """The folder of checkpoints that a run, or the folder itself, is named for."""
    if not where.is_dir():
        raise ConfigError(f"{where}: there is no such folder; name a run or its checkpoints")
    return where / CHECKPOINTS if _is_run(where) else where


def _is_run(folder: Path) -> bool:
    return (folder / CHECKPOINTS).is_dir() or (folder / RESOLVED).is_file()


def _one(path: Path) -> Path:
    """A checkpoint: itself, or the latest of a run or folder."""
    if (path / NAME).exists():
        return path
    found = latest(_folder(path))
    if found is None:
        raise CheckpointError(f"{path} is no complete checkpoint and has none")
    return found


def _retention(folder: Path) -> Retention:
    """What the run of a folder of checkpoints keeps; of a folder without a run all."""
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
    state = ("latest, " if info.is_latest else "") + (", ".join(info.kept_by) or "goes next")
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
        raise CheckpointError(f"{target} cannot be written: {error.strerror}") from error


def _export_hf(path: Path, target: Path, names: Path | None) -> None:
    if names is not None:
        raise refusal("tdp checkpoint export", ["--names: transformers' names are known"])
    run = path if _is_run(path) else path.parent.parent
    export_run: Any = resolve("torchdistpackage.cli.export:export")
    export_run(run, target, checkpoint=None if path == run else path)
