"""A function is found again by name and file, in another process too."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.reference import Reference, missing_module


class Outer:
    @staticmethod
    def inner() -> str:
        return "found"


def test_functions_are_found_again() -> None:
    assert Reference.of("math:sqrt").resolve() is math.sqrt
    assert Reference.of(Outer.inner).resolve() is Outer.inner
    assert Reference.of(Path.cwd).module == "pathlib"


def test_a_file_is_loaded_when_import_does_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module `json` of the caller was another file than the one that import would find."""
    file = tmp_path / "json.py"
    file.write_text("def load(): return 'mine'")
    monkeypatch.delitem(sys.modules, "json", raising=False)
    reference = Reference("json", "load", str(file))
    assert reference.resolve()() == "mine"
    assert reference.resolve() is reference.resolve()


@pytest.mark.parametrize("target", ["math", "math:", ":sqrt", lambda: None])
def test_what_has_no_name_is_refused(target: object) -> None:
    with pytest.raises(LaunchError, match=r"package\.module:function|cannot be run in another"):
        Reference.of(target)  # type: ignore[arg-type]


def test_a_local_function_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(LaunchError, match="top level of a module"):
        Reference.of(local)


def test_a_missing_function_is_named() -> None:
    with pytest.raises(LaunchError, match="no function 'sqroot' in math"):
        Reference.of("math:sqroot").resolve()


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("pkg.mod:build", ""),
        ("pkg.sub.deep:build", ""),
        ("pkg.other:build", "pkg.other"),
        ("pkg.mod.deeper:build", "pkg.mod.deeper"),
        ("nopkg.toy:build", "nopkg"),
        ("space.deep.mod:build", ""),
        ("space.deep.nomod:build", "space.deep.nomod"),
        ("json.decoder:JSONDecoder", ""),
        ("sys:exit", ""),
    ],
)
def test_a_module_that_is_not_there_is_found_out_without_importing(tmp_path, target, missing):
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "space" / "deep").mkdir(parents=True)  # without __init__.py
    (tmp_path / "space" / "deep" / "mod.py").touch()
    for name in ("__init__.py", "mod.py", "sub/__init__.py", "sub/deep.py"):
        (tmp_path / "pkg" / name).write_text("raise RuntimeError('imported')")
    assert missing_module(target, [str(tmp_path), *sys.path]) == missing
