"""The commit that makes written files a checkpoint, in one atomic step.

A checkpoint is valid if its folder is called `step_000400` and its manifest agrees with its files.
Writers write and flush everything under another name, the manifest last, and a rename makes it
valid. A removal begins with a rename too. So after a kill either the old or the new checkpoint is
there, and leftovers have names that no reader accepts.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from torchdistpackage.checkpoint import manifest as manifests
from torchdistpackage.checkpoint.checksums import add_file, new_checksum
from torchdistpackage.checkpoint.manifest import (
    Claim,
    Fact,
    FileFacts,
    Manifest,
    check_header,
    check_size,
    claims,
    read_manifest,
)
from torchdistpackage.checkpoint.retention import BEST_STEP, Retention, reasons
from torchdistpackage.errors import CheckpointError
from torchdistpackage.files import appears, naming

log = logging.getLogger(__name__)

# `.old-` marks a complete checkpoint that a new one of the same step is about to replace.
_STEP = re.compile(r"step_(\d{6,})(\.old-\w+)?")
_LEFTOVER = re.compile(r"step_\d{6,}\.(tmp|old)-\w+")


def folder_name(step: int) -> str:
    """Return the folder name of a step, such as `step_000400`."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    match = _STEP.match(path.name)
    assert match is not None
    return int(match[1])


