"""What `tdp submit` prints, writes and refuses, with a stand-in for sbatch and squeue. No torch."""

import os
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.cli.test_secrets import SECRET, VARIABLES
from torchdistpackage.checkpoint.manifest import Manifest
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.disk_room import mount_of
from torchdistpackage.launch.lock import hold
from torchdistpackage.launch.slurm import snapshot
from torchdistpackage.launch.slurm.node_blocklist import NodeIncident, record
from torchdistpackage.launch.slurm.run_dir import read_records
from torchdistpackage.run_files import RunDir

pytestmark = pytest.mark.usefixtures("small_package")
RUN = """
run: {name: one}
parallel: {data: auto, pipe: 2}
launch: {local: {procs: 2}, slurm: {nodes: 2, ntasks-per-node: 2, account: lab}}
"""
SBATCH = """#!/bin/bash
printf '%s\\n' "$@" >>"$NOTED"; echo --- >>"$NOTED"; env >"$NOTED.env"
[ -z "$REFUSED" ] || { echo "sbatch: error: $REFUSED" >&2; exit 1; }
echo 41
"""
SQUEUE = """#!/bin/bash
if [ -n "$STATE" ]; then echo "41|$STATE|0|0|1:00|n1|None|"
else echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with run.yaml, where the user stands; Slurm's commands are stand-ins."""
    commands = tmp_path / "bin"
    commands.mkdir()
    nothing = "#!/bin/bash\nexit 1\n"
    texts = {"sbatch": SBATCH, "squeue": SQUEUE, "sacct": nothing, "sinfo": nothing}
    for name, text in (texts | {"sacctmgr": nothing, "scontrol": nothing}).items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "run.yaml").write_text(RUN)
    (folder / ".gitignore").write_text("runs\n")
    for words in (["init", "-q", "-b", "main"], ["add", "run.yaml"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.chdir(folder)
    return folder


def calls(work: Path) -> list[list[str]]:
    """The words of each call of sbatch."""
    noted = work.parent / "noted"
    text = noted.read_text() if noted.exists() else ""
    return [call.split("\n")[:-1] for call in text.split("---\n")[:-1]]


def test_a_checkpoint_of_another_model_is_refused_before_the_job_queues(work: Path, capsys):
    step = work / "runs" / "one" / "checkpoints" / "step_000003"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(Manifest(3, 0, (), {}, {}).to_json())
    for words in ([], ["--dry-run"]):
        assert main(["submit", "run.yaml", *words]) == 1
        assert f"tdp: {step} is of another model than this run: " in capsys.readouterr().err
    assert calls(work) == [] and [x.name for x in step.parents[1].iterdir()] == ["checkpoints"]
    assert main(["submit", "run.yaml", "--fresh"]) == 0
    assert len(calls(work)) == 1 and not step.exists()


def test_a_run_is_submitted_with_all_that_it_needs(work: Path, capsys):
    assert main(["submit", "run.yaml", "train.steps=500"]) == 0
    said = capsys.readouterr()
    files = RunDir(work / "runs" / "one")
    assert calls(work) == [["--parsable", str(files.script)]]
    env = Path(f"{work.parent / 'noted'}.env").read_text()
    assert "RANK=3" not in env and "SBATCH_ACCOUNT" not in env
    assert "note: not passed on to sbatch: SBATCH_ACCOUNT; write such" in said.err

    assert said.out.startswith(f"job 41  {files.run}\non 2 nodes x 2 tasks; code: no commit")
    assert "tdp jobs show one\n" in said.out
    config = load(files.config, world_size=4)
    assert (config.train.steps, config.parallel.data) == (500, "auto")
    assert config.run.dir == str(work / "runs")
    (noted,) = read_records(files.records)
    assert (noted.job, noted.via, noted.nodes) == ("41", "sbatch", "2")
    assert noted.script == str(files.script)
    assert (Path(noted.code) / "tree" / "run.yaml").read_text() == RUN
    assert f"export TDP_CODE={noted.code}/tree\n" in files.script.read_text()


def test_a_dry_run_prints_the_script_that_would_be_written(work: Path, capsys):
    assert main(["submit", "run.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not (work / "runs").exists() and calls(work) == []
    assert main(["submit", "run.yaml"]) == 0
    assert RunDir(work / "runs" / "one").script.read_text() == shown


def test_what_plan_refuses_is_refused_with_all_its_problems(work: Path, capsys):
    wrong = ["launch.slurm.tim=5", "launch.slurm.nodes=3", "model.dim=129", "optim.lrr=1"]
    for command in ("submit", "plan"):
        assert main([command, "run.yaml", *wrong]) == 2
        said = capsys.readouterr().err
        assert said.startswith("tdp: 4 problems in run.yaml:\n"), said
        assert "did you mean time?" in said and "global_batch=32 is not a multiple" in said
        assert "model.dim=129" in said and "optim.lrr" in said
    assert calls(work) == [] and not (work / "runs").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING"])
def test_a_run_whose_job_is_alive_is_not_submitted_again(work: Path, state, monkeypatch, capsys):
    assert main(["submit", "run.yaml"]) == 0
    monkeypatch.setenv("STATE", state)
    for more in ([], ["--fresh"]):
        assert main(["submit", "run.yaml", *more]) == 1
        assert f"job 41 of the run one is {state};" in capsys.readouterr().err
    assert len(calls(work)) == 1
    monkeypatch.setenv("STATE", "FAILED")
    assert main(["submit", "run.yaml"]) == 0
    assert len(read_records(RunDir(work / "runs" / "one").records)) == 2


def test_a_fresh_start_moves_the_earlier_folder_aside(work: Path, monkeypatch):
    assert main(["submit", "run.yaml"]) == 0
    monkeypatch.setenv("STATE", "COMPLETED")
    (work / "runs/one/metrics.jsonl").write_text("")
    assert main(["submit", "run.yaml", "--fresh"]) == 0
    assert (work / "runs/one.1/metrics.jsonl").exists()
    assert not (work / "runs/one/metrics.jsonl").exists()
    assert len(read_records(RunDir(work / "runs/one").records)) == 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("invalid partition specified: x", "sinfo -s"),
        ("Batch job submission failed: Invalid account or account/partition", "launch.slurm."),
        ("Requested node configuration is not available", "sinfo -o"),
        ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("something new", "`tdp site` finds out"),
    ],
)
def test_what_sbatch_says_is_passed_on_with_what_to_do(work, said, advice, monkeypatch, capsys):
    monkeypatch.setenv("REFUSED", said)
    assert main(["submit", "run.yaml"]) == 1
    err = capsys.readouterr().err
    assert f"sbatch: error: {said}" in err and advice in err
    assert not read_records(RunDir(work / "runs" / "one").records)


def test_no_file_of_a_submission_holds_a_secret_of_the_environment(work, monkeypatch, capsys):
    """A refused one, and the same command again, which Slurm takes."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (work.parent / "bin" / "squeue").write_text("#!/bin/bash\n")  # no job of this user
    for refusal in (f"ask https://me:{SECRET}@portal", ""):
        monkeypatch.setenv("REFUSED", refusal)
        assert main(["submit", "run.yaml"]) == (1 if refusal else 0)
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err
        assert ("the same command submits it again" in printed.err) is bool(refusal)
    files = [path for path in (work / "runs").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_without_slurm_it_says_where_to_go(work: Path, monkeypatch, capsys):
    for path in (work.parent / "bin").iterdir():
        path.unlink()
    path = os.pathsep.join(
        x for x in os.environ["PATH"].split(os.pathsep) if not (Path(x) / "sbatch").exists()
    )
    monkeypatch.setenv("PATH", path)
    assert main(["submit", "run.yaml"]) == 1
    assert "on a login node" in capsys.readouterr().err
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("folder", "why"), [("a:b", "cannot stand in a batch script"), ('"a\\nb"', "wants a path")]
)
def test_a_folder_that_no_script_can_name_is_refused(work: Path, folder: str, why: str, capsys):
    assert main(["submit", "run.yaml", f"run.dir={folder}", "--dry-run"]) == 2
    assert why in capsys.readouterr().err


def test_suspects_are_left_out_and_that_is_said(work: Path, capsys):
    folder = work / "runs"
    folder.mkdir()
    evidence = NodeIncident("n7", "SIGBUS", weight=1.0, time_s=1.0, expires_s=9e9, job="1.0")
    record(folder / "suspects.jsonl", evidence)
    assert main(["submit", "run.yaml", "launch.slurm.exclude=[n1, n2]"]) == 0
    assert calls(work)[0][1] == "--exclude=n1,n2,n7"
    assert "n7: SIGBUS" in capsys.readouterr().err


def test_a_sweep_is_an_array_of_runs_with_folders_of_their_own(work: Path, capsys):
    sweep = ["--sweep", "optim.lr=1e-4,3e-4", "--sweep", "run.seed=1,2", "--parallel", "3"]
    assert main(["submit", "run.yaml", *sweep, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --array=0-3%3\n" in shown and not (work / "runs").exists()
    assert main(["submit", "run.yaml", *sweep]) == 0
    (array,) = (work / "runs").glob("one.sweep-*")
    script = array / "sweep.sbatch"
    assert script.read_text() == shown
    assert calls(work) == [["--parsable", str(script)]]
    assert f"#SBATCH --output={array}/%a.log\n" in shown
    names = [f"one-lr={lr}-seed={seed}" for lr in ("1e-4", "3e-4") for seed in (1, 2)]
    for index, name in enumerate(names):
        files = RunDir(work / "runs" / name)
        config = load(files.config, world_size=4)
        assert (config.run.name, config.run.seed) == (name, index % 2 + 1)
        assert config.optim.lr == (1e-4 if index < 2 else 3e-4)
        (noted,) = read_records(files.records)
        assert (noted.job, noted.script) == (f"41_{index}", str(script))
        (array / f"{index}.log").write_text("x")
        assert files.main_log.read_text() == "x"


def test_every_run_of_a_sweep_is_checked_before_any_is_submitted(work: Path, capsys):
    assert main(["submit", "run.yaml", "--sweep", "model.heads=4,3,5", "optim.lrr=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("optim.lrr") == 1
    assert "model.heads=3" in said and "model.heads=5" in said
    assert main(["submit", "run.yaml", "--sweep", "parallel.data=2,4"]) == 2
    assert calls(work) == [] and not (work / "runs").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--via", "mail"], "--via"),
        (["--sweep", "run.seed=1,2", "--follow"], "--follow"),
        (["--parallel", "2"], "--max-parallel"),
        (["--sweep", "x"], "--sweep x"),
    ],
)
def test_a_wrong_usage_is_refused(work: Path, words: list[str], named: str, capsys):
    assert main(["submit", "run.yaml", *words]) == 2
    assert named in capsys.readouterr().err
    assert calls(work) == []


def test_code_that_is_not_there_is_missed_before_the_queue(work: Path, capsys):
    assert main(["submit", "run.yaml", "model.name=null", "model.target=nopkg.toy:build"]) == 2
    assert "nopkg.toy:build: there is no module nopkg" in capsys.readouterr().err
    assert calls(work) == []
    container = "launch.slurm.container=apptainer exec x.sif"
    words = ["submit", "run.yaml", "model.name=null", "model.target=nopkg.toy:build", container]
    assert main(words) == 0, "in a container it may be there"


def test_of_two_submissions_at_once_one_is_refused(work: Path, capsys):
    """Otherwise both would find the run free, and two jobs write to one folder."""
    run = load("run.yaml")
    with hold(RunDir(work / run.run.dir / run.run.name).lock, "a test"):
        assert main(["submit", "run.yaml"]) == 2
    assert "is under way elsewhere" in capsys.readouterr().err and calls(work) == []
    assert main(["submit", "run.yaml"]) == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("launch.requeue.mode=chain", "launch.requeue.mode=chain: submitit only requeues"),
        ("launch.slurm.time=null", "launch.slurm.time is not set"),
    ],
)
def test_what_submitit_cannot_do_is_refused_before_anything_is_written(
    work: Path, change, said, more, capsys
):
    words = ["submit", "run.yaml", "launch.slurm.time=60", "--via", "submitit", *more]
    words = [w for w in words if w.partition("=")[0] != change.partition("=")[0]]
    assert main([*words, change]) == 2
    assert said in capsys.readouterr().err
    assert calls(work) == [] and not (work / "runs").exists()


def test_a_run_that_somebody_trains_is_not_submitted(work: Path, capsys):
    files = RunDir(work / "runs" / "one")
    with hold(files.run_lock, "the run one"):
        for more in ([], ["--fresh"]):
            assert main(["submit", "run.yaml", *more]) == 2
            assert f"process {os.getpid()}" in capsys.readouterr().err
        assert calls(work) == [] and not files.run.exists()
    assert main(["submit", "run.yaml"]) == 0
    with hold(files.run_lock, "the run one"):
        assert main(["jobs", "show", "one"]) == 0
        assert f"process {os.getpid()}" in capsys.readouterr().out
        assert main(["jobs", "resubmit", "one"]) != 0
    assert len(calls(work)) == 1


def test_a_folder_that_was_made_by_hand_outlives_a_submission_that_is_refused(work: Path, capsys):
    """It may have been made for its striping, its quota or its rights."""
    (work / "runs").mkdir()
    made = (work / "runs").stat().st_ino
    assert main(["submit", "run.yaml", "launch.slurm.files=[nothing]"]) == 1
    with hold(RunDir(work / "runs" / "one").run_lock, "the run one"):
        assert main(["submit", "run.yaml"]) == 2
    assert (work / "runs").stat().st_ino == made and list((work / "runs").iterdir()) == []


@pytest.fixture
def small_disk(work: Path) -> Generator[Path]:
    """The folder of the runs on a file system of its own."""
    runs = work / "runs"
    runs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tdp-tests", str(runs)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield runs
    finally:
        subprocess.run(["umount", str(runs)], check=True)


def test_a_full_disk_refuses_a_submission_and_leaves_nothing_half_made(
    work: Path, small_disk: Path, monkeypatch, capsys
):
    monkeypatch.setenv("STATE", "COMPLETED")
    (snapshot.PACKAGE / "large.py").write_bytes(b"#" * (1 << 20))

    def fill(left_bytes: int) -> None:
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
        (small_disk / "filler").write_bytes(b"x" * (free - left_bytes))

    # a checkpoint of the run takes 24 KiB, its code more than 64
    submit = ["submit", "run.yaml", "model.layers=2", "model.dim=4", "model.heads=1"]
    for left_bytes, code, cause in ((0, 2, "0 B"), (64 << 10, 1, "No space left on device")):
        fill(left_bytes)
        assert main(submit) == code
        said = capsys.readouterr().err
        assert cause in said and str(small_disk) in said
        assert [p.name for p in small_disk.iterdir()] == ["filler"] and calls(work) == []
        (small_disk / "filler").unlink()
    assert main(submit) == 0
    files = RunDir(small_disk / "one")
    before = {p: p.read_bytes() for p in (files.config, files.script, files.records)}
    (work / "run.yaml").write_text(RUN + "train: {steps: 70}\n")
    fill(64 << 10)
    assert main(submit) == 1
    assert {p: p.read_bytes() for p in before} == before
    assert len([*(files.run / "code").iterdir()]) == 1, "what resubmit needs is as it was"


@pytest.mark.full
def test_copies_of_the_code_that_nobody_needs_go_with_a_later_submission(
    work: Path, monkeypatch, capsys
):
    monkeypatch.setenv("STATE", "COMPLETED")
    codes = work / "runs" / "one" / "code"

    def submitted(text: str, days_ago: float) -> str:
        (work / "run.yaml").write_text(f"{RUN}# {text}\n")
        assert main(["submit", "run.yaml"]) == 0
        (noted,) = read_records(RunDir(codes.parent).records)[-1:]
        then = time.time() - days_ago * 86400
        os.utime(noted.code, (then, then))
        return Path(noted.code).name

    old, kept, again = submitted("a", 8), submitted("b", 8), submitted("c", 8)
    newer = submitted("d", 6)
    script = RunDir(codes.parent).script
    (script.parent / "mine.sbatch").write_text(f"PYTHONPATH={codes}/{kept}/tree")
    (codes / f".{old}.host.1.ffff").mkdir()
    (codes / "notes of mine").mkdir()
    for name in (old, kept, again):  # all but the newest were taken away by those behind them
        (codes / name).mkdir(exist_ok=True)
        os.utime(codes / name, (time.time() - 8 * 86400,) * 2)
    assert submitted("c", 0) == again, "used again, so it counts as new"
    assert {p.name for p in codes.iterdir()} == {kept, again, newer, "notes of mine"}


def test_files_that_are_not_there_are_refused_before_the_queue_unless_the_job_fetches_them(
    work: Path, capsys
):
    words = ("submit", "run.yaml", "data.name=text", "data.path=gone")
    assert main([*words]) == 2
    assert "data.path=gone: gone does not exist" in capsys.readouterr().err
    assert calls(work) == [] and not (work / "runs").exists()
    assert main([*words, "launch.slurm.prologue=[mkdir gone]"]) == 0
    (work / "there").mkdir()
    assert main(["submit", "run.yaml", "run.name=two", "data.name=text", "data.path=there"]) == 0
    assert len(calls(work)) == 2


def test_a_run_folder_without_room_for_a_checkpoint_is_refused_with_numbers(work: Path, capsys):
    device = mount_of(work)[0]
    quota = work.parent / "bin" / "quota"
    quota.write_text(f"#!/bin/sh\necho ' {device} 1000 1001 1001 0 10 10 10 0'\n")
    quota.chmod(0o755)
    assert main(["submit", "run.yaml"]) == 2
    error = capsys.readouterr().err
    assert "run.dir" in error and "1 KiB and 0 files" in error and "5 files" in error
    assert calls(work) == [] and not (work / "runs").exists()
    quota.write_text(f"#!/bin/sh\necho ' {device} 1000 0 0 0 10 0 0 0'\n")
    assert main(["submit", "run.yaml"]) == 0 and len(calls(work)) == 1
