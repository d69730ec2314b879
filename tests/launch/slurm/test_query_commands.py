"""Commands end, and what they could not do is said."""

import sys

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm import query
from torchdistpackage.launch.slurm.query import CommandTimeout, CompletedCommand, run_command


def test_any_exit_code_is_an_answer():
    ran = run_command([sys.executable, "-c", "import sys; print('out'); sys.exit('\\nwhy\\nmore')"])
    assert ran == CompletedCommand(1, "out\n", "\nwhy\nmore\n")
    assert ran.why == "why"
    assert CompletedCommand(3).why == "exit code 3"


def test_the_environment_is_the_given_one_and_nothing_is_read_from_here():
    code = "import os, sys; print(sorted(os.environ) == ['MINE'], repr(sys.stdin.read()))"
    assert run_command([sys.executable, "-E", "-c", code], env={"MINE": "1"}).out in (
        "True ''\n",
        "False ''\n",  # where the interpreter sets LC_CTYPE for itself
    )


def test_a_command_that_is_not_there_is_named():
    with pytest.raises(LaunchError, match=r"there is no no-such-command here; .* a login node"):
        run_command(["no-such-command", "-x"])


def test_a_command_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(query, "TIMEOUT_S", 0.2)
    with pytest.raises(CommandTimeout, match=r"gave no answer in 0.2 s"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"])
