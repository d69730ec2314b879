"""One script, started by hand or by a launcher."""

import os

import pytest

from torchdistpackage.launch.workers import run_or_launch


def who(*parts: str) -> tuple[str, str, int, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], os.getpid(), "".join(parts)


def test_alone_it_starts_the_ranks_and_answers_with_rank_0():
    rank, world_size, pid, text = run_or_launch(who, "a", "b", num_procs=3)
    assert (rank, world_size, text) == ("0", "3", "ab")
    assert pid != os.getpid()


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("under_torchrun")
def test_a_rank_of_a_launcher_starts_none():
    assert run_or_launch(who, "c", num_procs=3) == ("1", "2", os.getpid(), "c")
