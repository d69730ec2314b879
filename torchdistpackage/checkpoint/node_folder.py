"""The folder of a run on a node's own disk or in its memory: whose it is, and when it is stale.

One start of a run writes to `<local_dir>/tdp-<run>-<id>`, and the id is noted beside the run's
checkpoints. The next start takes from there what it needs, draws another id, and with that the
folder of the one before is nobody's. No torch.
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
"""Beside the checkpoints of a run, the id of its last start; in a node's folder, whose it is."""
_NAME = re.compile(r"tdp-(.+)-([0-9a-f]{16})", re.ASCII)
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}", re.ASCII)
_STALE_S = 24 * 3600.0
"""After which nobody is expected to come back for a folder: it may lie in memory."""
_LAG_S = 600.0
_MOST_BYTES = 1 << 16


def expanded(path: str, env: Mapping[str, str]) -> Path:
    """`checkpoint.local_dir` on this node, with $NAME of its environment.

    Raises:
        CheckpointError: a variable is not set, or the path is not absolute.
    """
    names = {a or b for a, b in _VARIABLE.findall(path)}
    if missing := sorted(name for name in names if not env.get(name)):
        raise CheckpointError(
            f"checkpoint.local_dir={path}: {', '.join(missing)} is not set here; set it on every "
            f"node, or write the folder out"
        )
    found = Path(_VARIABLE.sub(lambda match: env[match[1] or match[2]], path))
    if not found.is_absolute():
        raise CheckpointError(
            f"checkpoint.local_dir={path}: it is {found} here, no absolute path; begin with /"
        )
    return found


def current_id(checkpoints: Path) -> str:
    """The id of the last start of the run with these checkpoints; "" if none kept local copies."""
    try:
        value = parse_json(read_regular(checkpoints / ID, _MOST_BYTES).decode())["id"]
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return value if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{16}", value) else ""


def renew_id(checkpoints: Path) -> str:
    """Draw the id of a start and note it; copies under the one before no longer count."""
    drawn = secrets.token_hex(8)
    checkpoints.mkdir(parents=True, exist_ok=True)
    draft = checkpoints / f".{ID}.{drawn}"
    draft.write_text(json.dumps({"id": drawn}), encoding="utf-8")
    draft.replace(checkpoints / ID)
    return drawn


def folder_of(root: Path, run: str, start: str) -> Path:
    """The folder on this node of the start with this id of the run of this name."""
    return root / f"tdp-{run}-{start}"


def make_folder(folder: Path, checkpoints: Path, start: str) -> None:
    """Make a folder for this user alone (mode 0700), with a note of whose it is.

    Raises:
        OSError: it cannot be made, or is there already.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    owner = {"checkpoints": str(checkpoints.absolute()), "id": start}
    (folder / OWNER).write_text(json.dumps(owner), encoding="utf-8")


def remove_stale(keep: Path, checkpoints: Path) -> list[Path]:
    """Remove this user's folders beside `keep` from which no run resumes any more; returns them.

    Those are of earlier starts of the run with these checkpoints, and of other runs if it was not
    their last start, the run is gone, or they are a day old.
    """
    removed: list[Path] = []
    for folder in sorted(keep.parent.iterdir()):
        named = folder != keep and _NAME.fullmatch(folder.name)
        if named and is_own(folder) and _is_stale(folder, checkpoints.absolute()):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def is_own(folder: Path) -> bool:
    """Whether this is a folder, and no link to one, that belongs to this user alone."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    own = found.st_uid == os.geteuid()
    return own and stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077


def _is_stale(folder: Path, own: Path) -> bool:
    age_s = time.time() - folder.lstat().st_mtime
    try:
        owner = parse_json(read_regular(folder / OWNER, _MOST_BYTES, follow=False).decode())
        checkpoints, start = Path(owner["checkpoints"]), str(owner["id"])
    except (OSError, ValueError, TypeError, KeyError):
        return age_s > _STALE_S  # being made, or begun to be removed
    if checkpoints == own or age_s > _STALE_S:
        return True
    # a file system that is away says nothing of its runs, and one that lags knows no new start
    return (
        age_s > _LAG_S and checkpoints.parent.parent.is_dir() and current_id(checkpoints) != start
    )


@dataclass(frozen=True, slots=True)
class NodeCheckpoint:
    """What a node has of a checkpoint. digest: of its manifest, which all nodes have alike."""

    step: int
    digest: str
    files: tuple[str, ...]
    complete: int
    """Files that the checkpoint has on all nodes together."""


def checkpoints_in(folder: Path, unusable: Callable[[str], object]) -> list[NodeCheckpoint]:
    """What this node has of checkpoints, newest first; of files only their sizes are looked at.

    unusable: called with what is not there, or not to be used, and why.
    """
    found: list[NodeCheckpoint] = []
    if not is_own(folder):
        there = os.path.lexists(folder)
        unusable(f"{folder} " + ("is no folder of this user alone" if there else "is not there"))
        return found
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
        found.append(NodeCheckpoint(manifest.step, digest.hexdigest(), files, total))
    return found


def _has(path: Path, manifest: Manifest, name: str, unusable: Callable[[str], object]) -> bool:
    try:
        check_size(path / name, manifest.files[name])
    except FileNotFoundError:  # most are other nodes'
        return False
    except (OSError, CheckpointError) as error:
        unusable(f"{path / name}: {error}")
        return False
    return True
