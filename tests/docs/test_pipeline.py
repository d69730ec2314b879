"""The page on pipelines: each row of its tables has a test, which exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipeline.md"
TESTS = ROOT / "tests" / "parallel" / "pipeline"


def test_every_row_has_a_test_of_its_own():
    text = PAGE.read_text(encoding="utf-8")
    cells = re.findall(r"^\|.*\| (.*) \|$", text, re.M)
    rows = [cell.strip("`") for cell in cells if cell != "test"]
    named = [row for row in rows if row != "the same"]
    assert len(named) > 15 and len(set(named)) == len(named)
    for row in named:
        name, _, test = row.partition("::")
        tree = ast.parse((TESTS / name).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row
