"""The notebook runs from top to bottom, in a process that has no file for what it defines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "placed.ipynb"

RUN = """
import json, sys
cells = json.load(open(sys.argv[1], encoding="utf-8"))["cells"]
names = {"__name__": "__main__"}
for number, cell in enumerate(c for c in cells if c["cell_type"] == "code"):
    exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
"""


def test_the_notebook_is_well_formed():
    """Without outputs, so that what it shows is what it gives today."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) > 6
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), "cell", "exec")


@pytest.mark.full
def test_its_cells_run():
    command = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"rank (\d): loss (\S+) -> (\S+), (\d+)% right, (\d+) parameters", done.stdout
    )
    (r0, before, after, right, held0), (r1, *same, held1) = found
    assert (r0, r1, before, after, right) == ("0", "1", *same)
    assert float(after) < 0.5 * float(before) and int(right) > 80
    assert (int(held0), int(held1)) == (64 * 32 + 32 + 650, 64 * 32 + 32)
    assert "ms a step" in done.stdout and "place 1:" in done.stdout
