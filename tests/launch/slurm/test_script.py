"""The batch script, run by bash: what it asks of Slurm and what its ranks see."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.slurm.batch import job_of, lines
from torchdistpackage.config.load import loads
from torchdistpackage.launch.slurm.job import Sweep, preview
from torchdistpackage.launch.slurm.requeue import EXIT_TEMPFAIL
from torchdistpackage.launch.slurm.script import directive, render, setup_lines, verdict_lines


@pytest.mark.parametrize(
    "options",
    [
        "{}",
        "{nodes: 2-4, ntasks-per-node: 1}",
        '{conda: "my env", modules: [a/1, "b c"], prologue: ["if true; then", "x=1", fi]}',
        "{container: [apptainer, exec, my train.sif], srun: ['--container-image=a b']}",
    ],
)
def test_bash_can_read_it(options: str):
    job = job_of(options, degrees="data: auto" if "nodes" in options else "data: 4")
    sweep = replace(job, sweep=Sweep(Path("/s")), runs=(*job.runs, "/x"))
    for script in (render(job), render(sweep), "\n".join([*setup_lines(job), *verdict_lines(job)])):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_header_says_what_the_file_says_and_what_every_job_needs():
    job = job_of(
        "{partition: gpu, nodes: 2, cpus_per_task: 3, comment: 'a \"b\" \\ c # d', exclusive: true,"
        " mail-type: [END, FAIL], time: 1-00:00:00}"
    )
    assert lines(job) == [
        "#SBATCH --job-name=one",
        "#SBATCH --chdir=/home/me",
        "#SBATCH --nodes=2",
        "#SBATCH --cpus-per-task=3",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --partition=gpu",
        '#SBATCH --comment="a \\"b\\" \\\\ c # d"',
        "#SBATCH --exclusive",
        "#SBATCH --mail-type=END,FAIL",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --signal=USR1@30",
        "#SBATCH --requeue",
        '#SBATCH --output="/shared/my run\'s \\"x\\" $HOME 100%%/runs/one/logs/main.log"',
        "#SBATCH --open-mode=append",
    ]
    assert directive("hold", None) == "#SBATCH --hold"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["launch.requeue.margin_s=200"], {"--signal=USR1@200", "--requeue"}),
        (["launch.requeue.mode=chain"], {"--signal=USR1@30", "--no-requeue"}),
        (["launch.requeue.mode=never"], {"--signal=USR1@30", "--no-requeue"}),
        (["launch.slurm.signal=USR2@300"], {"--signal=USR2@300", "--requeue"}),
        (["launch.requeue.signals=[TERM]"], {"--signal=TERM@30", "--requeue"}),
        (["launch.requeue.signals=[]"], {"--requeue"}),
    ],
)
def test_how_a_job_comes_back(overrides: list[str], expected: set[str]):
    found = {line.split()[1] for line in lines(job_of(overrides=overrides))}
    assert {word for word in found if "signal" in word or "requeue" in word} == expected


def test_gpus_of_a_task_are_asked_for_by_node_so_that_all_stay_visible(bash):
    job = job_of("{nodes: 2, gpus-per-task: 'a100:1'}", bash.folder)
    assert "# gpus-per-task=a100:1, by node, so that every task sees all of them" in render(job)
    assert "#SBATCH --gpus-per-node=a100:2" in lines(job)
    assert not any("gpus-per-task" in line for line in lines(job))


def test_srun_is_told_everything(bash):
    options = (
        "{nodes: 2, cpus-per-task: 3, srun: [-l, '--container-image=a b'],"
        " container: apptainer exec 'my train.sif'}"
    )
    assert bash(job_of(options, bash.folder)).returncode == 0
    ((*words,),) = bash.words("srun")
    assert words == [
        *("--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3"),
        *("--mpi=none", "--kill-on-bad-exit=1", "-l", "--container-image=a b"),
        *("sh", "-c", 'trap "" HUP USR1 USR2; exec "$@"', "task"),
        *("apptainer", "exec", "my train.sif"),
        *("python", "-u", "-P", "-m", "torchdistpackage", "train"),
        f"{bash.folder}/job/config.yaml",
    ]


def test_of_a_range_the_number_of_nodes_is_what_slurm_granted(bash):
    job = job_of("{nodes: 2-4, ntasks-per-node: 2}", bash.folder, "data: auto")
    bash(job, SLURM_JOB_NUM_NODES="3")
    assert bash.words("srun")[0][:3] == ["--nodes=3", "--ntasks=6", "--ntasks-per-node=2"]


def test_what_others_left_behind_reaches_neither_srun_nor_a_rank(bash):
    poison = {
        "SLURM_TRES_PER_TASK": "cpu=9",
        "SLURM_CPUS_PER_TASK": "9",
        "SLURM_CPU_BIND": "x",
        "SRUN_CPUS_PER_TASK": "9",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_GPUS_PER_TASK": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
        "TDP_STORE": "x",
        "PMIX_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "TORCHELASTIC_RUN_ID": "1",
        "LOCAL_RANK": "0",
    }
    bash(job_of(run=bash.folder), PYTHONPATH="/live", MINE="kept", **poison)
    seen = bash.env()
    assert not set(poison) & set(seen)
    assert seen["MINE"] == "kept" and seen["SLURM_JOB_ID"] == "7"
    assert seen["PYTHONPATH"] == f"{bash.folder}/code/abc/tree:/other"
    assert (seen["TDP_BATCH"], seen["TDP_SERIES"]) == ("1", "7")
    assert seen["TDP_CODE"] == f"{bash.folder}/here"
    assert seen["TDP_JOB_END_S"].isdigit() and int(seen["TDP_JOB_END_S"]) > 1_890_000_000


def test_the_prologue_may_set_what_the_ranks_see(bash):
    options = "{prologue: ['set -e', 'export MASTER_PORT=29501', 'PYTHONPATH=/more', 'A=$UNSET']}"
    assert bash(job_of(options, bash.folder)).returncode == 0
    assert bash.env()["MASTER_PORT"] == "29501"
    assert bash.env()["PYTHONPATH"].endswith(":/other:/more")


@pytest.mark.parametrize("end", ["", "NONE", "N/A", "Unknown", "slurm_load_jobs error: no"])
def test_a_job_without_an_end_sets_none(bash, end: str):
    bash(job_of(run=bash.folder), END=end)
    assert "TDP_JOB_END_S" not in bash.env()


PROLOGUES = (
    ("start=$(date +%s)", "run=/elsewhere", "job=8", "word=x", "state=x", "script=/x", "nodes=9"),
    ("say() { exit 4; }", "_tdp_word=x", "_tdp_status=0", "_tdp_state() { echo PENDING; }"),
    ("set -e", "set -u", "set -f"),
    ("trap 'exit 5' ERR", "trap 'exit 6' EXIT", "trap 'exit 7' TERM"),
    ("IFS=0123456789", "cd /"),
    ("srun() { exit 8; }", "squeue() { exit 8; }", "scontrol() { exit 8; }", "sed() { exit 8; }"),
    ("shopt -s expand_aliases", "alias scontrol=false printf=false read=false"),
    ("export SLURM_JOB_ID=9", "unset SLURM_RESTART_COUNT SLURM_JOB_NODELIST"),
    ("exec >/dev/null",),
)


@pytest.mark.few(4)
@pytest.mark.parametrize("lines", PROLOGUES, ids=lambda lines: lines[0])
def test_a_prologue_cannot_keep_a_run_from_coming_back(bash, lines):
    job = job_of(f"{{nodes: 2, prologue: {json.dumps([*lines, 'export MINE=1'])}}}", bash.folder)
    assert bash(job, WORD="requeue time is up").returncode == 0
    assert bash.words("scontrol") == [["requeue", "7"]]
    ((*words,),) = bash.words("srun")
    assert words[:2] == ["--nodes=2", "--ntasks=4"]
    assert words[-1] == f"{bash.folder}/job/config.yaml" and bash.env()["MINE"] == "1"


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["exit 5"], 5),
        (["set -e", "false"], 1),
        (["_tdp_run=/elsewhere"], 1),
        (["_tdp_say() { :; }", "_tdp_nodes=9"], 1),
    ],
)
def test_a_prologue_that_ends_or_takes_a_name_of_the_script_fails_the_job(bash, lines, code):
    done = bash(job_of(f"{{prologue: {json.dumps(lines)}}}", bash.folder), WARNING="readonly")
    assert (done.returncode == code and not bash.noted.exists()) or not bash.words("srun")


@pytest.mark.few(2)
@pytest.mark.parametrize("line", ["if true; then", "cat <<EOF", "x='", "}", "fi"])
def test_a_prologue_that_bash_cannot_read_fails_the_job_before_it_runs(bash, line):
    done = bash(job_of(f"{{prologue: {json.dumps([line])}}}", bash.folder), WARNING="job.sbatch")
    assert done.returncode not in (0, EXIT_TEMPFAIL) and not bash.words("srun")


def test_names_in_messages_are_words_and_no_commands(bash, tmp_path):
    names = [f"x$(touch {tmp_path}/INJ)", "y`touch INJ`", "z'; touch INJ; '", 'w"; touch INJ; "']
    for name in names:
        job = job_of(f"{{modules: [{json.dumps(name)}]}}", bash.folder)
        done = bash(job, WARNING="module")
        assert (done.returncode, f"no module {name}\n" in done.stdout) == (1, True)
    assert not list(tmp_path.rglob("INJ"))


def test_outside_of_a_job_it_says_so(tmp_path: Path):
    script = tmp_path / "job.sbatch"
    script.write_text(render(job_of()))
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "submit this file with sbatch" in done.stderr


def test_the_preview_is_the_script_but_for_the_code(tmp_path: Path):
    config = loads("run: {name: one, dir: x/../runs}", job=True)
    shown = render(preview(config, tmp_path))
    assert f"run={tmp_path}/runs/one\n" in shown
    assert f"export TDP_CODE={tmp_path}/runs/one/code/SNAPSHOT/tree" in shown
    assert sys.executable in shown
