"""The keys of metrics.jsonl as docs/logging.md lists them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "logging.md"


def keys() -> set[str]:
    table = PAGE.read_text("utf-8").partition("## metrics.jsonl")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
