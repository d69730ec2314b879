"""A list of the checkpoints in a folder: what each holds, whether it is complete, what keeps it.

Only `verify` reads whole files, for their checksums; the rest reads manifests and sizes. No torch.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchdistpackage.bounded import DTYPES
from torchdistpackage.checkpoint.commit import candidates, check_file, damage
from torchdistpackage.checkpoint.manifest import NAME, Fact, claims, read_manifest
from torchdistpackage.checkpoint.retention import BEST_STEP, Retention, reasons
from torchdistpackage.errors import CheckpointError
from torchdistpackage.topology.mesh import describe


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint folder.

    saved_s: time of the save, in seconds since 1970.
    problem: why it is not complete, or None.
    kept_by: the retention rules that keep it, if it is complete. If none does, the next save, or
    the next resume from a later step, removes it.
    """

    path: Path
    saved_s: float
    size_bytes: int
    problem: str | None
    step: int = 0
    tokens: int = 0
    layout: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    kept_by: tuple[str, ...] = ()
    is_latest: bool = False


def checkpoints_of(folder: Path, keep: Retention) -> list[CheckpointInfo]:
    """List the checkpoints of a folder, complete and damaged, newest first.
    keep: the retention rules of its run.
    """
    paths = candidates(folder)
    problems = {path: damage(path) for path in paths}
    complete = [path for path in paths if problems[path] is None]
    best_step = read_manifest(complete[0]).facts.get(BEST_STEP) if complete else None
    reasons_of = reasons(keep, complete, best_step)
    infos = list[CheckpointInfo]()
    for path in paths:
        size = sum(x.stat().st_size for x in path.iterdir() if x.is_file()) if path.is_dir() else 0
        saved_s = (path / NAME if problems[path] is None else path).stat().st_mtime
        if (problem := problems[path]) is not None:
            infos.append(CheckpointInfo(path, saved_s, size, problem))
            continue
        manifest = read_manifest(path)
        infos.append(
            CheckpointInfo(
                path,
                saved_s,
                size,
                None,
                manifest.step,
                manifest.tokens,
                describe(manifest.degrees),
                manifest.facts,
                tuple(reasons_of[path]),
                path == complete[0],
            )
        )
    return infos


def verify(path: Path, done: Callable[[int], object], num_threads: int) -> list[str]:
    """Check all files of a checkpoint against their checksums; return one sentence a problem.

    done: called after each file with its size in bytes.
    num_threads: number of files to read at a time.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    claimed = claims(manifest)

    def check(name: str) -> str | None:
        try:
            check_file(path / name, manifest.files[name], claimed[name])
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name}: {error.strerror}"
        except CheckpointError as error:
            return str(error)
        finally:
            done(manifest.files[name].size_bytes)
        return None

    with ThreadPoolExecutor(num_threads) as pool:
        return [problem for problem in pool.map(check, sorted(manifest.files)) if problem]


class TensorRow(NamedTuple):
    """One tensor of a checkpoint. cut: the dims along which its file pieces are cut, as text."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    cut: str


def tensor_rows(path: Path) -> list[TensorRow]:
    """Return a row for each tensor of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing or invalid.
    """
    rows = list[TensorRow]()
    for name, entry in read_manifest(path).tensors.items():
        num_bytes = math.prod(entry.shape) * DTYPES[entry.dtype][1]
        cut = [
            f"dim {dim} in {len(at)}"
            for dim in range(len(entry.shape))
            if len(at := {piece.offset[dim] for piece in entry.pieces}) > 1
        ]
        rows.append(TensorRow(name, entry.dtype, entry.shape, num_bytes, ", ".join(cut)))
    return rows
