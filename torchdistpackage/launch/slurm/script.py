"""The batch script of a job as text: plain bash that people can read, keep and submit themselves.

It holds all that it needs: it starts the ranks with srun, and when they have ended it does what
they agreed on (`RunDir.decision`), because a rank may have no Slurm commands where it runs. A
user's prologue reaches the ranks alone: both are in a shell of their own, so whatever it sets,
defines, traps or ends, the lines behind that shell are as they were written. In that shell nothing
behind the prologue trusts an option, a trap or a function that it finds, and all names that are
used there are readonly before it.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import indent

from torchdistpackage.environment.slurm_env import DEVICES, KEPT, RANKS, SLURM
from torchdistpackage.launch.slurm.job import BatchJob
from torchdistpackage.launch.slurm.requeue import (
    EXIT_REQUEUE_DENIED,
    EXIT_TEMPFAIL,
    RequeueDecision,
)
from torchdistpackage.launch.slurm.restart_script import again, srun, verdict
from torchdistpackage.run_files import RunDir

_BARE = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
# Left by an outer job, a site or a newer Slurm; the options of our srun line say it all.
_SRUN_READS = (
    "SLURM_TRES_PER_TASK",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_GPU_BIND",
    "SLURM_EXPORT_ENV",
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_VERBOSE",
)


def render(job: BatchJob) -> str:
    """Return the entire script."""
    return "\n\n".join([_head(job), _place(job), _body(job), *_come_back(job)]) + "\n"


def setup_lines(job: BatchJob) -> list[str]:
    """Return the lines before the ranks, for any starter: names, environment, code."""
    return [_place(job), *environment(job)]


def verdict_lines(job: BatchJob) -> list[str]:
    """Return the lines after an srun of others; without a decision they report the failure."""
    undecided = 'if [ ! -f "$_tdp_run/job/decision.$_tdp_start" ]; then'
    return ["_tdp_status=$?", undecided, *verdict(job), "fi"]


def directive(name: str, value: str | None) -> str:
    """Return a directive that sbatch reads, in which a backslash escapes the next character."""
    if value is None:
        return f"#SBATCH --{name}"
    if not _BARE.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{name}={value}"


def _head(job: BatchJob) -> str:
    title = f"{len(job.runs)} runs of {job.name}, each" if job.sweep else job.name
    lines = [
        "#!/bin/bash",
        f"# {title} on {job.shape}. It needs nothing but its run folder:",
        f"#     sbatch {shlex.quote(job.script)}",
        "#",
    ]
    notes = dict(job.comments)
    for name, value in job.options:
        lines += [f"# {notes[name]}"] if name in notes else []
        lines.append(directive(name, value))
    return "\n".join(lines)


def _place(job: BatchJob) -> str:
    if job.sweep:
        runs = "\n".join(f"    {shlex.quote(run)}" for run in job.runs)
        run = f"readonly _tdp_runs=(\n{runs}\n)\n"
        run += 'readonly _tdp_run="${_tdp_runs[$SLURM_ARRAY_TASK_ID]}"'
        name = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    else:
        run, name = f"readonly _tdp_run={shlex.quote(job.runs[0])}", '"$SLURM_JOB_ID"'
    counts = job.shape.nodes
    nodes = str(counts[0]) if len(counts) == 1 else '"$SLURM_JOB_NUM_NODES"'
    use = ""
    if job.used:
        pairs = folded([f"[{granted}]={used}" for granted, used in job.used.items()], 12)
        use = f"\n# Of so many nodes as many are used.\nreadonly _tdp_use=({pairs})"
        nodes = '"${_tdp_use[$SLURM_JOB_NUM_NODES]}"'
    return f"""
