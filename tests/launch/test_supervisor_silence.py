"""A rank that lost a peer: how long its task stays, with real watchers."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchdistpackage.environment.failure import Failure, FailureKind, to_json
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.supervisor import wait_for_word

LOST = "Connection closed by peer"
PROGRAM = """
import sys
from pathlib import Path
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.supervisor import WatchedRank, supervise

folder, noted = Path(sys.argv[1]), SignalFlag()
noted.listen(["USR1", "TERM"])

def body():
    raise RuntimeError(sys.argv[2])

place = WatchedRank(1, folder / "rank.log", folder / "failures", folder / "decision", 3)
sys.exit(supervise(body, place, noted))
"""


def begin(folder: Path, error: str = LOST) -> subprocess.Popen[str]:
    """The watcher of rank 1 of 3, whose rank fails at once."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), error], stderr=subprocess.PIPE, text=True
    )


def leave(folder: Path, rank: int) -> None:
    (folder / "failures").mkdir(exist_ok=True)
    lost = Failure(rank, f"n{rank}", 1, time.time(), FailureKind.ERROR, 1, LOST)
    (folder / "failures" / f"rank{rank}.json").write_text(to_json(lost))


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_a_task_stays_while_a_rank_is_silent_and_ends_when_slurm_says_so(tmp_path):
    leave(tmp_path, 2)
    with begin(tmp_path) as process:
        assert "1 of 3 ranks" in [process.stderr.readline() for _ in range(2)][1]
        assert process.poll() is None and (tmp_path / "failures" / "rank1.json").exists()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 1 and time.monotonic() - began < 5


def test_a_task_ends_when_all_ranks_have_left_word(tmp_path):
    leave(tmp_path, 2)
    with begin(tmp_path) as process:
        wait_for(tmp_path / "failures" / "rank1.json")
        time.sleep(0.3)
        assert process.poll() is None
        leave(tmp_path, 0)
        process.communicate(timeout=60)
    assert process.returncode == 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_task_ends_at_once_where_the_run_has_or_its_own_rank_is_to_blame(tmp_path, ended):
    if ended:
        (tmp_path / "decision").write_text("finished")
    with begin(tmp_path, LOST if ended else "no such sample") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "2 of 3 ranks" not in err


def test_the_wait_has_an_end(tmp_path):
    leave(tmp_path, 1)
    began = time.monotonic()
    wait_for_word(tmp_path / "failures", 1, 3, SignalFlag(), lambda: False, limit_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5
