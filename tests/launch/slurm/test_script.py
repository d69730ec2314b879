"""The batch script, run by bash with stand-ins for Slurm's commands that note their words."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torchdistpackage.config.load import loads
from torchdistpackage.launch.requeue import NOT_BACK, STOPPED
from torchdistpackage.launch.slurm.batch_job import BatchJob, CodePaths
from torchdistpackage.launch.slurm.files import JobFiles
from torchdistpackage.launch.slurm.job import batch_job, preview
from torchdistpackage.launch.slurm.script import directive, setup_lines, text, verdict_lines
from torchdistpackage.launch.slurm.sweep import Sweep

ODD = '/shared/my run\'s "x" $HOME 100%/runs'
STUB = """#!/bin/bash
printf '%s\\0' "$(basename "$0")" "$@" >>"$NOTED"
printf '\\n' >>"$NOTED"
case $(basename "$0") in
srun)
    case $* in *" true") exit "${CHECK_CODE:-0}" ;; esac
    env >"$NOTED.env"
    printf '%s' "$PWD" >"$NOTED.cwd"
    [ -z "$WORD" ] || echo "$WORD" >"$RUN/job/decision.7.${SLURM_RESTART_COUNT:-0}"
    exit "${SRUN_CODE:-0}"
    ;;
squeue)
    [ -z "$WARNING" ] || echo "$WARNING" >&2
    answer=${STATE-RUNNING None}
    case $* in *%e*) answer=$END ;; esac
    for format in "$@"; do :; done
    format=${format#--format=}
    [ -z "$answer" ] || echo "${format%%=*}=$answer"
    ;;
sbatch) env >"$NOTED.sbatch"; echo "${NEXT:-8}" ;;
scontrol) exit "${SCONTROL_CODE:-0}" ;;
python) exit "${VERDICT:-3}" ;;
esac
"""


def job_of(
    options: str = "{}", run: Path | None = None, degrees: str = "data: 4", **more
) -> BatchJob:
    config = loads(
        f"run: {{name: one}}\nparallel: {{{degrees}}}\ndata: {{global_batch: 48}}\n"
        f"pipeline: {{microbatches: 1}}\nlaunch: {{slurm: {options}}}",
        overrides=more.pop("overrides", ()),
        job=True,
    )
    folder = run or Path(ODD, "one")
    code = CodePaths(f"{folder}/code/abc", (f"{folder}/code/abc/tree", "/other"), f"{folder}/here")
    return batch_job(config, [folder], Path("/home/me"), code, "/venv/bin/python", "login", **more)


def lines(job: BatchJob) -> list[str]:
    return [line for line in text(job).splitlines() if line.startswith("#SBATCH")]


@pytest.fixture
def bash(tmp_path: Path):
    """`bash(job, WORD=...)` runs the script in a job 7 of its own; what it did, for the asking."""

    class Ran:
        folder = tmp_path / "runs" / "my run"
        noted = tmp_path / "noted"

        def __init__(self) -> None:
            self.commands = tmp_path / "bin"
            self.commands.mkdir()
            for name in ("srun", "squeue", "sbatch", "scontrol", "python", "sleep"):
                (self.commands / name).write_text(STUB)
                (self.commands / name).chmod(0o755)
            JobFiles(self.folder).job.mkdir(parents=True)

        def __call__(self, job: BatchJob, *args: str, **env: str) -> subprocess.CompletedProcess:
            script = tmp_path / "job.sbatch"
            script.write_text(text(replace(job, python=("python",))))
            self.noted.unlink(missing_ok=True)
            done = subprocess.run(
                ["bash", str(script), *args],
                env={
                    "PATH": f"{self.commands}:/usr/bin:/bin",
                    "NOTED": str(self.noted),
                    "RUN": str(self.folder),
                    "WORD": "finished well",
                    "END": "2030-01-01T00:00:00",
                    "SLURM_JOB_ID": "7",
                    "SLURM_JOB_NODELIST": "n[1-2]",
                    **env,
                },
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert done.stderr == "" or env.get("WARNING", "\n") in done.stderr
            return done

        def words(self, command: str) -> list[list[str]]:
            rows = [line.split("\0")[:-1] for line in self.noted.read_text().splitlines()]
            return [row[1:] for row in rows if row[0] == command]

        def env(self, of: str = "env") -> dict[str, str]:
            text = Path(f"{self.noted}.{of}").read_text()
            return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    return Ran()


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
    sweep = replace(job, is_array=True, runs=(*job.runs, "/x"))
    for script in (text(job), text(sweep), "\n".join([*setup_lines(job), *verdict_lines(job)])):
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
    assert "# gpus-per-task=a100:1, by node, so that every task sees all of them" in text(job)
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


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"WORD": "finished all is done"}, 0, "job 7: finished: all is done"),
        ({"WORD": "stop saved; no more"}, STOPPED, "job 7: stop: saved; no more"),
        ({"WORD": "finished x", "SRUN_CODE": "143"}, 0, "finished"),
        ({"WORD": "", "SRUN_CODE": "143"}, 3, ""),
        ({"WORD": "", "SRUN_CODE": "143", "VERDICT": "127"}, 143, ""),
        ({"WORD": "", "SRUN_CODE": "143", "VERDICT": "0"}, 143, ""),
        ({"WORD": ""}, NOT_BACK, "left no word"),
    ],
)
def test_the_exit_code_is_that_of_the_ranks_word(bash, env, code, said):
    done = bash(job_of(run=bash.folder), **env)
    assert (done.returncode, said in done.stdout) == (code, True)
    assert not bash.words("scontrol") and not bash.words("sbatch")


def test_ranks_without_a_word_are_asked_for_a_verdict(bash):
    env = {"WORD": "", "SRUN_CODE": "143", "SLURM_RESTART_COUNT": "2"}
    bash(job_of("{nodes: 2}", bash.folder), **env)
    module = "torchdistpackage.launch.slurm.verdict"
    assert bash.words("python") == [["-m", module, str(bash.folder), "7.2", "143", "4"]]


def test_the_word_of_an_earlier_start_is_not_this_ones(bash):
    (bash.folder / "job" / "decision.7.0").write_text("requeue earlier\n")
    env = {"WORD": "", "SLURM_RESTART_COUNT": "1", "SRUN_CODE": "5"}
    assert bash(job_of(run=bash.folder), **env).returncode == 3
    assert not bash.words("scontrol")


def test_a_requeue_is_asked_for_once_and_only_while_the_job_runs(bash):
    job = job_of(run=bash.folder)
    assert bash(job, WORD="requeue time is up").returncode == 0
    assert bash.words("scontrol") == [["requeue", "7"]]
    for state in ("COMPLETING", "PENDING BeginTime", "CANCELLED", "A_NEW_WORD"):
        done = bash(job, WORD="requeue time is up", STATE=state)
        assert (done.returncode, bash.words("scontrol")) == (NOT_BACK, [])
        assert f"not requeued here, it is {state}" in done.stdout
    done = bash(job, WORD="requeue time is up", SCONTROL_CODE="1")
    assert done.returncode == NOT_BACK and "launch.requeue.mode=chain" in done.stdout


def test_what_slurms_tools_warn_of_is_no_answer(bash):
    warned = {"WARNING": "squeue: error: plugin is old", "STATE": "RUNNING None"}
    assert bash(job_of(run=bash.folder), WORD="requeue time", **warned).returncode == 0
    assert bash.words("scontrol") == [["requeue", "7"]]
    assert int(bash.env()["TDP_JOB_END_S"]) > 1_890_000_000
    chain = job_of(run=bash.folder, overrides=["launch.requeue.mode=chain"])
    assert bash(chain, WORD="chain time", **warned).returncode == 0
    assert len(bash.words("sbatch")) == 1


def test_a_slurm_that_does_not_answer_is_asked_again_and_then_the_job_has_failed(bash):
    done = bash(job_of(run=bash.folder), WORD="requeue time is up", STATE="")
    assert done.returncode == NOT_BACK and not bash.words("scontrol")
    states = [words for words in bash.words("squeue") if not words[-1].endswith("%e")]
    assert len(states) == 6 and len(bash.words("sleep")) == 6


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


@pytest.mark.parametrize("line", ["if true; then", "cat <<EOF", "x='", "}", "fi"])
def test_a_prologue_that_bash_cannot_read_fails_the_job_before_it_runs(bash, line):
    done = bash(job_of(f"{{prologue: {json.dumps([line])}}}", bash.folder), WARNING="job.sbatch")
    assert done.returncode not in (0, STOPPED) and not bash.words("srun")


def test_names_in_messages_are_words_and_no_commands(bash, tmp_path):
    names = [f"x$(touch {tmp_path}/INJ)", "y`touch INJ`", "z'; touch INJ; '", 'w"; touch INJ; "']
    for name in names:
        job = job_of(f"{{modules: [{json.dumps(name)}]}}", bash.folder)
        done = bash(job, WARNING="module")
        assert (done.returncode, f"no module {name}\n" in done.stdout) == (1, True)
    assert not list(tmp_path.rglob("INJ"))


def test_a_chained_job_comes_from_a_clean_environment_and_is_noted(bash):
    job = job_of(run=bash.folder, overrides=["launch.requeue.mode=chain"])
    dirty = {"SBATCH_ACCOUNT": "x", "SLURM_CPU_BIND": "x", "CUDA_VISIBLE_DEVICES": "0"}
    conf = {"SLURM_CONF": "/etc/c", "MINE": "kept"}
    done = bash(job, "5", WORD="chain time is up", NEXT="8;cluster", **dirty, **conf)
    assert done.returncode == 0 and "goes on as job 8" in done.stdout
    script = str(JobFiles(bash.folder).script)
    assert bash.words("sbatch") == [["--parsable", "--dependency=afterany:7", script, "5"]]
    seen = bash.env("sbatch")
    assert not [
        x for x in seen if x.startswith(("SLURM_", "SBATCH_", "TDP_")) and x != "SLURM_CONF"
    ]
    assert (seen["MINE"], seen["SLURM_CONF"]) == ("kept", "/etc/c")
    assert "CUDA_VISIBLE_DEVICES" not in seen
    (line,) = JobFiles(bash.folder).records.read_text().splitlines()
    noted = json.loads(line)
    assert noted.pop("time_s") > 1_600_000_000
    assert noted == {
        "job": "8",
        "via": "sbatch",
        "script": script,
        "nodes": "1",
        "host": "login",
        "code": f"{bash.folder}/code/abc",
    }


def test_a_task_of_an_array_has_its_own_folder_and_id(bash):
    first = job_of(run=bash.folder)
    sweep = Sweep(bash.folder.parent / "one.sweep", 2)
    config = loads(
        "run: {name: one}\nparallel: {data: 4}\nlaunch: {requeue: {mode: chain}}", job=True
    )
    runs = [Path("/elsewhere"), bash.folder]
    job = batch_job(config, runs, Path("/"), first.code, "python", "login", sweep=sweep)
    assert "#SBATCH --array=0-1%2" in lines(job)
    log = str(sweep.folder).replace("%", "%%")
    assert directive("output", f"{log}/%a.log") in lines(job)
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
    bash(job, WORD="requeue time", **array)
    assert bash.words("scontrol") == [["requeue", "6_1"]]
    assert bash.words("srun")[0][-1] == f"{bash.folder}/job/config.yaml"
    bash(job, WORD="chain time", **array)
    expected = ["--parsable", "--dependency=afterany:6_1", "--array=1", str(sweep.script), "7"]
    assert bash.words("sbatch") == [expected]
    assert json.loads(JobFiles(bash.folder).records.read_text())["job"] == "8_1"


def test_a_signal_to_the_script_leaves_it_to_the_ranks(bash):
    """It waits for srun, reads the word, and acts on it."""
    stub = "#!/bin/bash\nkill -USR1 $PPID\nkill -TERM $PPID\nsleep 0.2\n"
    stub += 'echo "finished well" >"$RUN/job/decision.7.0"\n'
    (bash.commands / "srun").write_text(stub)
    done = bash(job_of(run=bash.folder))
    assert (done.returncode, "finished: well" in done.stdout) == (0, True)


def test_outside_of_a_job_it_says_so(tmp_path: Path):
    script = tmp_path / "job.sbatch"
    script.write_text(text(job_of()))
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "submit this file with sbatch" in done.stderr


def test_the_preview_is_the_script_but_for_the_code(tmp_path: Path):
    config = loads("run: {name: one, dir: x/../runs}", job=True)
    shown = preview(config, tmp_path)
    assert f"run={tmp_path}/runs/one\n" in shown
    assert f"export TDP_CODE={tmp_path}/runs/one/code/SNAPSHOT/tree" in shown
    assert sys.executable in shown


ATTEMPTS = """#!/bin/bash
# srun of a job whose ranks die until the attempt named DIES; python decides that all go on
case $(basename "$0") in
srun)
    case $* in *" true") exit "${CHECK_CODE:-0}" ;; esac
    echo "${TDP_ATTEMPT:-none}" >>"$NOTED.attempts"
    own=7.0$([ "$TDP_ATTEMPT" = 0 ] || echo ".$TDP_ATTEMPT")
    [ "$TDP_ATTEMPT" -lt "$DIES" ] || { echo "finished well" >"$RUN/job/decision.$own"; exit 0; }
    [ -z "$TOLD" ] || kill -TERM "$PPID"
    exit 137
    ;;
