"""What a file of the package looks like: with a text at its head, without shortcuts."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import package_files
from tests.package_files import ROOT, imports, offences

FORBIDDEN_CALLS = ("eval", "exec", "breakpoint", "input", "exit", "quit")


def test_a_class_name_has_one_meaning():
    """Also `Thing` beside `_Thing`: who greps for a class finds one."""
    homes: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in package_files.tree(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), set()).add(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def without_a_head(path: Path) -> Iterator[str]:
    body = package_files.tree(path).body
    if body and not ast.get_docstring(package_files.tree(path)):
        yield "no docstring"
    if path.name == "__init__.py" and path.parent != ROOT:
        assigned = {ast.unparse(t) for n in body if isinstance(n, ast.Assign) for t in n.targets}
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        if len(body) >= 2 and "__getattr__" not in defined:
            yield f"neither a text nor lazy: {assigned}"


def test_modules_open_with_what_they_are():
    assert offences(without_a_head) == {}


def shortcuts_in(path: Path) -> Iterator[str]:
    """Calls and statements that have no place in a library."""
    in_cli = path.relative_to(ROOT).parts[0] == "cli"
    for node in package_files.nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            barred = FORBIDDEN_CALLS if in_cli else (*FORBIDDEN_CALLS, "print")
            if node.func.id in barred:
                yield f"line {node.lineno}: {node.func.id}()"
        elif isinstance(node, ast.Assert) and node.msg is not None and user_sees(node.msg):
            yield f"line {node.lineno}: assert with a text for a user: raise one of errors.py"
    for line, module in imports(path):
        if module.split(".")[0] in ("pdb", "ipdb"):
            yield f"line {line}: {module}"


def user_sees(message: ast.expr) -> bool:
    """A text with values in it tells somebody what is wrong; a plain one notes an invariant."""
    return not isinstance(message, ast.Constant)


def test_no_shortcuts():
    assert offences(shortcuts_in) == {}


def test_a_shortcut_is_seen(monkeypatch: pytest.MonkeyPatch):
    """In a file that does not exist."""
    monkeypatch.setattr(package_files, "tree", lambda path: ast.parse("def f(x):\n    print(x)"))
    assert list(shortcuts_in(ROOT / "train" / "shortcut.py")) == ["line 2: print()"]
