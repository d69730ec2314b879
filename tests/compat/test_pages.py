"""The page on earlier libraries: each row of its tables has a test, which exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parents[1] / "docs" / "coming_from.md"


def test_every_row_that_names_a_test_has_it():
    rows = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(rows) >= 3
    for name, test in rows:
        tree = ast.parse((TESTS / name).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
