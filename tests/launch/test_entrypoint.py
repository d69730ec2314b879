"""A function is found again by name and file, in another process too."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.entrypoint import EntryPoint


class Outer:
    @staticmethod
    def inner() -> str:
        return "found"


def test_functions_are_found_again() -> None:
    assert EntryPoint.of("math:sqrt").resolve() is math.sqrt
    assert EntryPoint.of(Outer.inner).resolve() is Outer.inner
    assert EntryPoint.of(Path.cwd).module == "pathlib"


def test_a_file_is_loaded_when_import_does_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module `json` of the caller was another file than the one that import would find."""
    file = tmp_path / "json.py"
    file.write_text("def load(): return 'mine'")
    monkeypatch.delitem(sys.modules, "json", raising=False)
    reference = EntryPoint("json", "load", str(file))
    assert reference.resolve()() == "mine"
    assert reference.resolve() is reference.resolve()


@pytest.mark.parametrize("target", ["math", "math:", ":sqrt", lambda: None])
def test_what_has_no_name_is_refused(target: object) -> None:
    with pytest.raises(LaunchError, match=r"package\.module:function|cannot be run in another"):
        EntryPoint.of(target)  # type: ignore[arg-type]


def test_a_local_function_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(LaunchError, match="top level of a module"):
        EntryPoint.of(local)


def test_a_function_bound_to_an_object_is_refused() -> None:
    """By its name another process would find the function alone, and call it without the object."""
    with pytest.raises(LaunchError, match="give the function, and the object as an argument"):
        EntryPoint.of([].append)
    assert EntryPoint.of(Path.cwd).resolve()() == Path.cwd(), "bound to a class, which has a name"


UNGUARDED = """
from torchdistpackage.errors import RankError
from torchdistpackage.launch.workers import run_local
from torchdistpackage.launch.entrypoint import StopLoading, main_is_loading

class Box:
    def __init__(self, value):
        self.value = value

def add(box):
    return Box(box.value + 1)

def start(function, *args):
    if main_is_loading():
        raise StopLoading
    return run_local(function, args, num_procs=1)[0]

try:
    print(start(add, Box(1)).value)
except RankError as error:
    raise SystemExit(str(error))

def late(): ...

try:
    start(late)
except RankError as error:
    print(error)
"""


def run_unguarded(folder: Path, *how: str) -> subprocess.CompletedProcess[str]:
    (folder / "unguarded.py").write_text(UNGUARDED)
    return subprocess.run(
        [sys.executable, *how],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [["unguarded.py"], ["-m", "unguarded"]], ids=["file", "module"])
def test_a_script_may_end_its_loading_in_a_rank_where_it_starts_ranks(tmp_path, how):
    done = run_unguarded(tmp_path, *how)
    first, *rest = done.stdout.splitlines()
    assert first == "2", done.stderr
    assert "it was loaded up to the place where it first starts processes: define" in rest[-1]


def test_a_module_that_starts_ranks_when_imported_is_told_so(tmp_path):
    done = run_unguarded(tmp_path, "-c", "import unguarded")
    assert "unguarded starts processes when it is imported; put that part into a" in done.stderr


def test_a_missing_function_is_named() -> None:
    with pytest.raises(LaunchError, match="no function 'sqroot' in math"):
        EntryPoint.of("math:sqroot").resolve()
