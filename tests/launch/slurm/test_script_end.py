"""The batch script, run by bash: what it does when the ranks have ended."""

import json
import time
from pathlib import Path

import pytest

from tests.launch.slurm.batch import job_of, lines
from torchdistpackage.config.load import loads
from torchdistpackage.launch.slurm.job import Sweep, batch_job
from torchdistpackage.launch.slurm.requeue import (
    EXIT_REQUEUE_DENIED,
    EXIT_TEMPFAIL,
    NODE_SILENT,
)
from torchdistpackage.launch.slurm.script import directive
from torchdistpackage.run_files import RunDir


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({"WORD": "finished all is done"}, 0, "job 7: finished: all is done"),
        ({"WORD": "stop saved; no more"}, EXIT_TEMPFAIL, "job 7: stop: saved; no more"),
        ({"WORD": "finished x", "SRUN_CODE": "143"}, 0, "finished"),
        ({"WORD": "", "SRUN_CODE": "143"}, 3, ""),
        ({"WORD": "", "SRUN_CODE": "143", "VERDICT": "127"}, 143, ""),
        ({"WORD": "", "SRUN_CODE": "143", "VERDICT": "0"}, 143, ""),
        ({"WORD": ""}, EXIT_REQUEUE_DENIED, "left no decision"),
    ],
)
def test_the_exit_code_is_that_of_the_ranks_word(bash, env, code, said):
    done = bash(job_of(run=bash.folder), **env)
    assert (done.returncode, said in done.stdout) == (code, True)
    assert not bash.words("scontrol") and not bash.words("sbatch")


def test_ranks_without_a_word_are_asked_for_a_verdict(bash):
    env = {"WORD": "", "SRUN_CODE": "143", "SLURM_RESTART_COUNT": "2"}
    bash(job_of("{nodes: 2}", bash.folder), **env)
    module = "torchdistpackage.launch.slurm.failure_report"
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
        assert (done.returncode, bash.words("scontrol")) == (EXIT_REQUEUE_DENIED, [])
        assert f"not requeued here, it is {state}" in done.stdout
    done = bash(job, WORD="requeue time is up", SCONTROL_CODE="1")
    assert done.returncode == EXIT_REQUEUE_DENIED and "launch.requeue.mode=chain" in done.stdout


@pytest.mark.parametrize("mode", ["requeue", "chain"])
def test_a_script_on_a_node_that_was_cut_off_leaves_the_jobs_next_start_alone(bash, mode):
    job = job_of(run=bash.folder, overrides=[f"launch.requeue.mode={mode}"])
    stub = (bash.commands / "squeue").read_text()
    counted = stub.replace("format=${format#", "[ \"$format\" != --Format=restartcnt ] || "
                           "{ echo ' 3   '; exit; }\nformat=${format#")  # fmt: skip
    (bash.commands / "squeue").write_text(counted)
    for count, code in (("2", EXIT_REQUEUE_DENIED), ("3", 0)):
        done = bash(job, WORD=f"{mode} time is up", SLURM_RESTART_COUNT=count)
        assert done.returncode == code, done.stdout
        asked = bash.words("scontrol") + bash.words("sbatch")
        assert len(asked) == (code == 0) and ("was started anew" in done.stdout) is (code != 0)


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
    assert done.returncode == EXIT_REQUEUE_DENIED
    # scontrol was asked too, and not for a requeue
    assert {words[1] for words in bash.words("scontrol")} == {"show"}
    states = [words for words in bash.words("squeue") if not words[-1].endswith("%e")]
    assert len(states) == 6 and len(bash.words("sleep")) == 6


def test_where_squeue_is_refused_scontrol_says_when_the_job_ends_and_how_it_is(bash):
    shown = (
        "JobId=7 JobName=one JobState=RUNNING Reason=None StartTime=2029-12-31T00:00:00 "
        "EndTime=2030-01-01T00:00:00 NodeList=n[1-2] ReqNodeList=(null)\n"
    )
    done = bash(job_of(run=bash.folder), WORD="requeue time is up", STATE="", END="", SHOWN=shown)
    assert done.returncode == 0 and bash.words("scontrol")[-1] == ["requeue", "7"]
    # a day from now by this clock, as the job's end is years after it
    assert 0 < int(bash.env()["TDP_JOB_END_S"]) - time.time() <= 86400


