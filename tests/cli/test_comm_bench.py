"""`tdp comm bench` as a shell sees it: figures, files, exit codes, and what is refused."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.cli import comm_ranks
from torchdistpackage.cli.main import main
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.profile import read
from torchdistpackage.harness.bench.report import BenchReport
from torchdistpackage.launch.slurm.run_dir import read_records
from torchdistpackage.run_files import RunDir

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "gpt_tiny.yaml")
QUICK = ["--iterations", "2", "--warmup", "1"]


def test_local_ranks_are_measured_and_all_is_written(forks, tmp_path, capsys):
    files = [tmp_path / "bench.json", tmp_path / "cluster.json"]
    words = ["--axes", "data=2", "--operations", "all_reduce,p2p", "--sizes", "1KiB,64KiB"]
    words += ["--pairs", "--json", str(files[0]), "--profile", str(files[1])]
    assert main(["comm", "bench", *words, *QUICK, "--plots", str(tmp_path / "p")]) == 0
    said = capsys.readouterr().out
    assert tells(said, "2 ranks", "1 host", "2") and "slowest pair: rank 0" in said
    found = json.loads(files[0].read_text())
    assert [(r["operation"], r["size_bytes"]) for r in found["rows"]] == [
        ("all_reduce", 1024),
        ("all_reduce", 65536),
        ("p2p", 1024),
        ("p2p", 65536),
    ]
    assert all(row["verified"] and row["bare_p50_s"] > 0 for row in found["rows"])
    assert {line.operation for line in read(files[1]).lines} == {"all_reduce", "p2p"}
    assert {path.name for path in (tmp_path / "p").iterdir()} == {"bandwidth.data.png", "pairs.png"}


def test_what_is_too_slow_is_named_and_ends_with_1(forks, capsys):
    words = ["--axes", "context=2", "--operations", "broadcast", "--sizes", "1KiB", *QUICK]
    assert main(["comm", "bench", *words, "--min-busbw", "context=1000000"]) == 1
    said = capsys.readouterr()
    assert "too slow: context, node, alone: broadcast over ranks [0, 1] reaches" in said.err
    assert "broadcast" in said.out


def test_one_rank_has_nothing_to_measure(forks, capsys):
    assert main(["comm", "bench", "--axes", "tensor=1,pipe=1", "--pairs"]) == 0
    assert "nothing to measure: no group of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--operations", "gossip"], "there is no operation 'gossip'"),
        (["--dtypes", "float8"], "there is no dtype 'float8'"),
        (["--sizes", "0"], "size '0' is 0 bytes"),
        (["--sizes", "much"], "'much' is not a size"),
        (["--over", "tensor"], "there is no group 'tensor' in data=2"),
        (["--min-busbw", "tensor=1"], "over tensor; name one of the measured axes: data"),
        (["--min-busbw", "pairs=1"], "add --pairs"),
        (["--min-busbw", "fast"], "write GB/s"),
        (["--json", "/nowhere/a.json"], "/nowhere/a.json cannot be written"),
        (["--json", "/proc/a.json"], "/proc/a.json cannot be written"),
        (["--plots", __file__], "cannot be written"),
        (["--sizes", "64KiB", "--profile", "p.json"], "a profile needs times at two sizes"),
        (["--operations", "allreduce"], "did you mean all_reduce?"),
        (["--min-busbw", "data=1,tensor=2"], "nothing is measured over tensor"),
        (["--procs", "3"], "3"),
        ([TINY], "give only one"),
        (["--slurm", TINY], "remove --axes"),
        (["--iterations", "0"], "--iterations"),
    ],
)
def test_a_wrong_request_is_refused_before_a_process_is_started(words, said, capsys, monkeypatch):
    monkeypatch.setattr(comm_ranks, "run_on_topology", lambda *a, **k: pytest.fail("started"))
    assert main(["comm", "bench", "--axes", "data=2", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


def test_without_matplotlib_plots_are_refused_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(comm_ranks, "run_on_topology", lambda *a, **k: pytest.fail("started"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["comm", "bench", "--axes", "data=2", "--plots", str(tmp_path)]) == 2
    assert "plots need matplotlib, which" in capsys.readouterr().err


def test_a_matplotlib_that_does_not_import_is_refused_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(comm_ranks, "run_on_topology", lambda *a, **k: pytest.fail("started"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "matplotlib.py").write_text("raise AttributeError('numpy is another one')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["comm", "bench", "--axes", "data=2", "--plots", str(tmp_path / "p")]) == 2
    assert "cannot be imported (AttributeError: numpy is another one)" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)


def test_what_cannot_be_written_afterwards_takes_no_other_file_and_no_limit_with_it(
    forks, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(BenchReport, "profile", refuse)
    words = ["--axes", "data=2", "--operations", "p2p", "--sizes", "1KiB,4KiB", *QUICK]
    words += ["--min-busbw", "1000000", "--profile", str(tmp_path / "p.json")]
    assert main(["comm", "bench", *words, "--plots", str(tmp_path / "p")]) == 1
    said = capsys.readouterr().err
    assert "too slow: data" in said and "not written: no lines" in said
    assert (tmp_path / "p" / "bandwidth.data.png").exists()


def refuse(report):
    raise ConfigError("no lines")


@pytest.mark.parametrize(
    "words",
    [["--min-busbw", "10"], ["--pairs", "--min-busbw", "pairs=1"], ["--profile", "p.json"]],
    ids=" ".join,
)
def test_a_limit_or_profile_of_one_rank_is_refused(words, capsys, monkeypatch):
    monkeypatch.setattr(comm_ranks, "run_on_topology", lambda *a, **k: pytest.fail("started"))
    assert main(["comm", "bench", "--axes", "data=1", *words]) == 2
    said = capsys.readouterr().err
    assert "nothing is measured at all" in said or "one rank has no link to measure" in said


@pytest.mark.full
def test_ranks_of_a_launcher_are_joined_and_the_first_one_speaks(tmp_path):
    """As under torchrun: two processes that were started by somebody else."""
    words = ["comm", "bench", "--axes", "pipe=2", "--operations", "p2p", "--sizes", "64", *QUICK]
    command = [sys.executable, "-m", "torchdistpackage", *words, "--min-busbw", "1000000"]
    env = os.environ | {"TDP_STORE": str(tmp_path / "store"), "MASTER_ADDR": "127.0.0.1"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            command,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    (first, first_err), (second, second_err) = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 0], first_err + second_err
    assert "gloo on 2 ranks" in first and "too slow: pipe" in first_err
    assert (second, second_err) == ("", "")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """Where a user stands who has run.yaml and a Slurm that takes every job."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"sbatch": "echo 41", "squeue": "exit 1", "sacct": "exit 1"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "run.yaml").write_text(
        "run: {name: one}\nparallel: {data: auto, pipe: 2}\n"
        "launch: {slurm: {nodes: 2, ntasks-per-node: 2}}\n"
    )
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(folder)
    return folder


