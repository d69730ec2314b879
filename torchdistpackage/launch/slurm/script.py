"""The batch script of a job, as text: plain bash that people can read, keep and submit themselves.

One rule: it holds all that it needs. It starts the ranks with one srun that inherits nothing, and
when they have ended it does what they agreed on (`JobFiles.decision`), because a rank may have no
Slurm commands where it runs.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchdistpackage.config.slurm_shape import JobShape
from torchdistpackage.launch.requeue import STOPPED
from torchdistpackage.launch.slurm.environment import DEVICES, KEPT, RANKS, SLURM

# Left by an outer job, a site or a newer Slurm; the options of our srun line say it all.
_SRUN_READS = (
    *("SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_GPU_BIND", "SLURM_EXPORT_ENV"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_VERBOSE"),
)
UNTIL_IT_LISTENS = 'trap "" HUP USR1 USR2; exec "$@"'
"""For sh -c: a Python that is still starting would end on a signal that asks it to save."""
_BARE = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CodePaths:
    """folder: the snapshot. paths: for PYTHONPATH, in order. here: what stands for the current
    folder, where a user's own modules are looked for."""

    folder: str
    paths: tuple[str, ...]
    here: str


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One job, or one array of them, as its script has it.

    options: of sbatch, None for one without a value. runs: run folders, one for each task of an
    array. script: where the text will be. command: words of a task, to which the path of the
    configuration is added. python: words that start an interpreter on the first node. record:
    fields of `records.Record` that a chained job shares with this one, as JSON without braces.
    at_once: tasks of the array that may run at a time. notes: comments above options.
    """

    name: str
    shape: JobShape
    options: tuple[tuple[str, str | None], ...]
    runs: tuple[str, ...]
    script: str
    code: CodePaths
    command: tuple[str, ...]
    python: tuple[str, ...]
    record: str
    is_array: bool = False
    at_once: int | None = None
    notes: tuple[tuple[str, str], ...] = ()
    container: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    conda: str | None = None
    prologue: tuple[str, ...] = ()


def text(job: BatchJob) -> str:
    """The whole script."""
    parts = [_head(job), *setup_lines(job), _ranks(job), _come_back(job), _verdict(job)]
    return "\n\n".join(parts) + "\n"


def setup_lines(job: BatchJob) -> list[str]:
    """What comes before the ranks, whoever starts them: names, environment, code."""
    return [part.strip("\n") for part in (_place(job), *_environment(job))]


def verdict_lines(job: BatchJob) -> list[str]:
    """What comes after an srun that somebody else wrote: who failed, if ranks left no word."""
    return ["status=$?", 'if [ ! -f "$run/job/decision.$start" ]; then', _verdict(job), "fi"]


def directive(name: str, value: str | None) -> str:
    """A line that sbatch reads. In it a backslash takes the meaning from what follows."""
    if value is None:
        return f"#SBATCH --{name}"
    if not _BARE.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{name}={value}"


def _words(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _head(job: BatchJob) -> str:
    what = f"{len(job.runs)} runs of {job.name}, each" if job.is_array else job.name
    lines = [
        "#!/bin/bash",
        f"# {what} on {job.shape}. It needs nothing but its run folder:",
        f"#     sbatch {shlex.quote(job.script)}",
        "#",
    ]
    notes = dict(job.notes)
    for name, value in job.options:
        lines += [f"# {notes[name]}"] if name in notes else []
        lines.append(directive(name, value))
    return "\n".join(lines)


def _place(job: BatchJob) -> str:
    if job.is_array:
        runs = "\n".join(f"    {shlex.quote(run)}" for run in job.runs)
        run = f"runs=(\n{runs}\n)\nrun=${{runs[$SLURM_ARRAY_TASK_ID]}}"
        name = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else:
        run, name = f"run={shlex.quote(job.runs[0])}", "$SLURM_JOB_ID"
    run += f"\nscript={shlex.quote(job.script)}"
    counts = job.shape.nodes
    nodes = str(counts[0]) if len(counts) == 1 else "$SLURM_JOB_NUM_NODES"
    return f"""
: "${{SLURM_JOB_ID:?submit this file with sbatch}}"
{run}
# As scontrol takes it, and as the files of this start are named.
job={name}
start=$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
nodes={nodes}
ntasks=$((nodes * {job.shape.tasks_per_node}))
say() {{ printf 'job %s: %s\\n' "$job" "$*"; }}
say "start $start on $SLURM_JOB_NODELIST, $(date '+%F %T')"
"""


def _environment(job: BatchJob) -> list[str]:
    parts = [
        f"""
# What another launcher left behind would be believed by a rank.
for name in $(compgen -e); do
    case $name in
    {_patterns(RANKS, 4)}) unset "$name" ;;
    esac
done
unset PYTHONPATH PYTHONHOME
"""
    ]
    if job.modules:
        loads = "\n".join(
            f'module load {shlex.quote(name)} || {{ say "no module {name}"; exit 1; }}'
            for name in job.modules
        )
        parts.append(
            f"""
