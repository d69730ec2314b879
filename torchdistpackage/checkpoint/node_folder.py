"""A run's folder on a node's own disk or in its memory: its owner, and when it is stale.

A start of a run writes to `<local_dir>/tdp-<run>-<id>` and stores the id beside the run's
checkpoints. The next start takes what it needs from there and draws a new id, which makes the old
folder stale. No torch.
"""

import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.checkpoint.checksums import new_checksum
from torchdistpackage.checkpoint.commit import candidates
from torchdistpackage.checkpoint.manifest import NAME, Manifest, check_size, read_manifest
from torchdistpackage.errors import CheckpointError

ID, OWNER = "local_id.json", "owner.json"
"""File names: the id of a run's last start, beside its checkpoints; the owner of a node's
folder.
"""
_NAME = re.compile(r"tdp-(.+)-([0-9a-f]{16})", re.ASCII)
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}", re.ASCII)
_STALE_S = 24 * 3600.0
"""Age after which a folder is removed even if its run may return, because it may occupy memory."""
_LAG_S = 600.0
"""Age below which a folder may belong to a start that a slow shared disk does not show yet."""
_MOST_BYTES = 1 << 16


def expanded(path: str, env: Mapping[str, str]) -> Path:
    """Return `checkpoint.local_dir` with $NAME replaced from this node's environment.

    Raises:
        CheckpointError: a variable is not set, or the path is not absolute.
    """
    names = {a or b for a, b in _VARIABLE.findall(path)}
    if missing := sorted(name for name in names if not env.get(name)):
        raise CheckpointError(
            f"checkpoint.local_dir={path}: {', '.join(missing)} is not set here; set it on every "
            "node, or write a path without variables"
        )
    folder = Path(_VARIABLE.sub(lambda match: env[match[1] or match[2]], path))
    if not folder.is_absolute():
        raise CheckpointError(
            f"checkpoint.local_dir={path}: it is {folder} on this node; use an absolute path, "
            "which begins with /"
        )
    return folder


def current_id(checkpoints: Path) -> str:
    """Return the id of the last start of the run with these checkpoints; "" if it kept no local
    copies.
    """
    try:
        value = parse_json(read_regular(checkpoints / ID, _MOST_BYTES).decode())["id"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return value if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{16}", value) else ""


def renew_id(checkpoints: Path) -> str:
    """Draw and store the id of a start, which makes the copies of earlier starts stale."""
    drawn = secrets.token_hex(8)
    checkpoints.mkdir(parents=True, exist_ok=True)
    draft = checkpoints / f".{ID}.{drawn}"
    draft.write_text(json.dumps({"id": drawn}), encoding="utf-8")
    draft.replace(checkpoints / ID)
    return drawn


def folder_of(root: Path, run: str, start: str) -> Path:
    """Return the folder on this node for the start with this id of the run with this name."""
    return root / f"tdp-{run}-{start}"


def make_folder(folder: Path, checkpoints: Path, start: str) -> None:
    """Create a folder that only this user can open (mode 0700), with a note of its run.

    Raises:
        OSError: the folder cannot be created, or exists already.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    owner = {"checkpoints": str(checkpoints.absolute()), "id": start}
    (folder / OWNER).write_text(json.dumps(owner), encoding="utf-8")


def remove_stale(keep: Path, checkpoints: Path) -> list[Path]:
    """Remove this user's folders beside `keep` from which no run will resume, and return them.

    A folder is stale if it is of an earlier start of the run with these checkpoints. A folder of
    another run is stale if it is not of that run's last start, the run is gone, or it is a day old.
    """
    removed: list[Path] = []
    for folder in sorted(keep.parent.iterdir()):
        named = folder != keep and _NAME.fullmatch(folder.name)
        if named and is_own(folder) and _is_stale(folder, checkpoints.absolute()):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def is_own(folder: Path) -> bool:
    """Return whether this is a real folder, not a link, that only this user can open."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_ours = status.st_uid == os.geteuid()
    return is_ours and stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077


def _is_stale(folder: Path, own_checkpoints: Path) -> bool:
    """Return whether no run will resume from a folder.
    own_checkpoints: the folder of this run's checkpoints.
    """
    age_s = time.time() - folder.lstat().st_mtime
    try:
        owner = parse_json(read_regular(folder / OWNER, _MOST_BYTES, follow=False).decode())
        checkpoints, start = Path(owner["checkpoints"]), str(owner["id"])
    except (OSError, ValueError, TypeError, KeyError):
        return age_s > _STALE_S  # another process may be creating or removing it now
    if checkpoints == own_checkpoints or age_s > _STALE_S:
        return True
    # An unmounted file system tells nothing about its runs, and a slow one may not show a new
    # start.
    return (
        age_s > _LAG_S and checkpoints.parent.parent.is_dir() and current_id(checkpoints) != start
    )


@dataclass(frozen=True, slots=True)
class NodeCheckpoint:
    """The part of a checkpoint on one node.

    digest: checksum of the manifest, which is the same on all nodes.
    """

    step: int
    digest: str
    files: tuple[str, ...]
    complete: int
    """Number of files of the checkpoint on all nodes together."""


def checkpoints_in(folder: Path, unusable: Callable[[str], object]) -> list[NodeCheckpoint]:
    """List the checkpoints on this node, newest first, checking only the sizes of files.

    unusable: called with a sentence about each folder or file that is missing or wrong.
    """
    checkpoints: list[NodeCheckpoint] = []
    if not is_own(folder):
        exists = os.path.lexists(folder)
        unusable(
            f"{folder} "
            + ("is not a folder that only this user can write to" if exists else "is not there")
        )
        return checkpoints
    for path in candidates(folder):
        try:
            manifest, text = read_manifest(path), (path / NAME).read_bytes()
        except (OSError, CheckpointError) as error:
            unusable(f"{path}: {error}")
            continue
        digest = new_checksum()
        digest.update(text)
        files = tuple(
            name for name in sorted(manifest.files) if _has(path, manifest, name, unusable)
        )
        total = len(manifest.files)
        checkpoints.append(NodeCheckpoint(manifest.step, digest.hexdigest(), files, total))
    return checkpoints


def _has(path: Path, manifest: Manifest, name: str, unusable: Callable[[str], object]) -> bool:
    """Return whether this node has a file of a checkpoint, with the right size."""
    try:
        check_size(path / name, manifest.files[name])
    except FileNotFoundError:  # most files are on other nodes
        return False
    except (OSError, CheckpointError) as error:
        unusable(f"{path / name}: {error}")
        return False
    return True
