"""How the tables of earlier surfaces are held against what this package has.

A signature is the earlier parameters as text. Ours may add parameters with defaults; anything else
that differs has to be said.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import yaml

from torchdistpackage.errors import NotAvailableError

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def read(name: str) -> list[dict]:
    """The entries of all tables in a file beside this one."""
    tables = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return [entry for table in tables.values() for entry in table]


def import_from(module: str, name: str) -> object:
    """What `from module import name` does."""
    return getattr(__import__(module, fromlist=[name]), name)


def earlier_parameters(signature: str) -> tuple[list[tuple[str, str | None]], dict]:
    """[(name, default as text or None)], and of `*rest` and `**rest` {kind: name}."""
    function = ast.parse(f"def f({signature}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    names = [a.arg for a in function.args.args]
    defaults = [ast.unparse(d) for d in function.args.defaults]
    padded = [None] * (len(names) - len(defaults)) + defaults
    variable = {
        inspect.Parameter.VAR_POSITIONAL: function.args.vararg,
        inspect.Parameter.VAR_KEYWORD: function.args.kwarg,
    }
    rest = {kind: a.arg for kind, a in variable.items() if a is not None}
    return list(zip(names, padded, strict=True)), rest


def keyword_only(signature: str) -> set[str]:
    """Earlier parameters that are passed by name alone."""
    function = ast.parse(f"def f({signature}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return {a.arg for a in function.args.kwonlyargs}


def as_text(default: object) -> str:
    return default.__name__ if inspect.isclass(default) else repr(default)


def differences(signature: str, ours: list[inspect.Parameter]) -> set[str]:
    """Earlier parameters that do not mean the same at the same place; of ours, those in the way."""
    wanted, rest = earlier_parameters(signature)
    positional = [p for p in ours if p.kind in POSITIONAL]
    differ: set[str] = set()
    for at, (name, default) in enumerate(wanted):
        mine = positional[at] if at < len(positional) else None
        same_name = mine is not None and mine.name == name
        if not same_name or default not in (None, as_text(mine.default)):
            differ.add(name)
    kinds = {p.kind for p in ours}
    differ |= {name for kind, name in rest.items() if kind not in kinds}
    keywords = keyword_only(signature)
    differ |= keywords - {p.name for p in ours if p.kind is p.KEYWORD_ONLY}
    own = (p for p in ours if p.kind is p.KEYWORD_ONLY and p.name not in keywords)
    more = [*positional[len(wanted) :], *own]
    return differ | {p.name for p in more if p.default is p.empty}


def refuses_use(thing: object, says: str) -> None:
    """An import, a test of its kind and an annotation pass; each use is refused with the reason."""

    def subclass():
        class Mine(thing): ...

    assert callable(thing) and not hasattr(thing, "anything")
    assert thing | None == None | thing  # what an annotation does
    for use in (
        lambda: thing(),
        lambda: thing(1, x=2),
        lambda: thing.anything,
        lambda: isinstance(1, thing),
        lambda: isinstance(1, (str, thing)),
        lambda: issubclass(int, thing),
        lambda: thing[0],
        lambda: list(thing),
        subclass,
    ):
        with pytest.raises(NotAvailableError) as caught:
            use()
        assert str(caught.value) == says
