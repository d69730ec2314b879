"""The oldest supported releases of optional packages. No package is imported here."""

import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

OLDEST = {"transformers": "4.56", "peft": "0.14", "bitsandbytes": "0.50"}
"""Oldest releases: transformers before 4.56 ignores the documents in position_ids, and the
optimizers of bitsandbytes before 0.50 do not run on a CPU."""


def too_old(package: str) -> str | None:
    """Return a message if the installed release of `package` is too old.

    None: it is new enough, or not installed.
    """
    try:
        installed = version(package)
    except PackageNotFoundError:
        return None
    oldest = OLDEST[package]
    if _release(installed) >= _release(oldest):
        return None
    return (
        f"needs {package} {oldest} or newer, but {package} {installed} is installed; upgrade it: "
        f'pip install "{package}>={oldest}"'
    )


@lru_cache  # reading the metadata of a package takes milliseconds, and models ask many times
def is_before(package: str, release: str) -> bool:
    """Return whether the installed release of `package` is older than `release`."""
    return _release(version(package)) < _release(release)


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version without its suffix: (4, 56, 0) for 4.56.0.dev0."""
    match = re.match(r"[\d.]*", text)
    return tuple(int(x) for x in match[0].split(".") if x) if match else ()
