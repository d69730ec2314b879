"""The first command on a cluster: what it says when all is well, and when something is not."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tells import tells
from tests.train.forked import Forked, places
from torchdistpackage.cli import comm, comm_ranks
from torchdistpackage.cli.main import main
from torchdistpackage.errors import AbsentError, CommError

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "gpt_tiny.yaml")
SAID = "all groups deliver what was sent"
HERE = "tests.cli.test_comm"


def rows(shown: str) -> dict[str, list[str]]:
    """Of the table: group kind -> groups, ranks in each, operations."""
    found = re.findall(r"^(\w[\w, ]*?)  +(\d+)  +(\d+)  +(\d+)  +[\d.]+$", shown, re.M)
    return {name: counts for name, *counts in found}


def test_it_lists_what_was_tested_over_which_groups(forks, capfd):
    assert main(["comm", "test", "--axes", "data=2,context=2", "--pairs"]) == 0
    shown = capfd.readouterr()
    assert shown.out.startswith("4 ranks: data=2 x context=2\n\ngroup")
    assert rows(shown.out) == {
        "data": ["2", "2", "15"],
        "context, model": ["2", "2", "15"],
        "global": ["1", "4", "15"],
        "all pairs": ["6", "2", "3"],
    }
    assert shown.out.splitlines()[-1].startswith(f"{SAID} (")
    assert shown.err == ""


@pytest.mark.full
def test_the_groups_of_a_configuration(capfd):
    words = ["comm", "test", TINY, "parallel.pipe=1", "parallel.tensor=2", "--pairs"]
    assert main(words) == 0
    shown = capfd.readouterr().out
    assert "tensor" in shown and SAID in shown


@pytest.mark.full
def test_one_rank_has_nothing_to_test(capfd):
    assert main(["comm", "test", "--procs", "1"]) == 0
    assert capfd.readouterr().out.startswith("1 rank: data=1\n\none rank has no group to test")


def stopped_rank(pairs: bool, timeout_s: float) -> object:
    """Rank 1 stops for good, when all have come."""
    from torchdistpackage.comm import primitives
    from torchdistpackage.harness.comm_test import run_comm_test

    primitives.barrier()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return run_comm_test(pairs, timeout_s)


def test_a_stopped_rank_is_named_once_and_all_ranks_end(forks, monkeypatch, capfd):
    monkeypatch.setattr(comm, "_TEST", f"{HERE}:stopped_rank")
    assert main(["comm", "test", "--axes", "data=3", "--timeout", "3"]) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("tdp: 1 check failed:\n  the roll call over")
    assert "look at the log of rank 1 on " in said.err and "same groups" not in said.err
    assert tells(said.err, "rank 1", "3 failed")
    assert "Traceback" not in said.err


def damaged_rank(pairs: bool, timeout_s: float) -> object:
    """Rank 1 changes what it gathers."""
    from torchdistpackage.comm import primitives
    from torchdistpackage.harness.comm_test import run_comm_test

    right = primitives.all_gather
    if os.environ["RANK"] == "1":
        primitives.all_gather = lambda x, *rest: right(x, *rest) + 1
    return run_comm_test(pairs, timeout_s)


BROKEN_UNDER_A_LAUNCHER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from torchdistpackage.cli import comm
from torchdistpackage.cli.main import main
comm._TEST = "{HERE}:damaged_rank"
sys.exit(main(["comm", "test"]))
"""


def stuck_at_its_end() -> int:
    comm._TEST = f"{HERE}:damaged_rank"
    try:
        return main()
    finally:
        time.sleep(100)  # as an abort of communicators that waits for a stuck thread


