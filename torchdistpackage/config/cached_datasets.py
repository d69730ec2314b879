"""Resolve the names of data sets in the cache of Hugging Face `datasets`, as data.path takes them.

`datasets` stores a loaded data set in CACHE/NAME/CONFIG/VERSION/HASH, in snake case, with org/name
written as org___name.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torchdistpackage.errors import DataError

CACHED = "datasets:"
"""Prefix of a path that names a cached data set. The names of data sets, configurations and splits
contain no colon."""
CACHED_KIND = "arrow"
"""Value of data.name for files in the cache."""
_INFO = "dataset_info.json"
_UNFINISHED = ".incomplete"
_CAPITALS = re.compile(r"([A-Z]+)([A-Z][a-z])")
_CAPITAL = re.compile(r"([a-z\d])([A-Z])")
_MOST_NAMES = 8


class CachedName(NamedTuple):
    """A parsed name `datasets:NAME[/CONFIG][:SPLIT]`.

    parts: the name and the configuration, split at slashes. split: "" if the name has none.
    """

    parts: tuple[str, ...]
    split: str

    @classmethod
    def of(cls, path: str) -> "CachedName | None":
        """Return the cached name in `path`, or None if it is the path of a file or folder."""
        if not path.startswith(CACHED):
            return None
        name, _, split = path.removeprefix(CACHED).partition(":")
        return cls(tuple(name.split("/")), split)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which `datasets` stores loaded data sets."""
    if folder := environ.get("HF_DATASETS_CACHE"):
        return Path(folder)
    home = environ.get("HF_HOME")
    home = home or str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    return Path(home).expanduser() / "datasets"


def located(path: str) -> Path:
    """Return the file or folder to read; for a cached name, the newest folder with its rows.

    Raises:
        DataError: the name is not in the cache, or there are several data sets or configurations of
            it.
    """
    name = CachedName.of(path)
    if name is None:
        return Path(path)
    if not all(name.parts) or len(name.parts) > 3 or {".", ".."} & {*name.parts}:
        raise DataError(
            f"{path} is not a name of a data set; write {CACHED}NAME or {CACHED}ORG/NAME, with "
            "/CONFIG and :SPLIT behind it where there are several"
        )
    cache = cache_folder()
    folders = _finished(cache)
    matches = {
        (dataset, config)
        for dataset, config_name in _readings(name.parts)
        for config in folders.get(dataset, {})
        if config_name in (None, config)
    }
    if len(matches) == 1:
        dataset, config = matches.pop()
        candidates = folders[dataset][config]
        # `map` writes into the folder, and so its time is not that of its rows
        return max(
            candidates, key=lambda folder: ((folder / _INFO).stat().st_mtime_ns, folder.name)
        )
    if matches:
        names = _listed(f"{dataset.replace('___', '/')}/{config}" for dataset, config in matches)
        raise DataError(
            f"{path} is one of {len(matches)} data sets in {cache}: {names}; name one, or its "
            f"folder"
        )
    raise DataError(
        f"{path} is not in {cache}, which has {_nearest(name, folders)}; load it once with "
        "datasets.load_dataset, or set HF_DATASETS_CACHE"
    )


def _readings(parts: tuple[str, ...]) -> list[tuple[str, str | None]]:
    """Yield the possible readings of a name: (folder of a data set, its configuration or None for
    any).
    """
    readings: list[tuple[str, str | None]] = []
    if len(parts) < 3:
        readings.append((_stored(parts), None))
    if len(parts) > 1:
        readings.append((_stored(parts[:-1]), parts[-1]))
    return readings


def _stored(parts: tuple[str, ...]) -> str:
    name = _CAPITAL.sub(r"\1_\2", _CAPITALS.sub(r"\1_\2", parts[-1])).lower()
    return "___".join((*parts[:-1], name))


def _finished(cache: Path) -> dict[str, dict[str, list[Path]]]:
    """Return the folders with rows by data set and configuration."""
    folders: dict[str, dict[str, list[Path]]] = {}
    for file in cache.glob(f"*/*/*/*/{_INFO}"):
        folder = file.parent
        if not folder.name.endswith(_UNFINISHED):
            dataset, config, *_ = folder.relative_to(cache).parts
            folders.setdefault(dataset, {}).setdefault(config, []).append(folder)
    return folders


def _nearest(name: CachedName, folders: Mapping[str, Mapping[str, object]]) -> str:
    for dataset, config in _readings(name.parts):
        if config is not None and dataset in folders:
            return f"of that data set {_listed(folders[dataset])}"
    return _listed(dataset.replace("___", "/") for dataset in folders)


def _listed(names: Iterable[str]) -> str:
    every = sorted({*names})
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return f"{', '.join(every[:_MOST_NAMES])}{more}" if every else "no data set"
