"""The lines of a batch script that run the ranks with srun, find the culprit of a failure and
restart the ranks.

An elastic job continues with the nodes that answer; any other job needs all of its nodes again. The
old step may hold memory for a minute after its tasks have ended, so nodes are asked until Slurm
itself would have declared a lost one dead. If the nodes still do not suffice, the job is requeued.
"""

import shlex
from textwrap import indent

from torchdistpackage.config.elastic import goes_on_without_nodes
from torchdistpackage.launch.slurm.job import BatchJob
from torchdistpackage.launch.slurm.requeue import NODE_SILENT, RequeueDecision

IGNORE_SIGNALS_UNTIL_READY = 'trap "" HUP USR1 USR2; exec "$@"'
"""Prefix for sh -c: without it, a signal that requests a save would kill a Python that is still
starting."""
_ANSWERS_S = 30
"""Seconds within which a healthy node starts a task."""
_LOOK_S = 30
"""Seconds between checks whether the first node still belongs to the job."""
_STEP = "tdp_ranks"
"""Name of the ranks' step, used to end it."""
_STANDBY = "tdp_standby"
"""Name of the step that waits on each node to start ranks again."""
_STANDING_S = 5
"""Seconds within which the first standby answers, and then each further one."""
_SLURMD_TIMEOUT_S = 300
"""Slurm's default for how long a node may be silent, in seconds."""
_REPORTED_S = 3
"""Seconds that ranks and srun get to end after the first report of a failure: `GRACE_S` of the
watchers, and some for srun."""
_LATE_S = 1
"""Seconds for further answers, once as many nodes as are used have answered."""
_LATE_STANDING_S = 0.3
"""The same for standbys, which only have to write a line."""
_SHARES_S = 5
"""Seconds that a step with the memory of the old one is waited for, whose tasks were killed."""
_STEP_ENDS_S = 60
"""Seconds that a step on a live node waits for tasks on other nodes to end, and Slurm for
processes."""


def goes_on_with_fewer(job: BatchJob) -> bool:
    """Return whether the script restarts the ranks on the remaining nodes after a node was lost."""
    return goes_on_without_nodes(job.config) and job.restarts_in_job > 0


def srun(job: BatchJob) -> str:
    """Return the shell command that starts the ranks."""
    of = ("_tdp_nodes", "_tdp_ntasks")
    more = ""
    if goes_on_with_fewer(job):
        of, more = ("_tdp_left_nodes", "_tdp_left_tasks"), ' "${_tdp_only[@]}"'
    stated = (
        f'command srun --nodes="${of[0]}" --ntasks="${of[1]}"{more} '
        f"\\\n    --ntasks-per-node={job.shape.tasks_per_node} "
        f"--cpus-per-task={job.shape.cpus_per_task}"
    )
    in_background = " 6<&- 7>&- &\n_tdp_await $!" if goes_on_with_fewer(job) else ""
    named = f" --job-name={_STEP}" if job.restarts_in_job else ""
    lines = [stated, f"--mpi=none --kill-on-bad-exit=1{named}"]
    lines += [shlex.join(job.extra("srun"))] if job.extra("srun") else []
    lines.append(f"sh -c '{IGNORE_SIGNALS_UNTIL_READY}' task")
    lines += [shlex.join(job.extra("container"))] if job.extra("container") else []
    lines.append(f'{shlex.join(job.command)} "$_tdp_run/job/config.yaml"')
    started = " \\\n    ".join(lines) + in_background
    if not goes_on_with_fewer(job):
        return started
    ours = f"_tdp_run_standing\nelse\n{indent(started, '    ')}"
    return f'if [ -n "$_tdp_standing" ]; then\n    {ours}\nfi'


