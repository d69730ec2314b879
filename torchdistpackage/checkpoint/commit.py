"""From files to a checkpoint that counts, in one step that cannot be half done.

A checkpoint counts if its folder is called `step_000400` and its manifest agrees with
its files. All is written and flushed under another name, the manifest last, and a rename makes it
count; what is taken away is renamed first too. So a kill leaves what was there before or the new
one, and leftovers with names that no reader takes.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torchdistpackage.checkpoint import manifest as manifests
from torchdistpackage.checkpoint.checksums import add_file, new_checksum
from torchdistpackage.checkpoint.manifest import (
    Claim,
    FileFacts,
    Manifest,
    check_header,
    check_size,
    claims,
    read_manifest,
)
from torchdistpackage.checkpoint.retention import Retention, reasons
from torchdistpackage.errors import CheckpointError

log = logging.getLogger(__name__)

# `.old-` is a complete one on its way out, until the new one of the same step is in its place.
_STEP = re.compile(r"step_(\d{6,})(\.old-\w+)?")
_LEFTOVER = re.compile(r"step_\d{6,}\.(tmp|old)-\w+")


def folder_name(step: int) -> str:
    """`step_000400`."""
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = _STEP.match(path.name)
    assert match is not None
    return int(match[1])


def make_temporary(folder: Path, step: int) -> Path:
    """A fresh private folder (mode 0700) inside `folder` to write a checkpoint of `step` into.

    Leftovers of writers that were killed are removed: only one run may write to a folder.

    Raises:
        CheckpointError: it is a link to a folder that is not there, such as of a lost disk.
        OSError: the disk is full, or the like.
    """
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(
            f"{folder} is a link to {folder.readlink()}, which is not there; mount its disk, or "
            f"make that folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    temporary = folder / f"{folder_name(step)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir(mode=0o700)
    return temporary


def settle(path: Path) -> None:
    """Flush a file that was just written, and open it as its run's folder is."""
    path.chmod(path.parent.parent.stat().st_mode & 0o666)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def measure(path: Path) -> FileFacts:
    """Size and checksum of a file, by reading it."""
    checksum = new_checksum()
    size_bytes = add_file(checksum, path)
    return FileFacts(size_bytes, checksum.hexdigest())


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Write the manifest and give the folder its final name, which is returned.

    All files must be there and flushed. A checkpoint of the same step is replaced.
    """
    folder = temporary.parent
    final = folder / folder_name(manifest.step)
    path = temporary / manifests.NAME
    text = manifest.to_json()
    if len(text) > manifests.MAX_BYTES:
        raise CheckpointError(
            f"the manifest has {len(text):,} bytes, and no reader takes more than "
            f"{manifests.MAX_BYTES:,}; save from fewer ranks"
        )
    path.write_text(text, encoding="utf-8")
    settle(path)
    _flush_folder(temporary)
    temporary.chmod(folder.stat().st_mode & 0o777)
    if final.exists():
        final.rename(folder / f"{final.name}.old-{secrets.token_hex(4)}")
    temporary.rename(final)
    _flush_folder(folder)
    return final


def retain(folder: Path, keep: Retention, newest: Path) -> None:
    """Remove leftovers and all complete checkpoints that `keep` does not name.

    Damaged ones are left alone. `newest` was just written and stays, even where later steps of an
    earlier attempt are there.
    """
    remove_leftovers(folder)
    _prune(keep, newest, [path for path in candidates(folder) if path != newest])


def retain_before(folder: Path, keep: Retention, resumed: Path) -> None:
    """Remove complete checkpoints of steps before `resumed` that `keep` does not name; it stays.

    Later ones, which a start has passed over, and leftovers are the next save's.
    """
    _prune(keep, resumed, [path for path in candidates(folder) if step_of(path) < step_of(resumed)])


def _prune(keep: Retention, newest: Path, others: Sequence[Path]) -> None:
    complete = [path for path in others if not damage(path)]
    kept = reasons(keep, [newest, *complete])
    for path in complete:
        if not kept[path]:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint, which stops to count at once; whether it could be."""
    doomed = path.with_name(f"{path.name.split('.')[0]}.tmp-{secrets.token_hex(4)}")
    try:
        path.rename(doomed)
    except OSError as error:  # such as of another user, in a folder that all may write to
        log.warning("cannot remove checkpoint %s, so it stays: %s", path, error.strerror)
        return False
    _remove(doomed)
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left. A replaced checkpoint goes only once its successor is in.

    The successor is read for that, which few folders ask for: a run may have resumed from the
    replaced one because the checksums of the other were wrong.
    """
    for path in folder.iterdir():
        if match := _LEFTOVER.fullmatch(path.name):
            successor = folder / path.name.split(".")[0]
            if match[1] == "tmp" or not damage(successor, checksums=True):
                _remove(path)


def latest(folder: str | Path, *, checksums: bool = False) -> Path | None:
    """The newest complete checkpoint, or None. Damaged newer ones are named in a warning.

    Sizes of all files are checked, their checksums only on demand: that reads everything.
    """
    path, damaged = newest_complete(Path(folder), checksums=checksums)
    for skipped, problem in damaged:
        warn_skipped(skipped, problem)
    return path


def newest_complete(
    folder: Path, *, checksums: bool = False
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest complete checkpoint, or None, and the newer ones, each with what is wrong."""
    damaged: list[tuple[Path, str]] = []
    for path in candidates(folder):
        if (problem := damage(path, checksums=checksums)) is None:
            return path, damaged
        damaged.append((path, problem))
    return None, damaged


