"""Cases of the fault matrix on real ranks: the culprit is named first, and nobody is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = "killed/forward/2|wrong shape/backward/3"
ONE_EACH = (
    "stopped/forward/0|out of memory/save/2|os exit/end/3|exception/start/0|hang/validation/2"
    "|lone collective/backward/3|slow rank/forward/2|slow disk/save/0|full disk/first step/0"
    "|dead node/reduce/3|unplugged/forward/2|nan/backward/0|corrupted weight/reduce/3"
    "|clock jump/forward/2"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces, cgroups and mounts")
@pytest.mark.parametrize("cases", [QUICK, pytest.param(ONE_EACH, marks=pytest.mark.full)])
def test_the_culprit_is_named_first(tmp_path, cases):
    rows = tmp_path / "rows.jsonl"
    program = [sys.executable, "-m", "benchmarks.faults_matrix", "--minutes", "5", "--json", rows]
    done = subprocess.run(
        [*program, "--only", f"^({cases})$"],
        cwd=ROOT, capture_output=True, text=True, timeout=330, check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == cases.count("|") + 1, done.stdout
    assert [row for row in found if not row["right"] or row["orphans"]] == [], done.stdout
