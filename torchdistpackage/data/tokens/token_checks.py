"""Checksums of the files of a token cache entry; unchanged files are not read again.

They find damage, and files of another entry. They do not protect against forgery. No torch.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import check_regular, parse_json, read_regular
from torchdistpackage.checkpoint.checksums import add_file, new_checksum
from torchdistpackage.files import atomic_write

META = "meta.json"
SETTLED_S = 2.0
"""Seconds after a file's change until another change is certain to get a different time."""
_MOST_META = 1 << 28
_MOST_STAMP = 64


def meta_text(meta: Mapping[str, Any]) -> str:
    """Return the text of meta.json, with a checksum of itself."""
    return json.dumps({**meta, "checksum": _of_meta(meta)}, indent=1) + "\n"


def checked_meta(folder: Path) -> dict[str, Any]:
    """Return the contents of an entry's meta.json, after a check of all its files.

    A stamp beside the entry records the sizes, times and inodes of files that passed the check, so
    that a start with many ids or ranks does not read all files again.

    Raises:
        ValueError, KeyError: a file is not as it was written.
        OSError: one cannot be read, or is not a regular file.
    """
    meta = parse_json(read_regular(folder / META, _MOST_META).decode())
    if not isinstance(meta, dict) or meta.pop("checksum", None) != _of_meta(meta):
        raise ValueError(f"{META} has changed since it was written")
    if meta["entry"] != folder.name:
        raise ValueError(f"{META} belongs to the entry {meta['entry']}")
    files = {f"{name}.bin": expected for name, expected in meta["checksums"].items()}
    stamp = folder.with_name(f"{folder.name}.checked")
    facts, changed_s = _facts(folder, [META, *files])
    with suppress(OSError, UnicodeDecodeError):
        if read_regular(stamp, _MOST_STAMP, follow=False).decode() == facts:
            return meta
    for name, expected in files.items():
        checksum = new_checksum()
        if [add_file(checksum, folder / name), checksum.hexdigest()] != expected:
            raise ValueError(f"{name} has changed since it was written")
    # a change right after this check could leave the times as they are, so stamp only old files
    if changed_s < time.time() - SETTLED_S:
        with suppress(OSError):  # the cache may be read-only
            atomic_write(stamp, facts)
    return meta


def _of_meta(meta: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16).hexdigest()


def _facts(folder: Path, names: list[str]) -> tuple[str, float]:
    """Return a hash of these files' sizes, times and inodes, and the time of the last change."""
    digest = hashlib.blake2b(digest_size=16)
    changed_ns = 0
    for name in names:
        check_regular(folder / name, follow=True)  # reading a pipe would never end
        now = (folder / name).stat()
        facts = now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino
        digest.update(f"{name} {facts}\n".encode())
        changed_ns = max(changed_ns, now.st_mtime_ns, now.st_ctime_ns)
    return digest.hexdigest(), changed_ns / 1e9
