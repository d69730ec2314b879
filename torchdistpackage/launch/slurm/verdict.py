"""The last block of a job's main log, and its exit code: who failed first, and how.

Run by the batch script when the ranks are gone and left no decision:

    python -m torchdistpackage.launch.slurm.verdict RUN_FOLDER START CODE NUM_RANKS

One rule: the ranks' own reports count. What srun returned (CODE) is the code of whichever task it
heard of first, or of its own killing of the others.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchdistpackage.launch.failure import Failure, culprit, how, is_consequence, report
from torchdistpackage.launch.hostlist import expand
from torchdistpackage.launch.slurm.files import JobFiles
from torchdistpackage.launch.slurm.starts import read_starts
from torchdistpackage.launch.slurm.suspects import evidence_of, record
from torchdistpackage.launch.supervise import read_failures


def exit_code(failure: Failure) -> int:
    """What a shell would say: 1 to 255, 128 and the number of a signal."""
    code = failure.exit_code
    if code is None:
        return 1
    return (128 - code if code < 0 else code) & 0xFF or 1


def verdict(run: Path, start: str, code: int, num_ranks: int) -> tuple[str, int]:
    """The block to end the log with and the job's exit code.

    A node that is to blame is noted in the suspects file.
    """
    files = JobFiles(run)
    # A step with more ranks may have left reports in this start before.
    failures = [f for f in read_failures(files.failures(start)) if f.rank < num_ranks]
    silent = sorted(set(range(num_ranks)) - {failure.rank for failure in failures})
    if not failures or (silent and is_consequence(culprit(failures))):
        return _without_culprit(files, start, code, failures, silent)
    first = culprit(failures)
    if evidence := evidence_of(first, start, time.time()):
        record(files.suspects, evidence)
    return report(failures, num_ranks), exit_code(first)


def _without_culprit(
    files: JobFiles, start: str, code: int, failures: Sequence[Failure], silent: Sequence[int]
) -> tuple[str, int]:
    """All reports there are speak of lost connections: who left none was lost first."""
    nodes = next((s.nodes for s in read_starts(files.starts) if s.start == start), "")
    num_ranks = len(silent) + len(failures)
    hosts = expand(nodes) if nodes else ()
    # every node of a job of ours has as many ranks as the others
    per_node = num_ranks // len(hosts) if hosts and num_ranks % len(hosts) == 0 else 0
    named = [f"{r} on {hosts[r // per_node]}" if per_node else str(r) for r in silent[:20]]
    shown = ", ".join(named) + (", ..." if len(silent) > 20 else "")
    lines = [f"rank {f.rank} on {f.host} then failed: {f.error or how(f)}" for f in failures]
    lines.append(
        f"--- no report from {len(silent)} of {num_ranks} ranks ({shown}"
        f"{f'; job on {nodes}' if nodes else ''}): ended by Slurm with their job (requeued, "
        f"cancelled, out of time), lost with their node, or never started; srun ended with code "
        f"{code} and says above what it knows; the ranks' logs are in {files.logs} ---"
    )
    return "\n".join(lines), code or 1


def main(argv: list[str]) -> int:
    if len(argv) != 5 or not argv[3].lstrip("-").isdigit() or not argv[4].isdigit():
        sys.stderr.write(f"usage: python -m {__spec__.name} RUN_FOLDER START CODE NUM_RANKS\n")
        return 2
    text, code = verdict(Path(argv[1]), argv[2], int(argv[3]), int(argv[4]))
    sys.stdout.write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
