"""`tdp plan` of tens of thousands of ranks takes seconds of CPU, not minutes."""

import subprocess
import sys
from pathlib import Path

import pytest

SLURM = str(Path(__file__).parents[2] / "configs" / "gpt_slurm.yaml")
NODES = "launch.slurm.nodes=8192"
DATA = (
    *("parallel.pipe=1", "parallel.tensor=1", "parallel.sequence_parallel=false"),
    *("pipeline.microbatches=1", "data.global_batch=65536"),
)
PIPE = (
    *("parallel.pipe=16", "pipeline.schedule=interleaved", "pipeline.chunks=4"),
    *("pipeline.microbatches=128", "model.layers=64", "data.global_batch=131072"),
)
PROGRAM = """
import sys, time
from torchdistpackage.cli.main import main
assert main(sys.argv[1:]) == 0
print("", time.process_time())
"""


@pytest.mark.parametrize(
    ("keys", "most_s"),
    [
        pytest.param(("data.global_batch=65536",), 4, id="mixed"),
        pytest.param(DATA, 4, id="data", marks=pytest.mark.full),
        pytest.param((*DATA, "parallel.zero=1"), 4, id="zero"),
        # most of it searches cuts and checks the order
        pytest.param(PIPE, 9, id="pipe", marks=pytest.mark.full),
    ],
)
def test_a_plan_of_65536_ranks_takes_seconds(keys: tuple[str, ...], most_s: float) -> None:
    """Three to four times what an idle core takes, since a loaded one is slower."""
    command = ["plan", SLURM, NODES, *keys, "--time", "--device", "h100-sxm"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, check=True
    )
    assert float(done.stdout.split()[-1]) < most_s