@pytest.mark.parametrize(("early_s", "left_s"), [(-300, 3600), (300, 3300)])
def test_the_end_of_a_job_is_by_the_clock_of_the_node(bash, early_s: int, left_s: int):
    """A late clock would see the end too late; an early one sees it early, which is safe."""
    began_s = time.time() - early_s
    texts = [
        time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(x)) for x in (began_s, began_s + 3600)
    ]
    shown = "JobId=7 JobState=RUNNING Reason=None StartTime={} EndTime={} NodeList=n1\n"
    bash(job_of(run=bash.folder), STATE="", END="", SHOWN=shown.format(*texts))
    assert abs(int(bash.env()["TDP_JOB_END_S"]) - time.time() - left_s) < 30


def test_the_id_of_a_chained_job_is_found_among_lines_of_a_wrapper(bash):
    chain = job_of(run=bash.folder, overrides=["launch.requeue.mode=chain"])
    bash(chain, WORD="chain time", NEXT="Welcome to the cluster\n8;big\nQuota: 9 TB")
    assert json.loads(RunDir(bash.folder).records.read_text())["job"] == "8"


def test_a_chained_job_comes_from_a_clean_environment_and_is_noted(bash):
    job = job_of(run=bash.folder, overrides=["launch.requeue.mode=chain"])
    dirty = {"SBATCH_ACCOUNT": "x", "SLURM_CPU_BIND": "x", "CUDA_VISIBLE_DEVICES": "0"}
    conf = {"SLURM_CONF": "/etc/c", "MINE": "kept"}
    done = bash(job, "5", WORD="chain time is up", NEXT="8;cluster", **dirty, **conf)
    assert done.returncode == 0 and "continues as job 8" in done.stdout
    script = str(RunDir(bash.folder).script)
    assert bash.words("sbatch") == [["--parsable", "--dependency=afterany:7", script, "5"]]
    seen = bash.env("sbatch")
    assert not [
        x for x in seen if x.startswith(("SLURM_", "SBATCH_", "TDP_")) and x != "SLURM_CONF"
    ]
    assert (seen["MINE"], seen["SLURM_CONF"]) == ("kept", "/etc/c")
    assert "CUDA_VISIBLE_DEVICES" not in seen
    (line,) = RunDir(bash.folder).records.read_text().splitlines()
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


@pytest.mark.parametrize(
    ("lines", "code", "said"),
    [
        ("exit 3", 3, "code 3"),
        ("set -e\nfalse", 1, "code 1"),
        ("exit 0", EXIT_REQUEUE_DENIED, "code 0"),
        ("trap 'echo mine' EXIT\nexit 4", 4, "mine"),
        ("set -e\ntrap 'echo mine' EXIT", 0, "mine"),
        ("true", 0, ""),
    ],
)
def test_a_prologue_that_ends_the_job_says_so(bash, lines, code, said):
    job = job_of(f"{{prologue: {json.dumps([lines])}}}", bash.folder)
    done = bash(job)
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert ("before a rank was started" in done.stdout) is said.startswith("code")
    assert bool(bash.words("srun")) is (code == 0)


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
    assert json.loads(RunDir(bash.folder).records.read_text())["job"] == "8_1"


def test_a_signal_to_the_script_leaves_it_to_the_ranks(bash):
    """It waits for srun, reads the word, and acts on it."""
    stub = "#!/bin/bash\nkill -USR1 $PPID\nkill -TERM $PPID\nsleep 0.2\n"
    stub += 'echo "finished well" >"$RUN/job/decision.7.0"\n'
    (bash.commands / "srun").write_text(stub)
    done = bash(job_of(run=bash.folder))
    assert (done.returncode, "finished: well" in done.stdout) == (0, True)