python)
    printf '%s ' "${@:4}" >>"$NOTED.asked"
    echo >>"$NOTED.asked"
    [ "${7}" -lt 1 ] || echo "again after step 3: killed" >"$RUN/job/decision.$4"
    exit 9
    ;;
esac
"""


@pytest.mark.parametrize(
    ("env", "code", "attempts", "left"),
    [
        ({"DIES": "2"}, 0, "012", "21"),
        ({"DIES": "9"}, 9, "012", "210"),
        ({"DIES": "9", "CHECK_CODE": "1"}, 9, "0", "2"),
        ({"DIES": "9", "TOLD": "1"}, 9, "0", "0"),
    ],
)
def test_ranks_are_started_anew_in_the_job_while_all_is_well(bash, env, code, attempts, left):
    for name in ("srun", "python"):
        (bash.commands / name).write_text(ATTEMPTS)
    job = job_of("{nodes: 2}", bash.folder, overrides=["launch.requeue.in_job_restarts=2"])
    done = bash(job, **env)
    assert done.returncode == code, done.stdout
    assert Path(f"{bash.noted}.attempts").read_text().split() == list(attempts)
    asked = [line.split() for line in Path(f"{bash.noted}.asked").read_text().splitlines()]
    assert [words[-2] for words in asked] == list(left) and asked[0][-1] == "30"
    assert [words[-5] for words in asked] == ["7.0", "7.0.1", "7.0.2"][: len(asked)]
    silent = "not every node starts a task" in done.stdout
    assert silent is ("CHECK_CODE" in env)
    assert (bash.folder / "job" / "decision.7.0").exists() is (len(attempts) > 1)
    assert done.stdout.count("again: after step 3: killed") == len(attempts) - 1