if ! command -v module >/dev/null; then
    for file in /etc/profile.d/*mod*.sh; do [ -r "$file" ] && . "$file"; done
fi
{loads}
"""
        )
    if job.conda is not None:
        parts.append(
            f"""
base=$("${{CONDA_EXE:-conda}}" info --base) && . "$base/etc/profile.d/conda.sh" || exit 1
conda activate {shlex.quote(job.conda)} || exit 1
"""
        )
    if job.prologue:
        lines = "\n".join(job.prologue)
        parts.append(f"# launch.slurm.prologue\n{lines}\n# end of the prologue")
    paths = ":".join(job.code.paths)
    parts.append(
        f"""
set +e -u
# srun would take these for options, and stop where they contradict its own.
unset {_folded(_SRUN_READS)}
# The code as it was at submission: what is edited later does not reach this job.
export PYTHONPATH={shlex.quote(paths)}${{PYTHONPATH:+:$PYTHONPATH}}
export TDP_CODE={shlex.quote(job.code.here)}
# This script acts on what the ranks decide. A job that was chained behind another is told by whom.
export TDP_BATCH=1 TDP_SERIES=${{1:-$SLURM_JOB_ID}}
# When Slurm ends the job, in seconds since 1970; not set if it never does.
end=$(SLURM_TIME_FORMAT=standard squeue --noheader --states=all --jobs="$job" --format=%e 2>&1)
if [ -n "$end" ] && end=$(date --date="$end" +%s 2>/dev/null); then export TDP_JOB_END_S=$end; fi
"""
    )
    return parts


def _ranks(job: BatchJob) -> str:
    stated = (
        f'srun --nodes="$nodes" --ntasks="$ntasks" --ntasks-per-node={job.shape.tasks_per_node} '
        f"--cpus-per-task={job.shape.cpus_per_task}"
    )
    lines = [stated, "--mpi=none --kill-on-bad-exit=1"]
    lines += [_words(job.srun)] if job.srun else []
    lines.append(f"sh -c '{UNTIL_IT_LISTENS}' task")
    lines += [_words(job.container)] if job.container else []
    lines.append(f'{_words(job.command)} "$run/job/config.yaml"')
    joined = " \\\n    ".join(lines)
    return f"""
# Signals are for the ranks, which save and leave word; this script outlives them to act on it.
# A signal that asks a rank to save must not end a Python that is still starting: hence sh -c.
trap : TERM HUP USR1 USR2
{joined}
status=$?
""".strip("\n")


def _come_back(job: BatchJob) -> str:
    dropped = _patterns((*RANKS, *SLURM, *DEVICES), 8)
    array = ' --array="$SLURM_ARRAY_TASK_ID"' if job.is_array else ""
    task = "_$SLURM_ARRAY_TASK_ID" if job.is_array else ""
    return f"""
word='' reason=''
if [ -f "$run/job/decision.$start" ]; then read -r word reason <"$run/job/decision.$start"; fi
[ -z "$word" ] || say "$word: $reason"
case $word in
finished)
    exit 0
    ;;
stop)
    exit {STOPPED}
    ;;
requeue)
    # In any other state Slurm is cancelling or requeueing the job already.
    state=$(squeue --noheader --states=all --jobs="$job" --format='%T %r' 2>&1)
    case $state in
    RUNNING* | *TimeLimit) ;;
    *) say "not requeued here, it is $state"; exit 0 ;;
    esac
    scontrol requeue "$job" && exit 0
    say "Slurm does not requeue it; set launch.requeue.mode=chain, or submit it again"
    exit 1
    ;;
chain)
    # A job that was cancelled stays so; one that was preempted without requeue is over as well.
    state=$(squeue --noheader --states=all --jobs="$job" --format='%T %r' 2>&1)
    case $state in
    RUNNING* | *TimeLimit) ;;
    *)
        if ! scontrol show job "$job" | grep -q 'PreemptTime=[0-9]'; then
            say "no job is chained behind it, it is $state"
            exit 0
        fi
        ;;
    esac
    own=()
    for name in $(compgen -e); do
        case $name in
        {_patterns(KEPT, 8)}) ;;
        {dropped}) own+=("--unset=$name") ;;
        esac
    done
    next=$(env "${{own[@]}}" sbatch --parsable --dependency="afterany:$job"{array} \\
        "$script" "$TDP_SERIES") || {{ say "no job could be chained"; exit 1; }}
    next=${{next%%;*}}{task}
    printf '{{"job": "%s", "time_s": %s, %s}}\\n' "$next" "$(date +%s)" \\
        {shlex.quote(job.record)} >>"$run/job/submissions.jsonl"
    say "goes on as job $next"
    exit 0
    ;;
esac
""".strip("\n")


def _verdict(job: BatchJob) -> str:
    return f"""
# No word: the ranks are asked who failed first, which says more than srun's code.
[ "$status" -ne 0 ] || exit 0
{_words((*job.container, *job.python))} -m torchdistpackage.launch.slurm.verdict \\
    "$run" "$start" "$status" "$ntasks"
said=$?
case $said in
0 | 126 | 127) exit "$status" ;;
*) exit "$said" ;;
esac
""".strip("\n")


def _patterns(names: Sequence[str], indent: int) -> str:
    """Alternatives of a case, a few on a line."""
    return _folded([f"{name} |" for name in names], indent).removesuffix(" |")


def _folded(words: Sequence[str], indent: int = 4, per_line: int = 4) -> str:
    rows = [" ".join(words[i : i + per_line]) for i in range(0, len(words), per_line)]
    return f" \\\n{' ' * indent}".join(rows)