def test_as_a_job_the_bench_is_the_command_of_the_tasks(work, capsys):
    words = ["--slurm", "run.yaml", "launch.slurm.time=5", "--sizes", "1KiB:4KiB", "--pairs"]
    words += ["--operations", "p2p,broadcast", "--min-busbw", "pipe=2", "--over", "pipe"]
    assert main(["comm", "bench", *words]) == 0
    files = RunDir(work / "runs" / "one-bench")
    said = capsys.readouterr().out
    assert said.startswith(f"job 41  {files.run}\non 2 nodes x 2 tasks; ")
    for path in (files.run / "bench.json", files.run / "profile.json", files.main_log):
        assert str(path) in said
    script = files.script.read_text()
    command = (
        f"{shlex.quote(sys.executable)} -u -P -m torchdistpackage comm bench --operations "
        f"p2p,broadcast --dtypes float32 --sizes 1KiB:4KiB --iterations 20 --warmup 3 "
        f"--isolated 2 --axis pipe "
        f"--timeout 60 --pairs --min-busbw pipe=2 --run-folder {files.run} "
    )
    assert f'    {command}"$_tdp_run/job/config.yaml"\n' in script
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --time=5\n" in script
    assert "name: one-bench" in files.config.read_text()
    (noted,) = read_records(files.records)
    assert noted.job == "41"


def test_in_a_container_it_is_the_python_that_is_there(work):
    words = ["launch.slurm.container=apptainer exec x.sif", "--sizes", "4"]
    assert main(["comm", "bench", "--slurm", "run.yaml", *words]) == 0
    script = RunDir(work / "runs" / "one-bench").script.read_text()
    assert "    python -u -P -m torchdistpackage comm bench --operations" in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch.slurm.nodes=3", "parallel.data=2"], "must use all 6 ranks but uses 4"),
        (["--axis", "rows"], "there is no group 'rows'"),
        (["--json", "x.json"], "remove --axes, --procs, --json"),
    ],
)
def test_a_job_that_cannot_be_is_not_submitted(work, words, said, capsys):
    assert main(["comm", "bench", "--slurm", "run.yaml", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (work / "runs").exists()
