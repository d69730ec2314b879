"""Fixtures of the tests of batch scripts."""

from pathlib import Path

import pytest

from tests.launch.slurm.batch import Bash


@pytest.fixture
def bash(tmp_path: Path) -> Bash:
    return Bash(tmp_path)
