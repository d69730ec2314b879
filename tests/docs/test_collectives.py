"""The page on collectives: it names what there is, and its example does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchdistpackage import comm

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"


def test_every_public_function_is_on_the_page():
    told = re.findall(r"\w+", PAGE.read_text(encoding="utf-8"))
    assert [name for name in comm.__all__ if name.islower() and name not in told] == []


@pytest.mark.full
def test_the_example_of_the_page_runs(tmp_path: Path):
    found = re.search(
        r"`product\.py`:\n\n```python\n(.*?)```.*prints `(.*?)`",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found, f"{PAGE} shows no product.py"
    script = tmp_path / "product.py"
    script.write_text(found[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [found[2]]
