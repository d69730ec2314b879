"""What a file of the package looks like: with a text at its head, without shortcuts. No torch."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import torchdistpackage
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


TESTS = ROOT.parent / "tests"
FRONTS = {place.partition(":")[0] for place in torchdistpackage.NAMES.values()} | {"cli.main"}
"""Modules by which tests of others come in: those of public names, and the command."""


@cache
def names_in(folder: str) -> frozenset[str]:
    """Names that a test file of this folder may begin with: of its modules and their folders."""
    found = [p for p in (ROOT / folder).rglob("*") if p.is_dir() or p.suffix == ".py"]
    return frozenset(p.stem for p in found if not p.stem.startswith("__"))


def only_module(path: Path) -> str:
    """Return the one module of its own folder that half of a file's tests or more name, if that is
    no front."""
    folder = path.relative_to(TESTS).parts[0]
    tree = ast.parse(path.read_text("utf-8"))
    homes: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                home = package_files.file_of(whole) or package_files.file_of(node.module)
                if home and home.is_relative_to(ROOT / folder) and home.name != "__init__.py":
                    module = package_files.module_of(home).removeprefix(f"{ROOT.name}.")
                    homes.setdefault(module, set()).add(alias.asname or alias.name)
    if len(homes) != 1 or (module := next(iter(homes))) in FRONTS:
        return ""
    tests = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")]
    naming = [
        x for x in tests if homes[module] & {n.id for n in ast.walk(x) if isinstance(n, ast.Name)}
    ]
    return module if len(naming) * 2 >= len(tests) else ""


def has_name_of_module(path: Path) -> bool:
    stem = path.stem.removeprefix("test_")
    names = {*names_in(path.relative_to(TESTS).parts[0]), path.parent.name}
    return any(stem == name or stem.startswith(f"{name}_") for name in names)


def is_ghost(path: Path) -> bool:
    """Whether a test file is of one module, and its name begins with that of none there."""
    return not has_name_of_module(path) and only_module(path) != ""


def test_a_test_file_is_named_after_the_module_it_tests():
    """Or after a topic: then it goes through several modules, or comes in by a public name."""
    paths = [
        path
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.parent != TESTS and path.relative_to(TESTS).parts[0] != package_files.WING
    ]
    assert sum(map(has_name_of_module, paths)) > 200
    assert [str(x.relative_to(TESTS)) for x in paths if is_ghost(x)] == []
    assert [x.name for x in paths if not x.read_text("utf-8").startswith('"""')] == []


def test_a_ghost_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "TESTS", tmp_path)
    (tmp_path / "ddp").mkdir()
    text = "from torchdistpackage.ddp.bucket_plan import plan\n\ndef test_it():\n    plan()\n"
    for name in ("test_buckets.py", "test_bucket_plan.py", "test_bucket_plan_late.py"):
        (tmp_path / "ddp" / name).write_text(text)
    assert [x.name for x in (tmp_path / "ddp").iterdir() if is_ghost(x)] == ["test_buckets.py"]
