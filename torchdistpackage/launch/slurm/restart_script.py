"""The lines of a batch script that run the ranks: srun, whose failure it was, and the ranks anew.

An elastic job goes on with the nodes that answer; any other needs all of its nodes again.
"""

import shlex
from textwrap import indent

from torchdistpackage.launch.slurm.job import BatchJob
from torchdistpackage.launch.slurm.requeue import RequeueDecision

IGNORE_SIGNALS_UNTIL_READY = 'trap "" HUP USR1 USR2; exec "$@"'
"""For sh -c: a Python that is still starting would end on a signal that asks it to save."""
_ANSWERS_S = 30
"""Within which a node that is well starts a task."""
_LOOK_S = 30
"""Between two looks whether the first node is still of the job."""


def goes_on_with_fewer(job: BatchJob) -> bool:
    """Whether ranks are started anew on the nodes that are left."""
    return job.config.launch.elastic.nodes is not None and job.restarts_in_job > 0


def srun(job: BatchJob) -> str:
    """The words that start the ranks."""
    of = ("_tdp_nodes", "_tdp_ntasks")
    more = ""
    if goes_on_with_fewer(job):
        of, more = ("_tdp_left_nodes", "_tdp_left_tasks"), ' "${_tdp_only[@]}"'
    stated = (
        f'command srun --nodes="${of[0]}" --ntasks="${of[1]}"{more} '
        f"\\\n    --ntasks-per-node={job.shape.tasks_per_node} "
        f"--cpus-per-task={job.shape.cpus_per_task}"
    )
    lines = [stated, "--mpi=none --kill-on-bad-exit=1"]
    lines += [shlex.join(job.extra("srun"))] if job.extra("srun") else []
    lines.append(f"sh -c '{IGNORE_SIGNALS_UNTIL_READY}' task")
    lines += [shlex.join(job.extra("container"))] if job.extra("container") else []
    lines.append(f'{shlex.join(job.command)} "$_tdp_run/job/config.yaml"')
    return " \\\n    ".join(lines)


def verdict(job: BatchJob, start: str = "_tdp_start", more: str = "") -> tuple[str, str]:
    """Asks who failed first, and ends the shell with that rank's code.

    start: variable with the name of the start. more: words that allow for another start.
    """
    python = shlex.join((*job.extra("container"), *job.python))
    ask = f"""
# No decision: find the rank that failed first; it says more than srun's code.
[ "$_tdp_status" -ne 0 ] || exit 0
{python} -m torchdistpackage.launch.slurm.failure_report \\
    "$_tdp_run" "${start}" "$_tdp_status" "$_tdp_ntasks"{more}
_tdp_said=$?
"""
    end = """
case $_tdp_said in
0 | 126 | 127) exit "$_tdp_status" ;;
*) exit "$_tdp_said" ;;
esac
"""
    return ask.strip("\n"), end.strip("\n")


