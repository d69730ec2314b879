"""The batch script of a job, as text: plain bash that people can read, keep and submit themselves.

Two rules. It holds all that it needs: it starts the ranks with srun, and when they have ended it
does what they agreed on (`RunDir.decision`), because a rank may have no Slurm commands where it
runs. And a user's prologue reaches the ranks alone: both are in a shell of their own, so whatever
it sets, defines, traps or ends, the lines behind that shell are as they were written.
"""

import re
import shlex
from pathlib import Path
from textwrap import indent

from torchdistpackage.launch.requeue import EXIT_REQUEUE_DENIED, EXIT_TEMPFAIL, RequeueDecision
from torchdistpackage.launch.slurm.batch_job import BatchJob
from torchdistpackage.launch.slurm.environment import DEVICES, KEPT, RANKS, SLURM
from torchdistpackage.launch.slurm.run_dir import RunDir
from torchdistpackage.launch.slurm.script_ranks import environment, patterns, ranks, verdict

_BARE = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)


def render(job: BatchJob) -> str:
    """The whole script."""
    return "\n\n".join([_head(job), _place(job), _body(job), *_come_back(job)]) + "\n"


def setup_lines(job: BatchJob) -> list[str]:
    """What comes before the ranks, whoever starts them: names, environment, code."""
    return [_place(job), *environment(job)]


def verdict_lines(job: BatchJob) -> list[str]:
    """What comes after an srun that somebody else wrote: who failed, if ranks left no word."""
    said = 'if [ ! -f "$_tdp_run/job/decision.$_tdp_start" ]; then'
    return ["_tdp_status=$?", said, *verdict(job), "fi"]


def directive(name: str, value: str | None) -> str:
    """A line that sbatch reads. In it a backslash takes the meaning from what follows."""
    if value is None:
        return f"#SBATCH --{name}"
    if not _BARE.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{name}={value}"


def _head(job: BatchJob) -> str:
    what = f"{len(job.runs)} runs of {job.name}, each" if job.is_array else job.name
    lines = [
        "#!/bin/bash",
        f"# {what} on {job.shape}. It needs nothing but its run folder:",
        f"#     sbatch {shlex.quote(job.script)}",
        "#",
    ]
    notes = dict(job.comments)
    for name, value in job.options:
        lines += [f"# {notes[name]}"] if name in notes else []
        lines.append(directive(name, value))
    return "\n".join(lines)


def _place(job: BatchJob) -> str:
    if job.is_array:
        runs = "\n".join(f"    {shlex.quote(run)}" for run in job.runs)
        run = f"readonly _tdp_runs=(\n{runs}\n)\n"
        run += 'readonly _tdp_run="${_tdp_runs[$SLURM_ARRAY_TASK_ID]}"'
        name = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    else:
        run, name = f"readonly _tdp_run={shlex.quote(job.runs[0])}", '"$SLURM_JOB_ID"'
    counts = job.shape.nodes
    nodes = str(counts[0]) if len(counts) == 1 else '"$SLURM_JOB_NUM_NODES"'
    return f"""
: "${{SLURM_JOB_ID:?submit this file with sbatch}}"
{run}
readonly _tdp_script={shlex.quote(job.script)}
# As scontrol takes it, and as the files of this start are named.
readonly _tdp_job={name}
readonly _tdp_start="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"
readonly _tdp_series="${{1:-$SLURM_JOB_ID}}"
readonly _tdp_nodes={nodes}
readonly _tdp_ntasks=$((_tdp_nodes * {job.shape.tasks_per_node}))
_tdp_say() {{ printf 'job %s: %s\\n' "$_tdp_job" "$*"; }}
# What squeue says of this job; nothing if it does not answer. What it warns of is in the log.
_tdp_squeue() {{
    command squeue --noheader --states=all --jobs="$_tdp_job" --format="tdp=$1" |
        sed -n 's/^tdp=//p'
}}
readonly -f _tdp_say _tdp_squeue
# When Slurm ends the job, in seconds since 1970; empty if it never does.
_tdp_end=$(SLURM_TIME_FORMAT=standard _tdp_squeue %e)
_tdp_end=$([ -z "$_tdp_end" ] || date --date="$_tdp_end" +%s 2>/dev/null)
readonly _tdp_end
_tdp_say "start $_tdp_start on $SLURM_JOB_NODELIST, $(date '+%F %T')"
""".strip("\n")


def _body(job: BatchJob) -> str:
    parts = "\n\n".join([*environment(job), *ranks(job)])
    return f"""
# The prologue and the ranks, in a shell of their own: nothing behind it hears of what they do.
trap : TERM HUP USR1 USR2
(
{parts}
)
_tdp_status=$?
""".strip("\n")


