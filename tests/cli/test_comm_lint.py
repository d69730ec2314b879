"""`tdp comm lint`: what it proves is printed, what it finds ends in code 1 with both stacks."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tells import tells
from tests.train.forked import Forked
from torchdistpackage.cli.main import main
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp import naive_ddp

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comm_lint.md"
COMMANDS = re.findall(r"^tdp (comm lint .*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
PROVED = "proved: every group sees one order of calls, and no ranks deadlock"
OWN = """
import torch
from torch import nn
from torch.nn.functional import mse_loss as loss

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

class Data:
    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        return torch.ones(per_rank, 4), torch.ones(per_rank, 4)
"""
SMALL = {
    "parallel": {"data": 2, "pipe": 2},
    "model": {"layers": 2, "dim": 16, "heads": 2, "vocab": 257, "tied": True},
    "data": {
        "target": "tests.train.sources:UnevenTokens",
        "args": {"seq_len": 8, "vocab": 257},
        "seq_len": 8,
        "global_batch": 8,
    },
    "pipeline": {"microbatches": 2},
}


@pytest.fixture
def small(tmp_path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_a_small_run_is_run(small, capsys):
    assert main(["comm", "lint", small]) == 0
    head, ran = capsys.readouterr().out.split("two steps, 4 threads as ranks")
    assert "4 ranks: data=2 x pipe=2" in head
    assert re.search(r"^  pipe +2 groups of 2  ", ran, re.MULTILINE)
    assert re.search(r"^  global +1 group of 4  ", ran, re.MULTILINE)
    assert ran.count("orders agree") >= 3
    assert ran.splitlines()[-1] == f"{PROVED} (in two steps)"


def test_a_large_one_is_shrunk(small, capsys):
    assert main(["comm", "lint", small, "parallel.data=auto", "data.global_batch=512",
                 "--procs", "256"]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "256 ranks: data=128 x pipe=2" in out and tells(out, "16 ranks", "data=8", "pipe=2")
    assert "two steps, 16 threads as ranks" in out


def test_only_its_groups_are_made_if_asked(small, capsys):
    assert main(["comm", "lint", small, "--no-run"]) == 0
    out = capsys.readouterr().out
    assert PROVED not in out and "threads" not in out
    said = " ".join(out.split())
    assert "proved: all ranks create the groups in one order" in said
    assert "not proved: the calls of a step" in said and "--run" in said


def test_a_disagreement_is_code_1_and_a_wrong_file_code_2(small, capsys, monkeypatch):
    made = naive_ddp.Reducer

    def reducer(*args, **options):
        found = made(*args, **options)
        if tpc.get_pp_rank():
            launch, last = found._launch, found.num_buckets - 1
            monkeypatch.setattr(found, "_launch", lambda b: launch(last - b))
        return found

    monkeypatch.setattr(naive_ddp, "Reducer", reducer)
    capsys.readouterr()
    assert main(["comm", "lint", small]) == 1
    out = capsys.readouterr().out
    assert "stack of rank" in out and "bucket_comm.py" in out and "proved" not in out
    assert main(["comm", "lint", small, "--procs", "5"]) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.full) if "--procs 4096" in c else c for c in COMMANDS],
)
def test_the_commands_of_the_page_are_accepted(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command, comments=True)) == 0, capsys.readouterr().err
    assert PROVED in capsys.readouterr().out


def test_the_page_shows_commands():
    assert len(COMMANDS) == 3


def beside(folder: Path) -> list[str]:
    """How to lint a model, a loss and data that stand beside the file."""
    (folder / "beside.py").write_text(OWN)
    (folder / "own.yaml").write_text(
        """
        parallel: {data: 1, pipe: 2}
        pipeline: {microbatches: 2}
        model: {target: "beside:model", loss: "beside:loss"}
        data: {target: "beside:Data", global_batch: 2}
        """
    )
    return ["comm", "lint", "own.yaml", "--run"]


def by_script(folder: Path) -> subprocess.CompletedProcess[str]:
    # the script that pip makes: `python -m` would have the working folder on its path
    return subprocess.run(
        [Path(sys.executable).with_name("tdp"), *beside(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_modules_beside_where_it_is_called_are_found(pool, tmp_path, monkeypatch):
    """By a process that has not been there before."""
    monkeypatch.chdir(tmp_path)
    lint = Forked(pool.server, tmp_path / "said", beside(tmp_path), {})
    said, _ = lint.communicate(100)
    assert lint.returncode == 0, said
    assert "two steps, 2 threads as ranks" in said and PROVED in said


@pytest.mark.full
def test_the_script_finds_modules_beside_where_it_is_called(tmp_path):
    done = by_script(tmp_path)
    assert done.returncode == 0, done.stderr
    assert PROVED in done.stdout


@pytest.mark.full
def test_the_snapshot_of_a_job_wins_over_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TDP_CODE", str(tmp_path / "empty"))
    done = by_script(tmp_path)
    assert done.returncode == 2 and str(tmp_path / "empty") in done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.target=nowhere:Data", "data.target nowhere:Data cannot be loaded: ModuleNotFound"),
        ("data.target=beside:Date", "data.target beside:Date cannot be loaded"),
        ("model.target=broken:model", "broken.py:1)"),
        ("model.loss=beside:lost", "model.loss beside:lost cannot be loaded"),
        ("data.args={a: 1}", "data.target beside:Data cannot be made with data.args {'a': 1}"),
        ("data.target=beside:model", "without a batch(...) method"),
    ],
)
def test_what_cannot_be_loaded_is_code_2_by_its_name(tmp_path, monkeypatch, capsys, change, said):
    (tmp_path / "beside.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("x = undefined\n")
    config = SMALL | {
        "model": {"target": "beside:model", "loss": "beside:loss"},
        "data": {"target": "beside:Data", "global_batch": 8},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    assert main(["comm", "lint", "own.yaml", "--run", change]) == 2
    assert said in capsys.readouterr().err


def test_under_a_launcher_one_rank_speaks(small, capsys, monkeypatch):
    for rank in (0, 1):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 1,
                            "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "localhost"}.items():  # fmt: skip
            monkeypatch.setenv(name, str(value))
        assert main(["comm", "lint", small, "--no-run"]) == 0
        assert bool(capsys.readouterr().out) == (rank == 0)
