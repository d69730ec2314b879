"""The table of promises: each row has its own test, which exists."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data_parallel.md"
TESTS = ROOT / "tests" / "ddp"


def rows() -> list[str]:
    return re.findall(r"^\|.*\| `(test_\w+\.py::\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.M)


@cache
def defined_in(name: str) -> frozenset[str]:
    tree = ast.parse((TESTS / name).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def promises(name: str) -> set[str]:
    return {f"{name}::{test}" for test in defined_in(name) if test.startswith("test_")}


def test_every_row_has_a_test_that_exists():
    assert len(rows()) > 40
    assert [row for row in rows() if row.split("::")[1] not in defined_in(row.split("::")[0])] == []


def test_every_promise_to_torch_users_is_a_row():
    for name in ("test_torch_users.py", "test_torch_users_graphs.py"):
        assert promises(name) - set(rows()) == set()


def test_no_test_stands_in_two_rows():
    assert [row for row, times in Counter(rows()).items() if times > 1] == []