def _standby(job: BatchJob) -> str:
    """Return the shell command that starts a standby on each node, beside the ranks."""
    tasks = job.shape.tasks_per_node
    lines = [
        'command srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"',
        f"--ntasks-per-node=1 --cpus-per-task={tasks * job.shape.cpus_per_task} --overlap --mem=0",
        f"--mpi=none --no-kill --kill-on-bad-exit=0 --input=all --job-name={_STANDBY}",
    ]
    lines += [shlex.join(job.extra("srun"))] if job.extra("srun") else []
    lines.append(f"sh -c '{IGNORE_SIGNALS_UNTIL_READY}' task")
    lines += [shlex.join(job.extra("container"))] if job.extra("container") else []
    program = shlex.join((*job.python, "-u", "-m", "torchdistpackage.cli.standby"))
    lines.append(f'{program} "$_tdp_run/job/config.yaml"')
    return " \\\n    ".join(lines)


def verdict(job: BatchJob, start: str = "_tdp_start", more: str = "") -> tuple[str, str]:
    """Return shell text that finds the rank that failed first and exits with its code.

    start: variable with the name of the start. more: words that allow another start.
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


# A node or the controller may be busy for a moment, so a refusal is no answer yet.
_TRIES = 'for _ in 1 2 3 4 5 6 7 8; do srun "$@" && exit; sleep 3; done; exit 1'
_COMMON = f"""
_tdp_try() {{ timeout {_ANSWERS_S} sh -c '{_TRIES}' srun "$@" --mpi=none true; }}
# Ranks of the old step may still run, and it holds memory and devices until
# Slurm has ended it on all nodes.
_tdp_end_step() {{
    local step name
    command squeue --noheader --steps --jobs="$_tdp_job" --format='%i %j' |
        while read -r step name; do
            [ "$name" != {_STEP} ] || command scancel --signal=KILL "$step" 2>/dev/null
        done
}}
# How long Slurm may take to find that a node is lost, and to end a step there.
_tdp_patience() {{
    local lost_s
    lost_s=$(command scontrol show config |
        sed -n 's/^SlurmdTimeout *= *\\([0-9]*\\).*/\\1/p')
    [ "${{lost_s:-0}}" -gt 0 ] || lost_s={_SLURMD_TIMEOUT_S}
    echo $((lost_s + lost_s / 3 + 2 * {_STEP_ENDS_S}))
}}
""".strip("\n")
_ALL = """
_tdp_ask() {
    _tdp_end_step
    _tdp_try --nodes="$_tdp_nodes" --ntasks="$_tdp_nodes" --ntasks-per-node=1 &
    _tdp_asking=$!
}
_tdp_ready() { wait "$_tdp_asking"; }
""".strip("\n")


def _some(job: BatchJob) -> str:
    """Return the shell text that starts the ranks of an elastic job, with a shell beside its first
    node.

    Slurm takes a node that it knows to be lost out of the job; of others it only shows when they
    are asked. srun waits for a node that is gone, so each is asked by itself, and for next to
    nothing, as the old step may hold all memory. Those that answer are then asked for what ranks
    need. Slurm lets the job go on without its first node, too, where nobody would then start ranks
    or end it. srun dies with that node, and its task elsewhere does not.
    """
    requeues = job.config.launch.requeue.mode == "requeue"
    enough = max(job.used.values())
    ended, end = ("requeued", "scontrol requeue") if requeues else ("ended", "scancel")
    return f"""
