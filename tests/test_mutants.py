"""`scripts/mutants` on a tiny tree: what it draws and changes, and what tests say of it."""

from __future__ import annotations

import ast
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


def test_near_tests_are_run_first_and_the_first_failure_ends_it(tree: Path, monkeypatch):
    file = tree / "small/sums/add.py"
    mutant = next(x for x in mutants.mutants_of(file, "small/sums/add.py") if x.kind == "boolean")
    assert mutants.tests_of(tree, mutant, "small") == [["tests/sums/test_add.py"], ["tests/sums"]]
    wrong, right = "tests/a.py::test_b[1 2]", "tests/a.py::test_c"
    failing = [(1, f"FAILED {name} - KeyError\n") for name in (wrong, right)]
    answers = [(0, ""), failing[0], (1, ""), failing[1], (0, "")]
    asked: list[list[str]] = []

    def run(root: Path, paths: list[str], limit_s: float, options=()):
        is_mutated = file.read_text() != SUMS
        asked.append([*paths, *options, str(is_mutated)])
        return answers[len(asked) - 1]

    monkeypatch.setattr(mutants, "run_tests", run)
    tests = mutants.TestSet(tree, 9.0, {}, "small")
    outcome = tests.outcome(mutant)
    assert (outcome.verdict, outcome.by) == ("killed", right)
    rest = ["tests/sums", "-x", "--ignore=tests/sums/test_add.py"]
    assert asked == [
        ["tests/sums/test_add.py", "-x", "True"],
        [*rest, "True"],
        [wrong, "False"],  # it fails anyway, and is left out
        [*rest, f"--deselect={wrong}", "True"],
        [right, "False"],
    ]
    assert file.read_text() == SUMS and tests.known == {wrong: True, right: False}


@pytest.mark.full
def test_tests_kill_what_they_hold_and_leave_the_rest_alive(tree: Path):
    file = "small/sums/add.py"
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['full']\n")
    every = {(x.kind, x.before): x for x in mutants.mutants_of(tree / file, file)}
    tests = mutants.TestSet(tree, 60.0, {}, "small")
    killed = tests.outcome(every["return of None", "return a + b"])
    assert (killed.verdict, killed.by) == ("killed", "tests/sums/test_add.py::test_total")
    assert tests.outcome(every["arithmetic", "a * 3"]).verdict == "alive"
    (tree / "tests/sums/test_add.py").write_text(
        "import time\n\ndef test_it():\n    time.sleep(99)\n"
    )
    slow = mutants.TestSet(tree, 2.0, {}, "small")
    assert slow.outcome(every["arithmetic", "a * 3"]).verdict == "time"


def test_the_table_names_what_the_old_set_alone_kills():
    two = [mutants.Mutant("a.py", n, "constant", n, n + 1, "1", "(2)") for n in (1, 2)]
    rows = {
        two[0].key: {"old": ["killed", "tests/a", 1.0], "new": ["alive", "", 2.0]},
        two[1].key: {"old": ["killed", "tests/a", 1.0], "new": ["time", "tests/b", 2.0]},
    }
    text = mutants.table(two, rows, ["old", "new"])
    assert "| a.py:1 | `1` becomes `(2)` | killed tests/a | alive |" in text
    assert text.endswith(
        "old: 2 of 2 killed, 0 reached the limit\nnew: 0 of 2 killed, 1 reached the limit\n"
        "killed by the old set alone: a.py:1:1-2:constant, a.py:2:2-3:constant\n"
    )
