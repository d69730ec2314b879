"""Every dotted name of the configuration, and the advice for one that does not exist.

One rule: names are read off the sections once, here; nothing else lists them.
"""

import difflib
from collections.abc import Iterable

from pydantic.fields import FieldInfo

from torchdistpackage.config.schema import RunConfig, Section


def _walk(
    section: type[Section], path: str
) -> tuple[dict[str, type[Section]], dict[str, FieldInfo]]:
    sections: dict[str, type[Section]] = {path: section}
    keys: dict[str, FieldInfo] = {}
    for name, info in section.model_fields.items():
        dotted = f"{path}.{name}" if path else name
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner_sections, inner_keys = _walk(info.annotation, dotted)
            sections |= inner_sections
            keys |= inner_keys
        else:
            keys[dotted] = info
    return sections, keys


SECTIONS, KEYS = _walk(RunConfig, "")
"""Dotted path -> section class ("" is the whole file), and dotted path -> key."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The valid name that looks most like `name`, or None if none is close."""
    return next(iter(difflib.get_close_matches(name.lower(), list(names), n=1)), None)


def unknown_key(section: str, key: str) -> tuple[str, frozenset[str]]:
    """What to say of a key that `section` does not have, and the paths it may stand for.

    A key that exists elsewhere is told where it belongs; a misspelt one gets the nearest name
    of its own section, or else of all sections; failing all that, the valid names are listed.
    """
    here = SECTIONS[section].model_fields
    last = {path: path.rpartition(".")[2] for path in (*SECTIONS, *KEYS) if path}
    belongs = [path for path in last if last[path] == key]
    close = nearest(key, here)
    options = belongs + ([f"{section}.{close}".removeprefix(".")] if close else [])
    if not options and (far := nearest(key, last.values())):
        options = [path for path in last if last[path] == far]
    if not options:
        return f"unknown key; valid here: {', '.join(here)}", frozenset()
    top = SECTIONS[""].model_fields if section else ()
    shown = [f"{path} at the top level" if path in top else path for path in options]
    what = "misplaced key" if belongs else "unknown key"
    return f"{what}; did you mean {' or '.join(shown)}?", frozenset(options)