def _come_back(job: BatchJob) -> list[str]:
    attempts = f"{{,.{{1..{job.restarts_in_job}}}}}" if job.restarts_in_job else ""
    read = f"""
# The word of the ranks that came last.
_tdp_word='' _tdp_reason=''
for _tdp_file in "$_tdp_run/job/decision.$_tdp_start"{attempts}; do
    [ ! -f "$_tdp_file" ] || read -r _tdp_word _tdp_reason <"$_tdp_file"
done
case $_tdp_word in '' | {RequeueDecision.AGAIN}) ;; *) _tdp_say "$_tdp_word: $_tdp_reason" ;; esac
# "RUNNING None", for example; asked again while Slurm does not say.
_tdp_state() {{
    local wait state=
    for wait in 1 2 4 8 16 0; do
        state=$(_tdp_squeue '%T %r')
        [ -z "$state" ] || break
        sleep "$wait"
    done
    printf '%s' "${{state:-not known to squeue}}"
}}
"""
    ends = f"""
case $_tdp_word in
{RequeueDecision.FINISHED})
    exit 0
    ;;
{RequeueDecision.STOP})
    exit {EXIT_TEMPFAIL}
    ;;
{RequeueDecision.REQUEUE})
    for _tdp_try in 1 2 3; do
        _tdp_now=$(_tdp_state)
        # In any other state Slurm is cancelling or requeueing the job already.
        case $_tdp_now in
        RUNNING* | *TimeLimit) ;;
        *) _tdp_say "not requeued here, it is $_tdp_now"; exit {EXIT_REQUEUE_DENIED} ;;
        esac
        command scontrol requeue "$_tdp_job" && exit 0
        sleep 2
    done
    _tdp_say "Slurm does not requeue it; set launch.requeue.mode=chain, or submit it again"
    exit {EXIT_REQUEUE_DENIED}
    ;;
{RequeueDecision.CHAIN})
{indent(_chain(job), "    ")}
    ;;
esac
"""
    # ranks that trained well say so; a folder that is gone cannot keep their word
    silent = f"""
if [ "$_tdp_status" -eq 0 ]; then
    _tdp_say "the ranks ended with 0 and left no word in $_tdp_run/job"
    exit {EXIT_REQUEUE_DENIED}
fi
"""
    parts = [read, ends, *([silent] if job.writes_decision else []), 'exit "$_tdp_status"']
    return [part.strip("\n") for part in parts]


def _chain(job: BatchJob) -> str:
    dropped = patterns((*RANKS, *SLURM, *DEVICES), 4)
    array = ' --array="$SLURM_ARRAY_TASK_ID"' if job.is_array else ""
    task = "_$SLURM_ARRAY_TASK_ID" if job.is_array else ""
    intent = RunDir(Path("$_tdp_run")).intent
    return f"""
_tdp_now=$(_tdp_state)
# A job that was cancelled stays so; one that was preempted without requeue is over as well.
case $_tdp_now in
RUNNING* | *TimeLimit) ;;
*)
    if ! command scontrol show job "$_tdp_job" | grep -q 'PreemptTime=[0-9]'; then
        _tdp_say "no job is chained behind it, it is $_tdp_now"
        exit {EXIT_REQUEUE_DENIED}
    fi
    ;;
esac
_tdp_own=()
for _tdp_name in $(compgen -e); do
    case $_tdp_name in
    {patterns(KEPT, 4)}) ;;
    {dropped}) _tdp_own+=("--unset=$_tdp_name") ;;
    esac
done
# The intent stays if the answer is lost, so that the next submission looks for this job first.
_tdp_note() {{
    printf '{{"job": "%s", "time_s": %s, %s}}\\n' "$1" "$(date +%s)" \\
        {shlex.quote(job.record)}
}}
_tdp_note "{task}" >"{intent}"
_tdp_next=$(env "${{_tdp_own[@]}}" sbatch --parsable \\
    --dependency="afterany:$_tdp_job"{array} "$_tdp_script" "$_tdp_series")
_tdp_next=${{_tdp_next##*$'\\n'}}
_tdp_next=${{_tdp_next%%;*}}
case $_tdp_next in
'' | *[!0-9]*) _tdp_say "no job could be chained"; exit {EXIT_REQUEUE_DENIED} ;;
esac
_tdp_note "${{_tdp_next}}{task}" >>"$_tdp_run/job/submissions.jsonl" &&
    rm -f "{intent}"
_tdp_say "goes on as job ${{_tdp_next}}{task}"
exit 0
""".strip("\n")
