"""A rank of `tdp comm bench`: it measures in a thread that is watched, so that none waits for ever.

Who does not come is named by those who do. Who waits in a round for too long, or fails in
it, raises the alarm beside the groups (harness/store_consensus.py), and all who hear it are told
the same.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.bench.report import BenchReport, Measurement
from torchdistpackage.harness.bench.request import Request, Round
from torchdistpackage.harness.comm_test_report import CommTestError, RankReport, StuckAt
from torchdistpackage.harness.guarded import GuardedThread, first_line, meet_at_end
from torchdistpackage.harness.measure.run import DataCorruptionError, measure
from torchdistpackage.harness.store_consensus import SharedStatus
from torchdistpackage.launch.files import atomic_write

MARGIN_S = 60.0
"""The backend waits longer than the watcher by this, for NCCL's limit ends the process unheard."""
_LOOK_S, _SETTLE_S = 0.5, 3.0


def bench(request: Request, note: str) -> BenchReport | None:
    """The report on rank 0, None on the others.

    Raises:
        CommError: as `watched`; its text is in the file `note` too, for a parent that ends this
            rank before it is heard.
    """
    said: list[tuple[str, str]] = []

    def say(cell: Measurement) -> None:
        at = (cell.operation, cell.axis)
        if tpc.rank == 0 and at not in said[-1:]:
            sys.stderr.write(f"measuring {cell.operation} over {cell.axis}\n")
        said[:] = [at]

    try:
        report = watched(request, on_round=say)
    except CommError as error:
        atomic_write(Path(note), str(error))
        raise
    return report if tpc.rank == 0 else None


def watched(
    request: Request, on_round: Callable[[Measurement], object] = lambda _: None
) -> BenchReport:
    """`measure`, each round of which must end within `request.timeout_s`.

    on_round: called as each one begins, in another thread.

    Raises:
        CommTestError: ranks did not come, or failed; names them and the operation.
        CommError: an element arrived wrong, on all ranks alike.
    """
    timeout_s = request.timeout_s
    tpc.groups.set_timeout(timeout_s + MARGIN_S)
    if tpc.topology.world_size == 1:
        return measure(request)
    with SharedStatus("comm bench") as bulletin:
        run = _BenchThread(request, on_round)
        while not run.thread.ended.wait(_LOOK_S):
            if time.monotonic() - run.since_s > timeout_s or bulletin.alarmed():
                break
        failure = run.thread.failure
        if run.report is not None:
            return run.report
        if isinstance(failure, DataCorruptionError) or not isinstance(
            failure, CommError | RuntimeError | None
        ):
            raise failure
        ranks = tuple(range(tpc.topology.world_size))
        report = RankReport(stop=StuckAt(run.number, run.what, ranks, first_line(failure)))
        verdict = meet_at_end(bulletin, report, limit_s=timeout_s, settle_s=_SETTLE_S)
        problems = "\n  ".join(verdict.problems)
        raise CommTestError(
            f"the bench cannot go on:\n  {problems}\nlook at these ranks and hosts; where a round "
            f"only takes long, give it more with --timeout",
            verdict.speaker,
        ) from failure


class _BenchThread:
    """The thread, and where it is."""

    def __init__(self, request: Request, on_round: Callable[[Measurement], object]) -> None:
        self.number, self.what, self.since_s = 0, "the start of the bench", time.monotonic()
        self.report: BenchReport | None = None
        self._request, self._on_round = request, on_round
        self.thread = GuardedThread(self._go, tpc.get_group("global"), "comm bench")

    def _go(self) -> None:
        self.report = measure(self._request, self._begin)

    def _begin(self, cell: Measurement, part: Round) -> None:
        groups = f"ranks {list(part[0])}" if len(part) == 1 else f"{len(part)} groups at once"
        self.what = (
            f"{cell.operation} over {cell.axis}, {groups}, {cell.size_bytes} bytes of {cell.dtype}"
        )
        self.number, self.since_s = self.number + 1, time.monotonic()
        self._on_round(cell)