: "${{SLURM_JOB_ID:?submit this file with sbatch}}"
{run}
readonly _tdp_script={shlex.quote(job.script)}
# As scontrol takes it, and as the files of this start are named.
readonly _tdp_job={name}
readonly _tdp_start="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}"
readonly _tdp_series="${{1:-$SLURM_JOB_ID}}"{use}
readonly _tdp_nodes={nodes}
readonly _tdp_ntasks=$((_tdp_nodes * {job.shape.tasks_per_node}))
_tdp_say() {{ printf 'job %s: %s\\n' "$_tdp_job" "$*"; }}
{_commands(job)}# What squeue says of this job, or scontrol where a site refuses squeue; nothing
# if neither answers. Their warnings go to the log.
_tdp_squeue() {{
    local said
    said=$(command squeue --noheader --states=all --jobs="$_tdp_job" --format="tdp=$1" |
        sed -n 's/^tdp=//p')
    [ -n "$said" ] || said=$(command scontrol --oneliner show job "$_tdp_job" |
        awk -v text="$1" '{{
            for (i = 1; i <= NF; i++) {{
                n = index($i, "="); name = substr($i, 1, n - 1)
                if (n && !(name in fact)) fact[name] = substr($i, n + 1)
            }}
            gsub(/%S/, fact["StartTime"], text); gsub(/%e/, fact["EndTime"], text)
            gsub(/%T/, fact["JobState"], text); gsub(/%r/, fact["Reason"], text)
            gsub(/%N/, fact["NodeList"], text); print text; exit
        }}')
    [ -z "$said" ] || printf '%s\n' "$said"
}}
readonly -f _tdp_say _tdp_squeue
# When Slurm ends the job, in seconds since 1970 by the clock of this node,
# which may be minutes apart from Slurm's; empty if it never does.
_tdp_clock() {{ [ -z "$1" ] || date --date="$1" +%s 2>/dev/null; }}
_tdp_times=$(SLURM_TIME_FORMAT=standard _tdp_squeue '%S %e')
_tdp_began=$(_tdp_clock "${{_tdp_times%% *}}")
_tdp_end=$(_tdp_clock "${{_tdp_times##* }}")
if [ -n "$_tdp_began" ] && [ -n "$_tdp_end" ]; then
    _tdp_here=$(($(date +%s) + _tdp_end - _tdp_began))
    [ "$_tdp_here" -ge "$_tdp_end" ] || _tdp_end=$_tdp_here
fi
readonly _tdp_end
_tdp_say "start $_tdp_start on $SLURM_JOB_NODELIST, $(date '+%F %T')"
""".strip("\n")


def _commands(job: BatchJob) -> str:
    """Return lines that add Slurm's commands to PATH if a node does not find them; it may have its
    own PATH."""
    if not job.commands:
        return ""
    return f"""# A node may have a PATH without Slurm's commands.
_tdp_path() {{
    [ -x "$(command -v srun)" ] || export PATH="$PATH:"{shlex.quote(job.commands)}
}}
readonly -f _tdp_path
_tdp_path
"""


def _path_again(job: BatchJob) -> str:
    return "\n_tdp_path" if job.commands else ""


def _body(job: BatchJob) -> str:
    parts = "\n\n".join([*environment(job), *ranks(job)])
    return f"""
# The prologue and the ranks run in a subshell, so nothing that they set reaches
# the rest of this script.
trap : TERM HUP USR1 USR2
(
{parts}
)
_tdp_status=$?
""".strip("\n")


def _come_back(job: BatchJob) -> list[str]:
    attempts = f"{{,.{{1..{job.restarts_in_job}}}}}" if job.restarts_in_job else ""
    read_decision = f"""
# The last decision of the ranks.
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
# A node that was cut off and is back may still run this script, while the job
# has been started anew elsewhere.
_tdp_started_anew() {{
    local restarts
    restarts=$(command squeue --noheader --states=all --jobs="$_tdp_job" --Format=restartcnt)
    [[ $restarts =~ ^[[:space:]]*([0-9]+)[[:space:]]*$ ]] &&
        [ "${{BASH_REMATCH[1]}}" -ne "${{SLURM_RESTART_COUNT:-0}}" ]
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
        if _tdp_started_anew; then
            _tdp_say "not requeued here, it was started anew"
            exit {EXIT_REQUEUE_DENIED}
        fi
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
    _tdp_say "the ranks exited with 0 but left no decision in $_tdp_run/job"
    exit {EXIT_REQUEUE_DENIED}
fi
"""
    parts = [read_decision, ends, *([silent] if job.trains else []), 'exit "$_tdp_status"']
    return [part.strip("\n") for part in parts]


def _chain(job: BatchJob) -> str:
    dropped = patterns((*RANKS, *SLURM, *DEVICES))
    array = ' --array="$SLURM_ARRAY_TASK_ID"' if job.sweep else ""
    task = "_$SLURM_ARRAY_TASK_ID" if job.sweep else ""
    intent = RunDir(Path("$_tdp_run")).intent
    record = json.dumps({k: v for k, v in asdict(job.record).items() if k not in ("job", "time_s")})
    return f"""
_tdp_now=$(_tdp_state)
# A cancelled job gets no successor; one preempted without a requeue does.
case $_tdp_now in
RUNNING* | *TimeLimit) ;;
*)
    if ! command scontrol show job "$_tdp_job" | grep -q 'PreemptTime=[0-9]'; then
        _tdp_say "no job was chained: this job is $_tdp_now"
        exit {EXIT_REQUEUE_DENIED}
    fi
    ;;
esac
if _tdp_started_anew; then
    _tdp_say "no job was chained: this job was started anew"
    exit {EXIT_REQUEUE_DENIED}
