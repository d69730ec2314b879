"""The part of a batch script that starts the ranks: their environment, srun, and who failed.

One rule: a user's prologue stands in the middle of it and may do anything to its shell, so nothing
behind the prologue trusts an option, a trap or a function that it finds, and all names that are
used there are readonly before it.
"""

import shlex
from collections.abc import Iterable, Sequence
from textwrap import indent

from torchdistpackage.launch.requeue import RequeueDecision
from torchdistpackage.launch.slurm.batch_job import BatchJob
from torchdistpackage.launch.slurm.environment import RANKS

# Left by an outer job, a site or a newer Slurm; the options of our srun line say it all.
_SRUN_READS = (
    *("SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_GPU_BIND", "SLURM_EXPORT_ENV"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_VERBOSE"),
)
IGNORE_SIGNALS_UNTIL_READY = 'trap "" HUP USR1 USR2; exec "$@"'
"""For sh -c: a Python that is still starting would end on a signal that asks it to save."""
_ANSWERS_S = 30
"""Within which a node that is well starts a task."""


def environment(job: BatchJob) -> list[str]:
    """What comes before the ranks, whoever starts them."""
    parts = [
        f"""
# What another launcher left behind would be believed by a rank.
for _tdp_name in $(compgen -e); do
    case $_tdp_name in
    {patterns(RANKS, 4)}) unset "$_tdp_name" ;;
    esac
done
unset PYTHONPATH PYTHONHOME
"""
    ]
    if job.modules:
        loads = "\n".join(
            f"module load {shlex.quote(name)} || "
            f"{{ _tdp_say {shlex.quote(f'no module {name}')}; exit 1; }}"
            for name in job.modules
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
    if job.conda is not None:
        parts.append(
            f"""
_tdp_base=$("${{CONDA_EXE:-conda}}" info --base) || exit 1
. "$_tdp_base/etc/profile.d/conda.sh" || exit 1
conda activate {shlex.quote(job.conda)} || exit 1
"""
        )
    if job.prologue:
        lines = "\n".join(job.prologue)
        parts.append(f"# launch.slurm.prologue\n{lines}\n# end of the prologue")
    paths = ":".join(job.code.paths)
    parts.append(
        f"""
set +eu
trap - ERR DEBUG RETURN
IFS=$' \\t\\n'
# srun would take these for options, and stop where they contradict its own.
unset {folded(_SRUN_READS)}
# The code as it was at submission: what is edited later does not reach this job.
export PYTHONPATH={shlex.quote(paths)}${{PYTHONPATH:+:$PYTHONPATH}}
export TDP_CODE={shlex.quote(job.code.workdir)}
# This script acts on what the ranks decide. A job that was chained behind another is told by whom.
export TDP_BATCH=1 TDP_SERIES="$_tdp_series"
if [ -n "$_tdp_end" ]; then export TDP_JOB_END_S="$_tdp_end"; fi
"""
    )
    return [part.strip("\n") for part in parts]


def ranks(job: BatchJob) -> list[str]:
    """srun, and where the ranks left no word, who of them failed; ends its shell."""
    start = f"""
# Signals are for the ranks, which save and leave word; this script outlives them to act on it.
# A signal that asks a rank to save must not end a Python that is still starting: hence sh -c.
{_srun(job)}
_tdp_status=$?
""".strip("\n")
    if job.restarts_in_job:
        return [_again(job, start)]
    return [
        f"trap : TERM HUP USR1 USR2\n{start}",
        '[ ! -f "$_tdp_run/job/decision.$_tdp_start" ] || exit "$_tdp_status"',
        *verdict(job),
    ]


def _srun(job: BatchJob) -> str:
    stated = (
        f'command srun --nodes="$_tdp_nodes" --ntasks="$_tdp_ntasks" '
        f"--ntasks-per-node={job.shape.tasks_per_node} "
        f"--cpus-per-task={job.shape.cpus_per_task}"
    )
    lines = [stated, "--mpi=none --kill-on-bad-exit=1"]
    lines += [words(job.srun)] if job.srun else []
    lines.append(f"sh -c '{IGNORE_SIGNALS_UNTIL_READY}' task")
    lines += [words(job.container)] if job.container else []
    lines.append(f'{words(job.command)} "$_tdp_run/job/config.yaml"')
    return " \\\n    ".join(lines)


def verdict(job: BatchJob, start: str = "_tdp_start", more: str = "") -> tuple[str, str]:
    """Asks who failed first, and ends the shell with that rank's code.

    start: variable with the name of the start. more: words that allow for another start.
    """
    ask = f"""
# No word: the ranks are asked who failed first, which says more than srun's code.
[ "$_tdp_status" -ne 0 ] || exit 0
{words((*job.container, *job.python))} -m torchdistpackage.launch.slurm.failure_report \\
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


def _again(job: BatchJob, start: str) -> str:
    """The same in a loop: anew in a job that goes on, on nodes that answer, if the verdict says so.

    A signal to this shell says that the job is about to end.
    """
    ask, end = verdict(job, "_tdp_own", f' "$_tdp_left" {job.margin_s:g}')
    body = f"""
export TDP_ATTEMPT="$_tdp_attempt"
{start}
[ ! -f "$_tdp_run/job/decision.$_tdp_own" ] || exit "$_tdp_status"
_tdp_left=$(({job.restarts_in_job} - _tdp_attempt))
if [ "$_tdp_status" -eq 0 ] || [ "$_tdp_told" -ne 0 ]; then _tdp_left=0; fi
# Both take a while, so at once.
if [ "$_tdp_left" -gt 0 ]; then
    timeout {_ANSWERS_S} srun --nodes="$_tdp_nodes" --ntasks="$_tdp_nodes" \\
        --ntasks-per-node=1 --mpi=none true &
fi
{ask}
_tdp_word='' _tdp_reason=''
if [ -f "$_tdp_run/job/decision.$_tdp_own" ]; then
    read -r _tdp_word _tdp_reason <"$_tdp_run/job/decision.$_tdp_own"
    if ! wait "$!" || [ "$_tdp_told" -ne 0 ]; then
        _tdp_say "told to end, or not every node starts a task within {_ANSWERS_S} s"
        rm -f "$_tdp_run/job/decision.$_tdp_own"
        _tdp_word=
    fi
fi
if [ "$_tdp_word" != {RequeueDecision.AGAIN} ]; then
{indent(end, "    ")}
fi
_tdp_say "$_tdp_word: $_tdp_reason"
_tdp_attempt=$((_tdp_attempt + 1))
_tdp_own=$_tdp_start.$_tdp_attempt
""".strip("\n")
    return f"""
_tdp_told=0 _tdp_attempt=0 _tdp_own=$_tdp_start
trap _tdp_told=1 TERM HUP USR1 USR2
while :; do
{indent(body, "    ")}
done
""".strip("\n")


def words(of: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, of))


def patterns(names: Sequence[str], indent: int) -> str:
    """Alternatives of a case, a few on a line."""
    return folded([f"{name} |" for name in names], indent).removesuffix(" |")


def folded(of: Sequence[str], indent: int = 4, per_line: int = 4) -> str:
    rows = [" ".join(of[i : i + per_line]) for i in range(0, len(of), per_line)]
    return f" \\\n{' ' * indent}".join(rows)
