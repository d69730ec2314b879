"""NVIDIA's compute-sanitizer over one case: reads and writes outside of what was allocated.

torch's allocator cuts large blocks, inside which a wrong address is nobody's fault: it is off.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.rows import NotRun, Status, expect
from benchmarks.gpu.shared_ranks import DeviceRanks

ROOT = Path(__file__).parents[2]
TOOL = "compute-sanitizer"


def memory_checked(name: str, ranks: DeviceRanks) -> str:
    """Run the case of that name in a process of its own under memcheck.

    Raises:
        NotRun: the tool is not installed.
    """
    if (tool := shutil.which(TOOL)) is None:
        raise NotRun(f"{TOOL} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [tool, "--tool=memcheck", "--target-processes=all", "--error-exitcode=9"]
        command += [sys.executable, "-m", "benchmarks.gpu.part", "benchmarks.gpu.several"]
        done = subprocess.run(
            [*command, str(file), f"--cases={name}", f"--seconds={ranks.limit_s}"],
            cwd=ROOT,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True,
            text=True,
            timeout=ranks.limit_s,
            check=False,
        )
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
    text = done.stdout + done.stderr
    errors = [int(x) for x in re.findall(r"ERROR SUMMARY: (\d+) error", text)]
    ran = [row["status"] for row in rows] == [Status.OK]
    expect(ran and bool(errors) and not sum(errors), text)
    return f"no error in {len(errors)} processes"