# A step that was killed holds its memory for a moment, and meanwhile Slurm refuses another at once.
_TRIES = 'for _ in 1 2 3 4 5; do srun "$@" && exit; sleep 2; done; exit 1'
_TRY = f"timeout {_ANSWERS_S} sh -c '{_TRIES}' srun"
_PROBE = f"""
    {_TRY} --nodes="$_tdp_nodes" --ntasks="$_tdp_nodes" --ntasks-per-node=1 \\
        --mpi=none true &
""".strip("\n")
_ALL_ANSWER = """
    if ! wait "$!" || [ "$_tdp_told" -ne 0 ]; then
        _tdp_say "asked to end, or not every node starts a task within {answers_s} s"
        rm -f "$_tdp_run/job/decision.$_tdp_own"
        _tdp_word=
    fi
""".strip("\n")
# Slurm takes a node that it knows to be lost out of the job; of others it only shows when they are
# asked. srun waits for a node that is gone, so each is asked by itself.
_ASK_EACH = f"""
_tdp_answering() {{
    local node
    for node in $(command scontrol show hostnames "$(_tdp_squeue %N)"); do
        {_TRY} --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap \\
            --nodelist="$node" --mpi=none true >&2 && printf '%s\\n' "$node" &
    done
    wait
}}
""".strip("\n")
# Slurm lets the job go on without its first node, too, where nobody would then start ranks or end
# it. srun dies with that node, and its task elsewhere does not.
_GUARD = f"""
_tdp_guarding=
_tdp_guard() {{{{
    local first=${{{{SLURMD_NODENAME:-$(hostname)}}}} other
    [ -z "$_tdp_guarding" ] || kill "$_tdp_guarding" 2>/dev/null
    _tdp_guarding=
    other=$(printf '%s\\n' "$@" | grep -vx -m1 "$first") || return 0
    command srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --mem=0 --gres=none \\
        --nodelist="$other" --mpi=none sh -c '
            while sleep {_LOOK_S}; do
                nodes=$(squeue --noheader --states=running --jobs="$1" --format=%N) || continue
                [ -n "$nodes" ] && names=$(scontrol show hostnames "$nodes") || continue
                printf "%s\\n" "$names" | grep -qx "$2" && continue
                echo "job $1: its first node $2 is lost, so it is {{ended}}" >>"$3"
                {{end}} "$1"
            done' guard "$_tdp_job" "$first" "$_tdp_run/logs/main.log" </dev/null &
    _tdp_guarding=$!
}}}}
IFS=$'\\n' read -r -d '' -a _tdp_list < <(command scontrol show hostnames "$(_tdp_squeue %N)")
_tdp_left_nodes=$_tdp_nodes _tdp_left_tasks=$_tdp_ntasks _tdp_only=()
""".strip("\n")
_PROBE_EACH = "    exec 9< <(_tdp_answering)"
_SOME_ANSWER = """
    _tdp_hosts=$(sort <&9 | paste -sd,)
    exec 9<&-
    IFS=, read -r -a _tdp_list <<<"$_tdp_hosts"
    _tdp_left_nodes=${{_tdp_use[${{#_tdp_list[@]}}]:-0}}
    _tdp_left_tasks=$((_tdp_left_nodes * {tasks}))
    _tdp_list=("${{_tdp_list[@]:0:$_tdp_left_nodes}}")
    _tdp_hosts=$(printf '%s,' "${{_tdp_list[@]}}")
    _tdp_only=("--nodelist=${{_tdp_hosts%,}}")
    if [ "$_tdp_left_nodes" -eq 0 ] || [ "$_tdp_told" -ne 0 ]; then
        _tdp_say "asked to end, or too few nodes start a task within {answers_s} s"
        rm -f "$_tdp_run/job/decision.$_tdp_own"
        _tdp_word=
    else
        _tdp_say "goes on with ${{_tdp_hosts%,}}"
    fi
""".strip("\n")


def again(job: BatchJob, start: str) -> str:
    """The same in a loop: anew in a job that goes on, on nodes that answer, if the verdict says so.

    A signal to this shell says that the job is about to end.
    """
    margin_s = job.config.launch.requeue.margin_s
    ask, end = verdict(job, "_tdp_own", f' "$_tdp_left" {margin_s:g}')
    before, probe, answer = "", _PROBE, _ALL_ANSWER.format(answers_s=_ANSWERS_S)
    if goes_on_with_fewer(job):
        tasks = job.shape.tasks_per_node
        requeues = job.config.launch.requeue.mode == "requeue"
        guard = _GUARD.format(
            ended="requeued" if requeues else "ended",
            end="scontrol requeue" if requeues else "scancel",
        )
        start = f'_tdp_guard "${{_tdp_list[@]}}"\n{start}'
        before = f"{_ASK_EACH}\n{guard}\n"
        probe = _PROBE_EACH
        answer = _SOME_ANSWER.format(tasks=tasks, answers_s=_ANSWERS_S)
        ask = ask.replace('"$_tdp_ntasks"', '"$_tdp_left_tasks"')
    body = f"""
export TDP_ATTEMPT="$_tdp_attempt"
{start}
[ ! -f "$_tdp_run/job/decision.$_tdp_own" ] || exit "$_tdp_status"
_tdp_left=$(({job.restarts_in_job} - _tdp_attempt))
if [ "$_tdp_status" -eq 0 ] || [ "$_tdp_told" -ne 0 ]; then _tdp_left=0; fi
# Both take a while, so at once.
if [ "$_tdp_left" -gt 0 ]; then
{probe}
fi
{ask}
_tdp_word='' _tdp_reason=''
if [ -f "$_tdp_run/job/decision.$_tdp_own" ]; then
    read -r _tdp_word _tdp_reason <"$_tdp_run/job/decision.$_tdp_own"
{answer}
fi
if [ "$_tdp_word" != {RequeueDecision.AGAIN} ]; then
{indent(end, "    ")}
fi
_tdp_say "$_tdp_word: $_tdp_reason"
_tdp_attempt=$((_tdp_attempt + 1))
_tdp_own=$_tdp_start.$_tdp_attempt
""".strip("\n")
    return f"""
{before}_tdp_told=0 _tdp_attempt=0 _tdp_own=$_tdp_start
trap _tdp_told=1 TERM HUP USR1 USR2
while :; do
{indent(body, "    ")}
done
""".strip("\n")