CLOCK = """#!/bin/bash
# each look at the clock is TICK seconds after the one before
case $* in
+%s)
    read -r now 2>/dev/null <"$NOTED.clock" || now=0
    echo $((now + ${TICK:-40})) >"$NOTED.clock"
    echo $((now + ${TICK:-40})) ;;
*) exec /usr/bin/date "$@" ;;
esac
"""
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
        ({"DIES": "9", "CHECK_CODE": "1", "TICK": "300"}, 0, "0", "2"),
        ({"DIES": "9", "CHECK_CODE": "1", "TICK": "300", "MODE": "never"}, 9, "0", "2"),
        ({"DIES": "9", "TOLD": "1"}, 9, "0", "0"),
    ],
)
def test_ranks_are_started_anew_in_the_job_while_all_is_well(bash, env, code, attempts, left):
    for name in ("srun", "python", "sleep", "date"):
        (bash.commands / name).write_text(CLOCK if name == "date" else ATTEMPTS)
        (bash.commands / name).chmod(0o755)
    mode = env.get("MODE", "requeue")
    more = ["launch.requeue.in_job_restarts=2", f"launch.requeue.mode={mode}"]
    job = job_of("{nodes: 2}", bash.folder, overrides=more)
    done = bash(job, **env)
    assert done.returncode == code, done.stdout
    assert Path(f"{bash.noted}.attempts").read_text().split() == list(attempts)
    asked = [line.split() for line in Path(f"{bash.noted}.asked").read_text().splitlines()]
    assert [words[-3] for words in asked] == list(left) and asked[0][-2:] == ["30", "0"]
    assert [words[-6] for words in asked] == ["7.0", "7.0.1", "7.0.2"][: len(asked)]
    silent = f"{NODE_SILENT} within 520 s" in done.stdout
    assert silent is ("CHECK_CODE" in env)
    requeued = silent and mode == "requeue"
    assert (["requeue", "7"] in bash.words("scontrol")) is requeued
    assert (bash.folder / "job" / "decision.7.0").exists() is (len(attempts) > 1 or requeued)
    assert done.stdout.count("again: after step 3: killed") == len(attempts) - 1


ELASTIC = """#!/bin/bash
# of four nodes those named in GONE do not answer after the first attempt; the old step holds what
# it has until the clock, as far as it was looked at, says FREED
read -r now 2>/dev/null <"$NOTED.clock" || now=0
case ${0##*/} in
scontrol)
    case $1 in
    requeue) echo "$2" >>"$NOTED.requeued" ;;
    show) [ "$2" = config ] && echo "SlurmdTimeout           = 90 sec" || printf 'n%s\\n' 1 2 3 4 ;;
    esac ;;
squeue)
    case $* in
    *--steps*) echo "7.1 tdp_ranks"; echo "7.2 sh"; exit 0 ;;
    *%N*) echo "tdp=n[1-4]" ;;
    *%T*) echo "tdp=RUNNING None" ;;
    esac ;;
scancel) echo "$*" >>"$NOTED.cancelled" ;;
srun)
    for word in "$@"; do case $word in --nodelist=*) list=${word#*=} ;; esac; done
    case $* in
    *" --gres=none "*" true")
        case $GONE in *"$list"*) exit 1 ;; esac
        # the first answer is an error of any kind
        [ -e "$NOTED.asked.$list" ] && exit 0; touch "$NOTED.asked.$list"; exit 1 ;;
    *" --mem=0 "*" true") exit "${SHARED:-0}" ;;
    *" true") [ "$now" -ge "${FREED:-0}" ]; exit ;;
    *" guard 7 n1 "*) echo "$list" >>"$NOTED.guards"; exit 0 ;;
    *cli.standby*)
        [ -n "$STANDBY" ] || exit 1
        printf 'ready n%s\\n' 1 2 3 4
        while read -r word start nodes more; do
            case $word in
            who) for node in n1 n2 n3 n4; do
                case " $GONE " in *" $node "*) ;; *) echo "here $start $node" ;; esac
            done ;;
            run) echo "standby $nodes $more" >>"$NOTED.attempts"
                [ -n "$FAILS" ] || echo "finished well" >"$RUN/job/decision.$start"
                for node in ${nodes//,/ }; do echo "done $start $node ${FAILS:-0}"; done ;;
            end) echo "$start" >>"$NOTED.ended" ;;
            esac
        done
        exit 0 ;;
    esac
    shared=; case $* in *" --overlap --mem=0 "*) shared=" shared" ;; esac
    echo "$1 $2 $list$shared" >>"$NOTED.attempts"
    [ "$TDP_ATTEMPT" = 0 ] || { echo "finished well" >"$RUN/job/decision.7.0.1"; exit 0; }
    [ -z "$STANDBY" ] || /bin/sleep 0.5  # they have imported all by now
    exit 137
    ;;
python)
    [ -n "$STOP" ] || [ "$7" -lt 1 ] || echo "again after step 3: lost" >"$RUN/job/decision.$4"
    exit 9
    ;;
esac
"""