_tdp_answering() {{
    local node
    # Slurm answers when the lost node has, or after a MessageTimeout.
    _tdp_end_step >&2 &
    for node in "$@"; do
        _tdp_try --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --mem=0 \\
            --gres=none --nodelist="$node" >&2 && printf '%s\\n' "$node" &
    done
    wait
}}
_tdp_tell() {{ (trap "" PIPE; printf '%s\\n' "$*" >&7) 2>/dev/null; }}
# Nodes whose standby answers: it has killed what was left of the ranks there.
_tdp_standing_answers() {{
    local word own node num=0 wait={_STANDING_S}
    while IFS=' ' read -r -t "$wait" word own node <&6; do
        [ "$word $own" = "here $_tdp_own" ] || continue
        printf '%s\\n' "$node"
        num=$((num + 1))
        [ "$num" -lt {enough} ] || wait={_LATE_STANDING_S}
    done
}}
_tdp_ask() {{
    local nodes word
    while IFS=' ' read -r -t 0.01 word nodes <&6; do
        [ "$word" != ready ] || _tdp_num_standing=$((_tdp_num_standing + 1))
    done
    _tdp_standing=
    if [ "$_tdp_num_standing" -ge "$SLURM_JOB_NUM_NODES" ] && _tdp_tell "who $_tdp_own"; then
        _tdp_standing=yes _tdp_asked=$SLURM_JOB_NUM_NODES
        _tdp_end_step >&2 &
        exec 9< <(_tdp_standing_answers)
        return
    fi
    nodes=$(command scontrol show hostnames "$(_tdp_squeue %N)")
    _tdp_asked=$(wc -w <<<"$nodes")
    # shellcheck disable=SC2086
    exec 9< <(_tdp_answering $nodes)
}}
_tdp_ready() {{
    local hosts="" node num=0 usable=0 wait={_ANSWERS_S}
    while IFS= read -r -t "$wait" node <&9; do
        num=$((num + 1))
        # Nodes to blame for a failure, of this job or of its restarts.
        ! cat "$_tdp_run/job/left_out.$_tdp_start"* 2>/dev/null | grep -qxF -- "$node" || continue
        hosts+="$node"$'\n'
        usable=$((usable + 1))
        # Where these are enough, one that is lost is not waited for.
        [ "$usable" -lt {enough} ] || wait={_LATE_S}
    done
    exec 9<&-
    # Those of before first: they have the local copies.
    hosts=$(printf '%s' "$hosts" | sort)
    node=$(printf '%s\n' "${{_tdp_list[@]}}")
    hosts=$({{ grep -xF -- "$node" <<<"$hosts"; grep -vxF -- "$node" <<<"$hosts"; }} |
        sed '/^$/d' | paste -sd,)
    IFS=, read -r -a _tdp_list <<<"$hosts"
    _tdp_left_nodes=${{_tdp_use[${{#_tdp_list[@]}}]:-0}}
    _tdp_left_tasks=$((_tdp_left_nodes * {job.shape.tasks_per_node}))
    IFS=$'\n' read -r -d '' -a _tdp_list < <(
        printf '%s\n' "${{_tdp_list[@]:0:$_tdp_left_nodes}}" | sort)
    hosts=$(printf '%s,' "${{_tdp_list[@]}}")
    _tdp_only=("--nodelist=${{hosts%,}}")
    if [ "$_tdp_left_nodes" -le 0 ]; then
        _tdp_num_standing=0
        return 1
    fi
    if [ -n "$_tdp_standing" ]; then
        :
    elif [ "$num" -lt "$_tdp_asked" ] || ! _tdp_fits {_SHARES_S}; then
        # Slurm may never end a step that lost a node, whose tasks on these nodes
        # were killed.
        _tdp_only+=(--overlap --mem=0)
        _tdp_fits {_ANSWERS_S} || return
    fi
    _tdp_say "goes on with ${{hosts%,}}"
}}
_tdp_fits() {{
    timeout "$1" srun --nodes="$_tdp_left_nodes" --ntasks="$_tdp_left_nodes" \\
        --ntasks-per-node=1 "${{_tdp_only[@]}}" --mpi=none true
}}
# srun hears of a lost node from Slurm, after minutes; ranks that lost a peer say
# so at once, and end the others of their nodes.
_tdp_await() {{
    local since= reports=$_tdp_run/job/failures.$_tdp_own/rank*.json
    while kill -0 "$1" 2>/dev/null; do
        sleep 0.3
        if [ -z "$since" ]; then
            ! compgen -G "$reports" >/dev/null || since=$SECONDS
        elif [ $((SECONDS - since)) -ge {_REPORTED_S} ]; then
            _tdp_say "a rank has failed, and srun is waited for no longer"
            kill -KILL "$1" 2>/dev/null
            break
        fi
    done
    wait "$1"
}}
# As srun with --kill-on-bad-exit, by the standbys of the nodes.
_tdp_run_standing() {{
    local word own node code left=$_tdp_left_nodes worst=0 since= nodes
    local reports=$_tdp_run/job/failures.$_tdp_own/rank*.json
    nodes=$(IFS=,; echo "${{_tdp_list[*]}}")
    _tdp_tell "run $_tdp_own $nodes {job.shape.tasks_per_node}" || return 1
    while [ "$left" -gt 0 ]; do
        if IFS=' ' read -r -t 0.3 word own node code <&6; then
            [ "$word $own" = "done $_tdp_own" ] || continue
            left=$((left - 1))
            if [ "$code" -ne 0 ] && [ "$worst" -eq 0 ]; then
                worst=$code
                _tdp_tell "end $_tdp_own"
            fi
        elif [ $? -le 128 ]; then
            worst=1
            break
        fi
        if [ -z "$since" ]; then
            [ "$worst" -eq 0 ] && ! compgen -G "$reports" >/dev/null || since=$SECONDS
        elif [ $((SECONDS - since)) -ge {_REPORTED_S} ]; then
            _tdp_say "a rank has failed, and the others are waited for no longer"
            [ "$worst" -ne 0 ] || worst=137
            break
        fi
    done
    return "$worst"
}}
# Whether one of the nodes of the ranks starts no task.
_tdp_node_lost() {{
    local hosts
    hosts=$(cat <&9)
    exec 9<&-
    printf '%s\\n' "${{_tdp_list[@]}}" | grep -qvxF -- "$hosts"
}}
_tdp_guarding=
_tdp_guard() {{
    local first=${{SLURMD_NODENAME:-$(hostname)}} other
    [ -z "$_tdp_guarding" ] || kill "$_tdp_guarding" 2>/dev/null
    _tdp_guarding=
    other=$(printf '%s\\n' "$@" | grep -vx -m1 "$first") || return 0
    command srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --mem=0 --gres=none \\
        --nodelist="$other" --mpi=none sh -c '
            while sleep {_LOOK_S}; do
                nodes=$(squeue --noheader --states=running --jobs="$1" --format=%N) || continue
                [ -n "$nodes" ] && names=$(scontrol show hostnames "$nodes") || continue
                # a node that was cut off and is back: the job goes on elsewhere
                count=$(squeue --noheader --jobs="$1" --Format=restartcnt) || continue
                [ "$((count))" -eq "$4" ] || exit 0
                printf "%s\\n" "$names" | grep -qx "$2" && continue
                echo "job $1: its first node $2 is lost, so it is {ended}" >>"$3"
                {end} "$1"
            done' guard "$_tdp_job" "$first" "$_tdp_run/logs/main.log" \\
        "${{SLURM_RESTART_COUNT:-0}}" </dev/null 6<&- 7>&- &
    _tdp_guarding=$!
}}
IFS=$'\\n' read -r -d '' -a _tdp_list < <(command scontrol show hostnames "$(_tdp_squeue %N)")
# srun takes the first ones, and leaves spare nodes idle.
_tdp_list=("${{_tdp_list[@]:0:$_tdp_nodes}}")
_tdp_left_nodes=$_tdp_nodes _tdp_left_tasks=$_tdp_ntasks _tdp_only=()
# A process on each node that has imported everything and starts ranks when it is told to.
_tdp_standing= _tdp_num_standing=0
coproc _tdp_standby {{
{indent(_standby(job), "    ")}
}}
exec 6<&"${{_tdp_standby[0]}}" 7>&"${{_tdp_standby[1]}}"
if [ "$SLURM_JOB_NUM_NODES" -gt "$_tdp_nodes" ]; then
    _tdp_only=("--nodelist=$(IFS=,; echo "${{_tdp_list[*]}}")")
fi
""".strip("\n")


def again(job: BatchJob, start: str) -> str:
    """Return that shell text in a loop that restarts the ranks within the job if the verdict says
    so.

    They restart on the nodes that answer. A signal to this shell means that the job is about to
    end.
    """
    margin_s, mode = job.config.launch.requeue.margin_s, job.config.launch.requeue.mode
    spare = f"$((SLURM_JOB_NUM_NODES - {min(job.used)}))" if goes_on_with_fewer(job) else "0"
    ask, end = verdict(job, "_tdp_own", f' "$_tdp_left" {margin_s:g} "{spare}"')
    functions, should_ask, lost = f"{_COMMON}\n{_ALL}", '[ "$_tdp_left" -gt 0 ]', ""
    decision = '"$_tdp_run/job/decision.$_tdp_own"'
    if mode == "never":
        give_up = f"rm -f {decision}\n_tdp_word="
    else:  # the rest of the script acts on it
        give_up = f"""
printf '{mode} %s; %s\\n' "$_tdp_reason" "$_tdp_why" >{decision}
exit "$_tdp_status"
""".strip("\n")
    if goes_on_with_fewer(job):
        functions = f"{_COMMON}\n{_some(job)}"
        start = f'_tdp_guard "${{_tdp_list[@]}}"\n{start}'
        ask = ask.replace('"$_tdp_ntasks"', '"$_tdp_left_tasks"')
        should_ask = '[ "$_tdp_status" -ne 0 ] && [ "$_tdp_told" -eq 0 ]'
        if mode != "never":
            lost = f"""
# Slurm requeues any other job that loses a node.
if {should_ask} && _tdp_node_lost; then
    _tdp_reason="not again in this job" _tdp_why="{NODE_SILENT}"
    _tdp_say "$_tdp_why"
{indent(give_up, "    ")}
fi
""".lstrip("\n")
    body = f"""
export TDP_ATTEMPT="$_tdp_attempt"
{start}
[ ! -f {decision} ] || exit "$_tdp_status"
_tdp_left=$(({job.restarts_in_job} - _tdp_attempt))
if [ "$_tdp_status" -eq 0 ] || [ "$_tdp_told" -ne 0 ]; then _tdp_left=0; fi
# Both take a while, so at once.
if {should_ask}; then _tdp_ask; fi
{ask}
_tdp_word='' _tdp_reason=''
if [ -f {decision} ]; then
    read -r _tdp_word _tdp_reason <{decision}
    _tdp_limit=$(_tdp_patience)
    _tdp_since=$(date +%s)
    _tdp_until=$((_tdp_since + _tdp_limit))
    until _tdp_ready && [ "$_tdp_told" -eq 0 ]; do
        if [ "$_tdp_told" -ne 0 ] || [ "$(date +%s)" -ge "$_tdp_until" ]; then
            _tdp_why="asked to end, or {NODE_SILENT} within $_tdp_limit s"
            _tdp_say "$_tdp_why"
{indent(give_up, " " * 12)}
            break
        fi
        sleep 5
        _tdp_ask
    done
fi
if [ "$_tdp_word" != {RequeueDecision.AGAIN} ]; then
{indent(lost + end, "    ")}
fi
_tdp_say "$_tdp_word: $_tdp_reason"
_tdp_attempt=$((_tdp_attempt + 1))
_tdp_own=$_tdp_start.$_tdp_attempt
""".strip("\n")
    return f"""
{functions}
_tdp_told=0 _tdp_attempt=0 _tdp_own=$_tdp_start
trap _tdp_told=1 TERM HUP USR1 USR2
while :; do
{indent(body, "    ")}
done
""".strip("\n")
