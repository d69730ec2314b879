"""The oldest releases of optional packages that runs work with. None is imported here."""

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = {"transformers": "4.56", "peft": "0.14", "bitsandbytes": "0.50"}
"""Before 4.56 transformers ignores the documents that position_ids tell apart; before 0.50 the
optimizers of bitsandbytes step on no CPU."""


def too_old(package: str) -> str | None:
    """What to say of the installed release of `package` if it is older than `OLDEST` has it.

    None: it is not, or there is none.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    oldest = OLDEST[package]
    if _release(found) >= _release(oldest):
        return None
    return (
        f"needs {package} {oldest} or newer, but {package} {found} is installed; upgrade it: "
        f'pip install "{package}>={oldest}"'
    )


def is_before(package: str, release: str) -> bool:
    """Whether the installed release of `package` is older than `release`."""
    return _release(version(package)) < _release(release)


def _release(text: str) -> tuple[int, ...]:
    """The numbers of a version without what follows them: (4, 56, 0) of 4.56.0.dev0."""
    found = re.match(r"[\d.]*", text)
    return tuple(int(x) for x in found[0].split(".") if x) if found else ()