def test_a_rank_of_a_launcher_that_failed_ends_when_it_has_said_so(pool, tmp_path):
    ranks = [
        Forked(pool.server, tmp_path / f"said{rank}", ["comm", "test"], place, stuck_at_its_end)
        for rank, place in enumerate(places(2))
    ]
    said = [rank.communicate(60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert sum(text.count("tdp: 2 checks failed") for text in said) == 1


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.full
def test_under_a_launcher_rank_0_has_the_table():
    run = torchrun("-m", "torchdistpackage", "comm", "test")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(SAID) == 1
    assert run.stdout.startswith("2 ranks: data=2\n")


@pytest.mark.full
def test_under_a_launcher_the_culprit_is_named_once(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN_UNDER_A_LAUNCHER, encoding="utf-8")
    run = torchrun(str(script))
    assert run.returncode == 1
    assert run.stderr.count("tdp: 2 checks failed") == 1
    assert (
        run.stderr.count("all_gather of bfloat16 over the data group of ranks [0, 1]: rank 1") == 1
    )


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (
            ["--axes", "data=2,pipe=2", "--procs", "6"],
            ["is 4 ranks, but the world has 6"],
        ),
        (["--axes", "data=auto"], ["the size of data is left open", "give --procs"]),
        ([], ["give CONFIG, --axes or --procs"]),
        (
            ["--axes", "dta=2,pipe,pipe=0,tensor=2,tensor=2"],
            [
                "4 problems in tdp comm",
                "--axes dta=2: there is no axis 'dta'; did you mean data?",
                "--axes pipe: write an axis as AXIS=N",
                "pipe needs a whole number of ranks, 1 or more, or auto; got '0'",
                "axis tensor is given twice",
            ],
        ),
        ([TINY, "--axes", "zero=2"], ["2 problems", "both CONFIG", "'zero'; valid: data"]),
        ([TINY, "optim.lrr=1", "--axes", "data=2"], ["2 problems", "both CONFIG", "optim.lrr"]),
        (["--axes", "data=2", "--timeout", "0"], ["--timeout"]),
        (["--axes", "data=2", "--procs", "0"], ["--procs"]),
        (["none.yaml"], ["no such file"]),
        (
            [TINY, "--procs", "7"],
            [
                "command line: --procs 7: data=2 x pipe=2",
                "needs 4 processes but --procs is 7; pass --procs 4\n",
            ],
        ),
    ],
    ids=str,
)
def test_all_that_is_wrong_is_refused_before_a_process_starts(words, texts, monkeypatch, capsys):
    monkeypatch.setattr(comm_ranks, "run_on_topology", None)
    assert main(["comm", "test", *words]) == 2
    said = capsys.readouterr()
    assert all(text in said.err for text in texts), said.err
    assert not said.out


def test_ranks_that_never_came_are_said_once_with_the_option_that_waits(monkeypatch, capsys):
    waited = []

    def nobody(*_, init_timeout_s, **__):
        waited.append(init_timeout_s)
        raise AbsentError("ranks; launch.init_timeout_s", "rank 0 did not come", speaker=1)

    monkeypatch.setattr(comm_ranks, "run_on_topology", nobody)
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    said = {}
    for rank in "123":
        for name, value in (place | {"RANK": rank}).items():
            monkeypatch.setenv(name, value)
        assert main(["comm", "test", "--axes", "data=4", "--timeout", "3"]) == 1
        said[rank] = capsys.readouterr().err
    assert said["1"].startswith("tdp: rank 0 did not come; ") and "--timeout" in said["1"]
    assert "init_timeout_s" not in said["1"] and said["2"] == said["3"] == ""
    assert waited == [10.0] * 3


@pytest.mark.parametrize("shares", ["true", "false"])
def test_ranks_of_a_file_share_gpus_if_it_says_so(monkeypatch, shares):
    asked = []

    def start(*_, share_gpus, **__):
        asked.append(share_gpus)
        raise CommError("enough")

    monkeypatch.setattr(comm_ranks, "run_on_topology", start)
    words = [TINY, f"launch.share_gpus={shares}"]
    assert main(["comm", "test", *words]) == 1
    assert asked == [shares == "true"]


def test_a_refusal_is_said_by_rank_0_alone(monkeypatch, capsys):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["comm", "test", "--axes", "data=4"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["comm", "test", "--axes", "data=4"]) == 2
    assert tells(capsys.readouterr().err, "data=4", "4 ranks", "2")
