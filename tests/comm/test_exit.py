"""A rank may end right after its last calls, while gloo's workers still let go of the tensors."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.starting import PLAIN, by_hand

# The workers wait for the lock of the interpreter, which the main thread keeps to its end: what
# happens by chance once in many runs happens in nearly each.
SCRIPT = """
import sys
import time
import torch
import torch.distributed as dist
from torchdistpackage import setup_distributed
setup_distributed()
group = dist.group.WORLD
dist.all_reduce(torch.ones(4))
sys.setswitchinterval(100)
for _ in range(100):
    dist.all_reduce(torch.ones(4), async_op=True)
{end}
end_s = time.perf_counter() + 0.3
while time.perf_counter() < end_s:
    pass
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "end",
    ["", pytest.param("dist.destroy_process_group()", marks=pytest.mark.full)],
    ids=["as it is", "the group is destroyed, and held"],
)
def test_ranks_end_well_though_nobody_awaited_their_last_calls(end: str, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    store = {"LOCAL_WORLD_SIZE": "2", "TDP_STORE": str(tmp_path / "store")}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env=PLAIN | by_hand(rank, 2, 1) | store,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
