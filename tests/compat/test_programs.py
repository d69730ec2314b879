"""Files of the earlier libraries that were programs: `python -m` runs them by their old paths.

The job monitor's is in test_job_monitor_program.py.
"""

import re
import subprocess
import sys

import pytest


@pytest.mark.full
def test_the_bandwidth_test_of_the_batch_script_runs():
    pytest.importorskip("torch")
    program = [sys.executable, "-m", "torchdistpackage.dist.py_comm_test"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = r"all_gather of \d+ float32 elements over 1 ranks: bandwidth 0\.000 GB/s, .* s\n"
    assert re.fullmatch(expected, done.stdout)