def elastic(bash, *more: str, nodes: str = "1-4", degrees: str = "data: 4", **env: str):
    """An elastic job of four nodes, run by bash; what it tried, one line a start."""
    for name in ("srun", "python", "scontrol", "squeue", "scancel", "sleep", "date"):
        (bash.commands / name).write_text(CLOCK if name == "date" else ELASTIC)
        (bash.commands / name).chmod(0o755)
    span = ["launch.elastic.nodes=[1, 4]"] if nodes == "1-4" else []
    more = ("launch.requeue.in_job_restarts=1", *span, *more)
    job = job_of("{ntasks-per-node: 1}", bash.folder, degrees, overrides=more)
    found = lines(job)
    assert {f"#SBATCH --nodes={nodes}", "#SBATCH --no-kill", "#SBATCH --mincpus=1"} <= set(found)
    assert not [line for line in found if "tasks" in line], "Slurm would give the fewest nodes"
    node = {"SLURM_JOB_NUM_NODES": "4", "SLURMD_NODENAME": "n1"}
    done = bash(job, **node, **env)
    return done, Path(f"{bash.noted}.attempts").read_text().splitlines()


@pytest.mark.parametrize(
    ("gone", "then"),
    [
        ("n2", "--nodes=3 --ntasks=3 n1,n3,n4 shared"),
        ("n1 n4", "--nodes=2 --ntasks=2 n2,n3 shared"),
        ("none", "--nodes=4 --ntasks=4 n1,n2,n3,n4"),
        ("n1 n2 n3 n4", None),
    ],
)
def test_an_elastic_job_goes_on_with_the_nodes_that_answer(bash, gone, then):
    done, attempts = elastic(bash, GONE=gone)
    assert done.returncode == 0, done.stdout
    assert attempts == ["--nodes=4 --ntasks=4 ", *([then] if then else [])]
    # Slurm's 90 s and a third, and two minutes for the end of the step
    assert (f"{NODE_SILENT} within 240 s" in done.stdout) is (then is None)
    assert Path(f"{bash.noted}.requeued").exists() is (then is None)
    assert set(Path(f"{bash.noted}.cancelled").read_text().split()) == {"--signal=KILL", "7.1"}
    left = then.split()[2].split(",") if then else []
    guards = ["n2", *[node for node in left if node != "n1"][:1]]
    assert Path(f"{bash.noted}.guards").read_text().split() == guards, "beside the first node"


@pytest.mark.parametrize(
    ("env", "then", "requeued"),
    [
        ({"FREED": "9999"}, "--nodes=4 --ntasks=4 n1,n2,n3,n4 shared", False),
        ({"FREED": "9999", "SHARED": "1"}, None, True),
    ],
)
def test_an_elastic_job_shares_with_the_old_step_and_is_else_requeued(bash, env, then, requeued):
    done, attempts = elastic(bash, GONE="none", **env)
    assert done.returncode == 0, done.stdout
    assert attempts[1:] == ([then] if then else [])
    assert Path(f"{bash.noted}.requeued").exists() is requeued
    decision = (bash.folder / "job" / "decision.7.0").read_text()
    assert decision.startswith("requeue after step 3: lost; " if requeued else "again")