def candidates(folder: Path) -> list[Path]:
    """Folders that may be checkpoints, newest first, unchecked."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    # Of one step the replaced one comes second.
    found.sort(key=lambda pair: (-int(pair[0][1]), pair[0][2] or ""))
    return [path for _, path in found]


def set_aside(folder: Path, after_step: int) -> None:
    """Rename the checkpoints of later steps: the run goes another way from `after_step` on."""
    for path in candidates(folder):
        match = _STEP.fullmatch(path.name)
        if match and int(match[1]) > after_step:
            path.rename(path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}"))


def warn_skipped(path: Path, problem: str) -> None:
    """Say that a damaged checkpoint is passed over."""
    log.warning("checkpoint %s is damaged and skipped: %s", path, problem)


def none_complete(folder: Path, number: int, problem: str) -> CheckpointError:
    """What to say of a folder with damaged checkpoints alone; problem: of the oldest."""
    return CheckpointError(
        f"{folder} has {number} checkpoints and none is whole ({problem}); mend or move them, "
        f"nothing is begun anew over them"
    )


def damage(
    path: Path,
    *,
    checksums: bool = False,
    share: tuple[int, int] = (0, 1),
    on_file: Callable[[], None] = lambda: None,
) -> str | None:
    """What is wrong with a checkpoint folder, or None.

    checksums: also those of the files, and whether their headers say what the manifest does.
    share: (i, n) reads only every n-th file, from the i-th on, so that n ranks check together.
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
        return f"{error.filename or path}: {error.strerror}"  # a failed read has no name
    except CheckpointError as error:
        return str(error)
    return None


def check_file(path: Path, expected: FileFacts, claimed: Collection[Claim] | None) -> None:
    """Whether a file is what the manifest says; claimed: its pieces, None: look at its size alone.

    Raises:
        OSError: it is not there, or cannot be read.
        CheckpointError: it is another.
    """
    check_size(path, expected)
    if claimed is None:
        return
    if problem := expected.mismatch(path):
        raise CheckpointError(f"{path.name} {problem}")
    if claimed:
        check_header(path, claimed)


def _remove(path: Path) -> None:
    # what cannot be removed (held open on a network disk, say) is left for the next save
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        log.warning("cannot remove %s entirely; it is no longer needed", path)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
