"""What a job of `tdp submit` runs here in place of training: it writes what it sees, and decides.

    python -u -P -m submit_probe RUN/job/config.yaml

WORDS has the word of each start, comma-separated; the last goes for all later ones. helper.py
beside it is edited after the submission.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import helper

import torchdistpackage
from torchdistpackage.launch.slurm.run_dir import attempt_id
from torchdistpackage.run_files import RunDir


def main() -> int:
    env = os.environ
    files, start, rank = RunDir(Path(sys.argv[1]).parents[1]), attempt_id(env), env["SLURM_PROCID"]
    step = subprocess.run(
        ["scontrol", "-o", "show", "step", f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    seen = {
        "modules": [__file__, helper.__file__, torchdistpackage.__file__],
        "value": helper.VALUE,
        "config": Path(sys.argv[1]).read_text(),
        "env": dict(env),
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "step": step.stdout,
    }
    (files.run / f"seen.{start}.{rank}").write_text(json.dumps(seen))
    sys.stdout.write(f"rank {rank} of start {start} says {helper.VALUE}\n")
    if rank == "0":
        words = env["WORDS"].split(",")
        number = len(list(files.run.glob("seen.*.0"))) - 1
        word = words[min(number, len(words) - 1)]
        files.decision(start).write_text(f"{word} at start {number}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
