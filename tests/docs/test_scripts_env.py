"""Scripts take an environment that is there, and none that they do not need. No torch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def call(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], env=os.environ | env, capture_output=True, text=True, timeout=60
    )


def test_an_existing_environment_is_taken_by_its_python(tmp_path: Path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    script = f'source "{tmp_path}/scripts/env"; echo "$python"'
    done = call("bash", "-c", script, TDP_PYTHON=sys.executable)
    assert done.stdout.strip() == sys.executable and not (tmp_path / ".venv").exists()
    done = call("bash", "-c", script, TDP_PYTHON="/bin/false")
    assert done.returncode == 1 and "TDP_PYTHON=/bin/false does not run" in done.stderr


def test_an_existing_folder_of_peers_is_taken_as_it_is(tmp_path: Path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    command = (tmp_path / "scripts" / "peers",)
    done = call(*command, TDP_PYTHON=sys.executable, TDP_PEERS=str(tmp_path))
    assert done.stdout.strip() == str(tmp_path) and not (tmp_path / ".peers").exists()
    done = call(*command, TDP_PYTHON=sys.executable, TDP_PEERS="/none")
    assert done.returncode == 1 and "TDP_PEERS=/none" in done.stderr


@pytest.mark.full
def test_the_page_of_keys_needs_no_torch(tmp_path: Path):
    """Written in a copy whose only Python has torch hidden."""
    for name in ("scripts", "torchdistpackage"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "config.md", tmp_path / "docs")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = call(tmp_path / "scripts" / "docs", "--check", TDP_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / ".venv").exists() and not (tmp_path / ".venv-docs").exists()
