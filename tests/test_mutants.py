"""`scripts/mutants` on a tiny tree: what it draws and changes, and what tests say of it.

No torch.
"""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from tests import mutants

SUMS = '''"""Sums."""
__all__ = ["total"]


def total(a: int, b: int = 2) -> int:
    """Return their sum, or 0."""
    if a < 0 and not b:
        raise ValueError(f"{a + b} is wrong")
    print(a)
    return a + b


def unused(a: int) -> int:
    return a * 3
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("small/sums", "small/more", "tests/sums"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "small/sums/add.py").write_text(SUMS)
    (tmp_path / "small/more/less.py").write_text("x = 1\n" * 5)
    (tmp_path / "small/top.py").write_text("y = 2 - 1\n")
    text = "from small.sums.add import total\n\ndef test_total():\n    assert total(2, 3) == 5\n"
    (tmp_path / "tests/sums/test_add.py").write_text(text)
    return tmp_path


def test_every_change_is_one_of_the_code_that_runs(tree: Path):
    file = "small/sums/add.py"
    found = mutants.mutants_of(tree / file, file)
    told = [(x.kind, x.before, x.after) for x in found]
    assert ("comparison", "a < 0", "(a <= 0)") in told
    assert ("boolean", "a < 0 and not b", "(a < 0 or not b)") in told
    assert ("boolean", "not b", "(b)") in told
    assert ("condition", "a < 0 and not b", "(not (a < 0 and (not b)))") in told
    assert ("call left out", "print(a)", "pass") in told
    assert ("return of None", "return a + b", "return None") in told
    assert ("arithmetic", "a * 3", "(a // 3)") in told and ("constant", "2", "(3)") in told
    assert not any("wrong" in before or "total" in before for _, before, _ in told)
    for mutant in found:
        changed = mutant.applied(SUMS.encode())
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SUMS)), mutant


def test_each_folder_has_its_part_by_lines_and_a_seed_draws_the_same(tree: Path):
    assert mutants.shares({"a": 60, "b": 30, "c": 10}, 5) == {"a": 3, "b": 2, "c": 0}
    drawn = mutants.draw(tree, 8, 1, "small")
    assert drawn == mutants.draw(tree, 8, 1, "small") != mutants.draw(tree, 8, 2, "small")
    assert len({x.key for x in drawn}) == 8
    assert sum(x.file == "small/sums/add.py" for x in drawn) == 6


def test_a_planted_call_tells_its_place_and_changes_nothing(tree: Path):
    file = tree / "small/sums/add.py"
    every = mutants.mutants_of(file, "small/sums/add.py")
    assert [x.before for x in every if not x.is_planted] == ["2"]  # a default runs at the import
    assert mutants.plant(tree, every, "small") == {x.key for x in every if x.is_planted}
    hits: list[int] = []
    text = file.read_text().replace("__import__('small._reach', fromlist=['hit']).hit", "hit")
    names: dict = {"hit": hits.append}
    exec(compile(text, "planted", "exec"), names)  # noqa: S102 - a text of this test
    assert (names["total"](2, 3), names["unused"](2)) == (5, 6)
    assert {every[x].before for x in hits} >= {"a < 0", "print(a)", "return a + b", "a * 3", "3"}
    assert not any(every[x].before == "not b" for x in hits)  # 2 is not below 0


def test_tests_that_come_to_a_mutant_are_run_and_the_first_failure_ends_it(tree: Path, monkeypatch):
    file = tree / "small/sums/add.py"
    every = mutants.mutants_of(file, "small/sums/add.py")
    mutant = next(x for x in every if x.kind == "boolean")
    near, far, wrong, slow = (
        f"tests/sums/{x}" for x in ("test_add.py::a", "b.py::b", "b.py::c", "b.py::d")
    )
    tests = mutants.TestSet(tree, 9.0, every, "small")
    seconds = {far: 0.1, near: 5.0, wrong: 0.2, slow: 0.3}
    hits = {x.key: [near, far, wrong, slow] if x == mutant else [] for x in every}
    tests._learn("sums", {"seconds": seconds, "failing": [wrong], "hits": hits})
    monkeypatch.setattr(mutants, "FIRST", 1)

    def ran(by: str, message: str):
        return mutants.Ran(1, "", ({"test": by, "failed": message, "seconds": 0.1},))

    answers = [
        *(mutants.Ran(0), ran(slow, "TimeoutError")),
        *(mutants.Ran(0), mutants.Ran(0)),  # with the mutant again, and without it
        ran(far, "KeyError"),
    ]
    asked: list[tuple[list[str], bool]] = []

    def run(root: Path, paths: list[str], limit_s: float, options=()):
        asked.append(([*paths], file.read_text() != SUMS))
        return answers[len(asked) - 1]

    monkeypatch.setattr(mutants, "run_tests", run)
    outcome = tests.outcome(mutant)
    assert (outcome.verdict, outcome.by) == ("killed", far)
    assert asked == [
        ([near], True),
        ([far, slow], True),
        ([slow], True),
        ([slow], False),
        ([far], True),  # a failure that a loaded machine explains tells nothing
    ]
    assert file.read_text() == SUMS and tests.known[slow] and not tests.known[near]
    unreached = next(x for x in every if x.before == "a * 3")
    assert tests.outcome(unreached).verdict == "none"


@pytest.mark.full
def test_tests_kill_what_they_hold_and_leave_the_rest_alive(tree: Path):
    file = "small/sums/add.py"
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['full']\n")
    more = "from small.sums.add import unused\n\ndef test_more():\n    assert unused(0) == 0\n"
    (tree / "tests/sums/test_more.py").write_text(more)
    copy = tree / "copies" / "new"
    for name in ("small", "tests", "pyproject.toml"):
        (shutil.copytree if (tree / name).is_dir() else shutil.copy)(tree / name, copy / name)
    every = mutants.mutants_of(tree / file, file)
    named = {(x.kind, x.before): x for x in every}
    tests = mutants.TestSet(copy, 60.0, every, "small")
    killed = tests.outcome(named["return of None", "return a + b"])
    assert (killed.verdict, killed.by) == ("killed", "tests/sums/test_add.py::test_total")
    assert tests.outcome(named["arithmetic", "a * 3"]).verdict == "alive"
    assert tests.outcome(named["boolean", "not b"]).verdict == "none"
    found = json.loads((copy.parent / "reach.new.sums.json").read_text())
    assert found["hits"][named["arithmetic", "a * 3"].key] == ["tests/sums/test_more.py::test_more"]
    (copy / "tests/sums/test_more.py").write_text(f"import time\ntime.sleep(99)\n{more}")
    slow = mutants.TestSet(copy, 2.0, every, "small")
    assert slow.outcome(named["arithmetic", "a * 3"]).verdict == "time"


def test_the_tables_name_what_the_old_set_alone_kills():
    two = [
        mutants.Mutant("torchdistpackage/a/a.py", n, "constant", n, n + 1, "1", "(2)")
        for n in (1, 2)
    ]
    rows = {
        two[0].key: {"new": ["killed", "tests/a", 1.0]},
        two[1].key: {"new": ["alive", "", 2.0], "old": ["killed", "tests/b", 1.0]},
    }
    text = mutants.table(two, rows, ["new", "old"])
    assert "| torchdistpackage/a/a.py:1 | `1` becomes `(2)` | killed tests/a |  |" in text
    assert "| a | 2 | 2 | 1 | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 0 | 0 |" in text
    assert text.endswith(f"\nkilled by the old set alone: {two[1].key}\n")