def make_temporary(folder: Path, step: int) -> Path:
    """Create a private folder (mode 0700) inside `folder` for writing a checkpoint of `step`.

    It removes the leftovers of killed writers first, because only one run may write to a folder.

    Raises:
        CheckpointError: `folder` is a link to a missing folder, such as one on a lost disk.
        OSError: the disk is full, or another file error.
    """
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(
            f"{folder} is a link to {folder.readlink()}, which is not there; mount its disk or "
            f"create that folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    temporary = folder / f"{folder_name(step)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir(mode=0o700)
    return temporary


def settle(path: Path) -> None:
    """Flush a file that was just written, and give it the permissions of the run's folder."""
    path.chmod(path.parent.parent.stat().st_mode & 0o666)
    with naming(path), path.open("rb") as file:
        # wait for the disk here: the rename that follows must not become durable before the data
        os.fsync(file.fileno())


def measure(path: Path) -> FileFacts:
    """Return the size and checksum of a file, which it reads to the end."""
    checksum = new_checksum()
    size_bytes = add_file(checksum, path)
    return FileFacts(size_bytes, checksum.hexdigest())


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Write the manifest, rename the folder to its final name, and return that path.

    All files must be written and flushed. The checkpoint replaces one of the same step.
    """
    folder = temporary.parent
    final = folder / folder_name(manifest.step)
    path = temporary / manifests.NAME
    text = manifest.to_json()
    if len(text) > manifests.MAX_BYTES:
        raise CheckpointError(
            f"the manifest has {len(text):,} bytes, but readers accept at most "
            f"{manifests.MAX_BYTES:,}; save from fewer ranks"
        )
    with naming(path):
        path.write_text(text, encoding="utf-8")
    settle(path)
    # Order matters for a crash at any point: files and their names reach the disk before the
    # rename, and the old checkpoint keeps a name that readers accept until the new one is in place.
    _flush_folder(temporary)
    temporary.chmod(folder.stat().st_mode & 0o777)
    if final.exists():
        final.rename(folder / f"{final.name}.old-{secrets.token_hex(4)}")
    temporary.rename(final)
    _flush_folder(folder)
    return final


def retain(folder: Path, keep: Retention, newest: Path, best_step: Fact = None) -> None:
    """Remove leftovers and all complete checkpoints that `keep` does not name.

    It leaves damaged ones alone. `newest` was just written and stays, even if an earlier attempt
    left later steps. best_step: its fact `BEST_STEP`.
    """
    remove_leftovers(folder)
    _prune(keep, newest, [path for path in candidates(folder) if path != newest], best_step)


def retain_before(folder: Path, keep: Retention, resumed: Path) -> None:
    """Remove complete checkpoints before `resumed` that `keep` does not name; keep `resumed`.

    The next save deals with leftovers and with later checkpoints that this start skipped.
    """
    earlier = [path for path in candidates(folder) if step_of(path) < step_of(resumed)]
    _prune(keep, resumed, earlier, manifests.read_manifest(resumed).facts.get(BEST_STEP))


def _prune(keep: Retention, newest: Path, others: Sequence[Path], best_step: Fact) -> None:
    """Remove those of `others` that are complete and that no retention rule keeps."""
    complete = [path for path in others if not damage(path)]
    reasons_of = reasons(keep, [newest, *complete], best_step)
    for path in complete:
        if not reasons_of[path]:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint, which becomes invalid at once; return False if it cannot be renamed."""
    doomed = path.with_name(f"{path.name.split('.')[0]}.tmp-{secrets.token_hex(4)}")
    try:
        path.rename(doomed)
    except OSError as error:  # for example another user's, in a folder that everybody may write to
        log.warning("cannot remove checkpoint %s, so it stays: %s", path, error.strerror)
        return False
    _remove(doomed)
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left, and replaced checkpoints whose successor is complete.

    It reads the successor with checksums, because a run may have resumed from the replaced one
    when the successor's checksums were wrong. Replaced checkpoints are rare, so this costs little.
    """
    for path in folder.iterdir():
        if match := _LEFTOVER.fullmatch(path.name):
            successor = folder / path.name.split(".")[0]
            if match[1] == "tmp" or not damage(successor, checksums=True):
                _remove(path)


def latest(folder: str | Path, *, checksums: bool = False) -> Path | None:
    """Return the newest complete checkpoint, or None; log a warning for each damaged newer one.

    It checks the sizes of all files. With `checksums` it also reads them all.
    """
    path, damaged = newest_complete(Path(folder), checksums=checksums)
    for skipped, problem in damaged:
        warn_skipped(skipped, problem)
    return path


def newest_complete(
    folder: Path, *, checksums: bool = False
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the newest complete checkpoint, or None, and each newer one with its damage."""
    damaged: list[tuple[Path, str]] = []
    for path in candidates(folder):
        if (problem := damage(path, checksums=checksums)) is None:
            return path, damaged
        damaged.append((path, problem))
    return None, damaged


def candidates(folder: Path, saved: Collection[int] = ()) -> list[Path]:
    """Return folders that may be checkpoints, newest first, without checking them.

    saved: steps whose folders are looked for by name too, as a listing may lack new ones.
    """
    if not folder.is_dir():
        return []
    named = (path for step in saved if (path := folder / folder_name(step)).is_dir())
    return newest_first({*folder.iterdir(), *named})


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return those of `paths` that have the name of a checkpoint, newest first."""
    matches = [(match, path) for path in paths if (match := _STEP.fullmatch(path.name))]
    # For one step the replaced checkpoint comes second.
    matches.sort(key=lambda pair: (-int(pair[0][1]), pair[0][2] or ""))
    return [path for _, path in matches]


def wait_for_files(path: Path, share: tuple[int, int] = (0, 1)) -> None:
    """Wait until this node sees the files of a checkpoint, which another node sees.

    share: as in `damage`.
    """
    appears(path / manifests.NAME)
    for name in absent(path, share):
        appears(path / name)


def absent(path: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return the files of a checkpoint that this node does not see, its manifest among them.

    share: as in `damage`.
    """
    try:
        names = sorted(read_manifest(path).files)[share[0] :: share[1]]
    except (OSError, CheckpointError):
        return [] if os.path.lexists(path / manifests.NAME) else [manifests.NAME]
    return [name for name in names if not os.path.lexists(path / name)]


def set_aside(folder: Path, after_step: int) -> None:
    """Rename checkpoints after `after_step`, from which the run now continues differently."""
    for path in candidates(folder):
        match = _STEP.fullmatch(path.name)
        if match and int(match[1]) > after_step:
            path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}"))


def warn_skipped(path: Path, problem: str) -> None:
    """Log that a damaged checkpoint is skipped."""
    log.warning("checkpoint %s is damaged and skipped: %s", path, problem)


def none_complete(folder: Path, number: int, problem: str) -> CheckpointError:
    """Return the error for a folder with only damaged checkpoints.

    problem: the damage of the oldest one.
    """
    return CheckpointError(
        f"{folder} has {number} checkpoints, but none is complete ({problem}); repair them, or "
        "move them away to begin at step 0"
    )


def damage(
    path: Path,
    *,
    checksums: bool = False,
    share: tuple[int, int] = (0, 1),
    on_file: Callable[[], None] = lambda: None,
) -> str | None:
    """Return what is wrong with a checkpoint folder, or None.

    checksums: also check the files' checksums, and their headers against the manifest.
    share: (i, n) checks only every n-th file from the i-th on, so that n ranks can share the work.
    on_file: called after each file.
    """
    try:
        manifest = read_manifest(path)
        claimed = claims(manifest) if checksums else {}
        for name in sorted(manifest.files)[share[0] :: share[1]]:
            check_file(path / name, manifest.files[name], claimed.get(name))
            on_file()
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"  # a failed read gives no filename
    except CheckpointError as error:
        return str(error)
    return None


def check_file(path: Path, expected: FileFacts, claimed: Collection[Claim] | None) -> None:
    """Check a file against the manifest.

    claimed: the tensors that it must hold; None: check its size only.

    Raises:
        OSError: the file is missing or cannot be read.
        CheckpointError: the file differs from the manifest.
    """
    check_size(path, expected)
    if claimed is None:
        return
    if problem := expected.mismatch(path):
        raise CheckpointError(f"{path.name} {problem}")
    if claimed:
        check_header(path, claimed)


def _remove(path: Path) -> None:
    # the next save retries what cannot be removed now, such as a file open on a network disk
    """Remove a folder; log what cannot be removed."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        log.warning("cannot remove %s entirely; it is no longer needed", path)


def _flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
