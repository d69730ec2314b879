"""The earlier package's job monitor as a program, under its earlier name. No torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.slurm.scripted import Programs, row

PROGRAM = [sys.executable, "-m", "torchdistpackage.tools.slurm_job_monitor"]


def test_it_runs_under_its_earlier_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm, script = Programs(tmp_path), tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n")
    slurm.say("sbatch", "12\n")
    slurm.say("squeue", row("12", "COMPLETED"))
    done = subprocess.run([*PROGRAM, "--cfg", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "job 12 is COMPLETED" in done.stdout
    assert slurm.asked[0] == ["sbatch", "--parsable", str(script)]


def test_without_its_option_it_says_how_it_is_used():
    done = subprocess.run(PROGRAM, capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage: slurm_job_monitor" in done.stderr
