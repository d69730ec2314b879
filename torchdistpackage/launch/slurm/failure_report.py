"""Write the last block of a job's main log: which rank failed first, and how. Its exit code is the
job's.

Run by the batch script when the ranks are gone and left no decision:

    python -m torchdistpackage.launch.slurm.failure_report RUN_FOLDER START CODE NUM_RANKS [LEFT
    MARGIN_S SPARE_NODES]

With LEFT, how often this job may start its ranks anew, it leaves word if that is to be done now,
and which nodes to leave out then, if the job can do without as many (SPARE_NODES).

The ranks' own reports count. What srun returned (CODE) is the code of whichever task it heard of
first, or of its own killing of the others.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchdistpackage.environment.failure import (
    Failure,
    is_secondary,
    read_failure_reports,
    report,
    root_cause,
    summary,
)
from torchdistpackage.environment.slurm_env import expand
from torchdistpackage.files import atomic_write, beside
from torchdistpackage.launch.run_rows import last_rows
from torchdistpackage.launch.slurm.node_blocklist import incident_of, named_in, record
from torchdistpackage.launch.slurm.requeue import (
    Decision,
    RequeueDecision,
    decide_in_job,
    time_is_up,
)
from torchdistpackage.launch.slurm.run_dir import read_starts
from torchdistpackage.launch.slurm.runs import decision, progress
from torchdistpackage.run_files import METRICS, RunDir

CANNOT_WRITE = 73
"""Exit code of a job whose run folder cannot be written (EX_CANTCREAT)."""
_PROBE_BYTES = 1 << 16
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?")


def exit_code(failure: Failure) -> int:
    """Return an exit code in a shell's form: 1 to 255, with 128 + n for signal n."""
    code = failure.exit_code
    if code is None:
        return 1
    return (128 - code if code < 0 else code) & 0xFF or 1


def verdict(run: Path, start: str, code: int, num_ranks: int) -> tuple[str, int]:
    """Return the final block of the log, and the job's exit code.

    A node that is to blame is recorded in the suspects file.
    """
    files = RunDir(run)
    # A step with more ranks may have left reports in this start before.
    failures = [f for f in read_failure_reports(files.failures(start)) if f.rank < num_ranks]
    silent = sorted(set(range(num_ranks)) - {failure.rank for failure in failures})
    if not failures and (why := _refuses(files)):
        return (
            f"--- the run folder {run} cannot be written: {why}; so no rank could leave word there "
            f"of what failed ({_reached(files)}), and what the ranks and srun say above is all "
            f"there is. Make room and rights for it, or set run.dir ---"
        ), CANNOT_WRITE
    if not failures or (silent and is_secondary(root_cause(failures))):
        return _without_culprit(files, start, code, failures, silent)
    first = root_cause(failures)
    if evidence := incident_of(first, start, time.time(), failures):
        record(files.suspects, evidence)
    return report(failures, num_ranks), exit_code(first)


def _refuses(files: RunDir) -> str:
    """Return why nothing can be written to the run folder; "" if something can."""
    probe = beside(files.job / "probe")
    try:
        atomic_write(probe, " " * _PROBE_BYTES)
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _reached(files: RunDir) -> str:
    """Return how far the rows of the run go."""
    step = next((row["step"] for row in last_rows(files.run / METRICS)), None)
    return f"{METRICS} has no row" if step is None else f"{METRICS} goes up to step {step}"


def _without_culprit(
    files: RunDir, start: str, code: int, failures: Sequence[Failure], silent: Sequence[int]
) -> tuple[str, int]:
    """Describe a failure in which all reports mention lost connections: a rank without a report was
    lost first.
    """
    nodes = next((s.nodes for s in read_starts(files.starts) if s.start == start), "")
    num_ranks, hosts = len(silent) + len(failures), expand(nodes)
    # every node of a job of ours has as many ranks as the others
    per_node = num_ranks // len(hosts) if hosts and num_ranks % len(hosts) == 0 else 0
    named = [f"{r} on {hosts[r // per_node]}" if per_node else str(r) for r in silent[:20]]
    shown = ", ".join(named) + (", ..." if len(silent) > 20 else "")
    lines = [f"rank {f.rank} on {f.host} then failed: {f.error or summary(f)}" for f in failures]
    lines.append(
        f"--- no report from {len(silent)} of {num_ranks} ranks ({shown}"
        f"{f'; job on {nodes}' if nodes else ''}): ended by Slurm with their job (requeued, "
        f"cancelled, out of time), lost with their node, or never started; srun ended with code "
        f"{code} and says above what it knows; the ranks' logs are in {files.logs} ---"
    )
    return "\n".join(lines), code or 1


def start_again(
    folder: Path,
    start: str,
    num_ranks: int,
    num_restarts: int,
    margin_s: float,
    end_s: float | None,
    spare_nodes: int = 0,
) -> Decision:
    """Decide whether to restart the ranks in this job, if its nodes answer; write AGAIN if so.

    num_restarts: restarts left in this job. end_s: when the job ends, in seconds since 1970.
    spare_nodes: nodes that the job can do without, so that those to blame are left out.
    """
    files, now_s = RunDir(folder), time.time()
    failures = [f for f in read_failure_reports(files.failures(start)) if f.rank < num_ranks]
    first = root_cause(failures) if failures else None
    died = "a rank died with what watched over it"
    if first is not None and not is_secondary(first):
        died = f"rank {first.rank}: {summary(first)}"
    evidence = incident_of(first, start, now_s, failures) if first is not None else None
    earlier = [s for s in read_starts(files.starts) if s.start != start]
    blamed = named_in(files.suspects, start) if evidence else ()
    leave_out = blamed if len(blamed) <= spare_nodes else ()
    decided = decide_in_job(
        f"after step {progress(files).step or 0}: {died}",
        decision(files, earlier[-1]) if earlier else None,
        starts_left=num_restarts,
        time_up=time_is_up(now_s, end_s, (), (), margin_s),
        bad_node=evidence.reason if evidence and not leave_out else "",
    )
    if decided.word is RequeueDecision.AGAIN:
        if leave_out:
            atomic_write(files.left_out(start), "".join(f"{node}\n" for node in leave_out))
        atomic_write(files.decision(start), f"{decided}\n")
    return decided


def main(argv: list[str]) -> int:
    numbers = argv[3:]
    if len(numbers) not in (2, 5) or not all(map(_NUMBER.fullmatch, numbers)):
        usage = "RUN_FOLDER START CODE NUM_RANKS [LEFT MARGIN_S SPARE_NODES]"
        sys.stderr.write(f"usage: python -m {__spec__.name} {usage}\n")
        return 2
    folder, start, num_ranks = Path(argv[1]), argv[2], int(numbers[1])
    text, code = verdict(folder, start, int(numbers[0]), num_ranks)
    if len(numbers) == 5 and code != CANNOT_WRITE:
        end = os.environ.get("TDP_JOB_END_S", "")
        end_s = float(end) if end.isdecimal() else None
        num_restarts, margin_s = int(numbers[2]), float(numbers[3])
        spare_nodes = int(numbers[4])
        decided = start_again(folder, start, num_ranks, num_restarts, margin_s, end_s, spare_nodes)
        if decided.word is not RequeueDecision.AGAIN:
            sys.stdout.write(f"{decided.reason}\n")
    sys.stdout.write(text + "\n")
    keep(RunDir(folder).main_log, text)
    return code


def keep(log: Path, text: str) -> None:
    """Write the reason into the log's folder if the log was removed: Slurm then writes to a deleted
    file.
    """
    if not log.exists():
        with contextlib.suppress(OSError):
            atomic_write(log, text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
