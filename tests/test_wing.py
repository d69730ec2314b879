"""The wing for guests can be cut off: in a copy of the tree without it the core's tests stand.

All of them, with `--full`. In the small set every file of core tests is imported, which is where
a name of the wing would be missing, and one case of each folder runs.

No torch.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WING = ("torchdistpackage/compat", "tests/compat")
FOLDERS = ("torchdistpackage", "tests", "docs", "configs", "examples", "benchmarks", "scripts")

# An editable install of this tree would serve from here what the copy lacks.
NO_EDITABLE = """
import sys

sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable__")
]
"""


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """Return a copy of the tree, compiled files included, without the wing and its tests."""

    def wing_in(folder: str, names: list[str]) -> list[str]:
        below = Path(folder).relative_to(ROOT)
        return [x for x in names if (below / x).as_posix() in WING]

    for path in ROOT.iterdir():
        if path.name in FOLDERS:
            shutil.copytree(path, tmp_path / path.name, ignore=wing_in, symlinks=True)
        elif path.is_file():
            shutil.copy2(path, tmp_path)
    (tmp_path / "sitecustomize.py").write_text(NO_EDITABLE, encoding="utf-8")
    return tmp_path


def run(cut: Path, *words: str) -> str:
    """Return what Python prints in the copy, in whose processes nothing finds this tree."""
    environment = {**os.environ, "PYTHONPATH": str(cut)}
    environment.pop("TDP_REQUIRE_SLURM", None)
    done = subprocess.run(
        [sys.executable, *words], cwd=cut, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


HAS_NO_WING = """
import torchdistpackage
assert "forward_backward" not in torchdistpackage.__all__ and "NaiveDDP" in dir(torchdistpackage)
for name in ("torchdistpackage.compat", "torchdistpackage.dist.process_topo"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
"""


def test_the_core_stands_without_the_wing(cut: Path):
    run(cut, "-c", HAS_NO_WING)
    text = run(cut, "-m", "pytest", "-q", "-m", "not full", "-p", "tests.one_a_folder", "tests")
    passed = re.search(r"(\d+) passed", text)
    assert passed and int(passed[1]) >= 25, text


@pytest.mark.full
def test_the_whole_core_set_passes_without_the_wing(cut: Path):
    run(cut, "-m", "pytest", "-q", "-m", "not full", "--ignore=tests/slurm", "tests")