@pytest.mark.parametrize(
    ("gone", "then"), [("n2", "n1,n3,n4 shared"), ("none", "n1,n2,n3"), ("n2 n4", None)]
)
def test_a_spare_node_takes_the_place_of_a_lost_one(bash, gone, then):
    """With two nodes lost the three that ranks need are not left, and the job is requeued."""
    changes = ("launch.spares=1", "launch.slurm.nodes=3")
    done, attempts = elastic(bash, *changes, nodes="4", degrees="data: 3", GONE=gone)
    assert done.returncode == 0, done.stdout
    shape = "--nodes=3 --ntasks=3"
    assert attempts == [f"{shape} n1,n2,n3", *([f"{shape} {then}"] if then else [])]
    assert Path(f"{bash.noted}.requeued").exists() is (then is None)


def test_a_node_that_is_to_blame_is_left_out_though_it_answers(bash):
    (bash.folder / "job").mkdir(exist_ok=True)
    (bash.folder / "job" / "left_out.7.0").write_text("n2\n")
    changes = ("launch.spares=1", "launch.slurm.nodes=3")
    done, attempts = elastic(bash, *changes, nodes="4", degrees="data: 3", GONE="none")
    assert done.returncode == 0, done.stdout
    shape = "--nodes=3 --ntasks=3"
    assert attempts == [f"{shape} n1,n2,n3", f"{shape} n1,n3,n4"], "and not shared"


@pytest.mark.parametrize(
    ("gone", "then"),
    [("n2", "standby n1,n3,n4 1"), ("none", "standby n1,n2,n3 1"), ("n2 n4", None)],
)
def test_standbys_start_the_ranks_again_without_srun(bash, gone, then):
    """Where too few of them answer, nodes are asked by srun as without them."""
    changes = ("launch.spares=1", "launch.slurm.nodes=3")
    done, attempts = elastic(bash, *changes, nodes="4", degrees="data: 3", GONE=gone, STANDBY="1")
    assert done.returncode == 0, done.stdout
    assert attempts[1:] == ([then] if then else [])
    assert Path(f"{bash.noted}.requeued").exists() is (then is None)


def test_ranks_of_standbys_that_fail_are_ended_and_judged_as_those_of_srun(bash):
    changes = ("launch.spares=1", "launch.slurm.nodes=3", "launch.requeue.mode=never")
    env = {"GONE": "n2", "STANDBY": "1", "FAILS": "9"}
    done, attempts = elastic(bash, *changes, nodes="4", degrees="data: 3", **env)
    assert done.returncode == 9, done.stdout
    assert attempts[1:] == ["standby n1,n3,n4 1"]
    assert Path(f"{bash.noted}.ended").read_text().split() == ["7.0.1"]


@pytest.mark.parametrize(
    ("gone", "mode", "code"), [("n2", "requeue", 0), ("n2", "never", 9), ("none", "requeue", 9)]
)
def test_an_elastic_job_without_a_restart_left_is_requeued_only_if_it_lost_a_node(
    bash, gone, mode, code
):
    """As Slurm does with any other job."""
    done, attempts = elastic(bash, f"launch.requeue.mode={mode}", GONE=gone, STOP="1")
    assert (done.returncode, len(attempts)) == (code, 1), done.stdout
    assert Path(f"{bash.noted}.requeued").exists() is (code == 0)


def test_an_elastic_job_leaves_nodes_idle_on_which_no_degrees_do(bash):
    job = job_of("{ntasks-per-node: 1}", bash.folder, overrides=["launch.elastic.nodes=[1, 5]"])
    assert "#SBATCH --no-kill" not in lines(job), "no ranks are started anew in it"
    bash(job, WORD="finished well", SLURM_JOB_NUM_NODES="5")
    assert bash.words("srun")[0][:2] == ["--nodes=4", "--ntasks=4"]