fi
_tdp_own=()
for _tdp_name in $(compgen -e); do
    case $_tdp_name in
    {patterns(KEPT)}) ;;
    {dropped}) _tdp_own+=("--unset=$_tdp_name") ;;
    esac
done
# The intent stays if the answer of sbatch is lost: the next submission then
# looks for this job first.
_tdp_note() {{
    printf '{{"job": "%s", "time_s": %s, %s}}\\n' "$1" "$(date +%s)" \\
        {shlex.quote(record[1:-1])}
}}
_tdp_note "{task}" >"{intent}"
_tdp_next=$(env "${{_tdp_own[@]}}" sbatch --parsable \\
    --dependency="afterany:$_tdp_job"{array} "$_tdp_script" "$_tdp_series")
# Lines of a wrapper of the site may stand around the id.
_tdp_next=$(sed -En 's/^(Submitted batch job )?([0-9]+)([; ].*)?$/\\2/p' <<<"$_tdp_next" | tail -n1)
case $_tdp_next in
'' | *[!0-9]*) _tdp_say "no job could be chained"; exit {EXIT_REQUEUE_DENIED} ;;
esac
_tdp_note "${{_tdp_next}}{task}" >>"$_tdp_run/job/submissions.jsonl" &&
    rm -f "{intent}"
_tdp_say "continues as job ${{_tdp_next}}{task}"
exit 0
""".strip("\n")


def environment(job: BatchJob) -> list[str]:
    """Return the lines before the ranks, for any starter."""
    ended = '_tdp_say "ended with code $? before a rank was started: modules, conda or prologue"'
    parts = [
        f"""
trap '{ended}' EXIT
# Variables of another launcher would mislead the ranks.
for _tdp_name in $(compgen -e); do
    case $_tdp_name in
    {patterns(RANKS)}) unset "$_tdp_name" ;;
    esac
done
unset PYTHONPATH PYTHONHOME
"""
    ]
    if modules := job.extra("modules"):
        loads = "\n".join(
            f"module load {shlex.quote(name)} || "
            f"{{ _tdp_say {shlex.quote(f'no module {name}')}; exit 1; }}"
            for name in modules
        )
        parts.append(
            f"""
if ! command -v module >/dev/null; then
    for _tdp_file in /etc/profile.d/*mod*.sh; do
        [ -r "$_tdp_file" ] && . "$_tdp_file"
    done
fi
{loads}
"""
        )
    for conda in job.extra("conda")[:1]:
        parts.append(
            f"""
_tdp_base=$("${{CONDA_EXE:-conda}}" info --base) || exit 1
. "$_tdp_base/etc/profile.d/conda.sh" || exit 1
conda activate {shlex.quote(conda)} || exit 1
"""
        )
    if prologue := job.extra("prologue"):
        lines = "\n".join(prologue)
        parts.append(f"# launch.slurm.prologue\n{lines}\n# end of the prologue")
    paths = ":".join(job.code.paths)
    parts.append(
        f"""
case $(trap -p EXIT) in *"before a rank was started"*) trap - EXIT ;; esac
set +eu
trap - ERR DEBUG RETURN
IFS=$' \\t\\n'
# srun reads these as options, and fails where they contradict its command line.
unset {folded(_SRUN_READS)}{_path_again(job)}
# The code as it was at submission: later edits do not reach this job.
export PYTHONPATH={shlex.quote(paths)}${{PYTHONPATH:+:$PYTHONPATH}}
export TDP_CODE={shlex.quote(job.code.workdir)}
# This script acts on the decision of the ranks. TDP_SERIES names the first job
# of a chain.
export TDP_BATCH=1 TDP_SERIES="$_tdp_series"
if [ -n "$_tdp_end" ]; then export TDP_JOB_END_S="$_tdp_end"; fi
"""
    )
    return [part.strip("\n") for part in parts]


def ranks(job: BatchJob) -> list[str]:
    """Return srun and, for ranks without a decision, the report of the failure; it exits its
    shell.
    """
    start = f"""
# The ranks handle signals: they save and write their decision, on which this
# script then acts. sh -c ignores them until the Python of a rank does, or a
# request to save would end one that is still starting.
{srun(job)}
_tdp_status=$?
""".strip("\n")
    if job.restarts_in_job:
        return [again(job, start)]
    return [
        f"trap : TERM HUP USR1 USR2\n{start}",
        '[ ! -f "$_tdp_run/job/decision.$_tdp_start" ] || exit "$_tdp_status"',
        *verdict(job),
    ]


def patterns(names: Sequence[str]) -> str:
    """Return the alternatives of a shell `case`, a few on each line."""
    return folded([f"{name} |" for name in names]).removesuffix(" |")


def folded(of: Sequence[str], per_line: int = 4) -> str:
    return " \\\n    ".join(" ".join(of[i : i + per_line]) for i in range(0, len(of), per_line))
