"""For scripts/docs_site: parameters in docstrings, here `name: what it is`, as a list."""

import re
from collections.abc import Iterator

import griffe

_ITEM = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


class Parameters(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        for thing in _documented(pkg):
            names = _names(thing)
            if names and thing.docstring is not None:
                thing.docstring.value = as_list(thing.docstring.value, names)


def _documented(thing: griffe.Object) -> Iterator[griffe.Class | griffe.Function]:
    for member in thing.members.values():
        if isinstance(member, griffe.Class | griffe.Function):
            yield member
        if isinstance(member, griffe.Class | griffe.Module):
            yield from _documented(member)


def _names(thing: griffe.Class | griffe.Function) -> set[str]:
    if isinstance(thing, griffe.Function):
        return {x.name for x in thing.parameters}
    init = thing.members.get("__init__")
    given = {x.name for x in init.parameters} if isinstance(init, griffe.Function) else set()
    return given | set(thing.members)


def as_list(text: str, names: set[str]) -> str:
    """Each `name: what`, with the lines that go on with it, is an item; several may share a line
    where one sentence ends before the next name."""
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    items = re.compile(rf"(?<=[.;]) (?=(?:{known})(?:, \w+)*: )")
    lines, inside = [], False
    for line in text.splitlines():
        for part in items.split(line) if inside or _starts(line, names) else [line]:
            match = _ITEM.match(part)
            if match and _starts(part, names):
                lines += [] if inside else [""]
                lines.append(f"- `{match[1]}`: {match[2]}")
                inside = True
            elif inside and part.strip():
                lines.append(f"    {part.strip()}")
            else:
                inside = False
                lines.append(part)
    return "\n".join(lines)


def _starts(line: str, names: set[str]) -> bool:
    match = _ITEM.match(line)
    return match is not None and match[1].split(", ")[0] in names
