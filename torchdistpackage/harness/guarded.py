"""A test of the network in a thread that may get stuck, and what all ranks are told of it.

A thread that is stuck in a call is left behind. Whoever watches it returns within its time limit,
and the ranks tell each other beside the groups, over the store, how far each has come.
"""

import contextvars
import threading
from collections.abc import Callable

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError
from torchdistpackage.harness.comm_test_report import CommTestError, RankReport, Verdict, judge
from torchdistpackage.harness.store_consensus import SharedStatus


class GuardedThread:
    """Runs `function` with the caller's tpc and on the device of `group`; `failure` is what it
    raised."""

    def __init__(self, function: Callable[[], object], group: Group, name: str) -> None:
        self.ended = threading.Event()
        self.failure: Exception | None = None
        self._function, self._device = function, primitives.device_of(group)
        # tpc belongs to a context, and a thread begins in an empty one
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self._go,), name=name, daemon=True).start()

    def _go(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first one
        try:
            self._function()
        except Exception as error:  # for the thread that watches
            self.failure = error
        self.ended.set()


def first_line(failure: Exception | None) -> str:
    """The first line of what the backend said, "" where the rank still waits."""
    if failure is None:
        return ""
    return str(failure).partition("\n")[0] or type(failure).__name__


def meet_at_end(
    status: SharedStatus, report: RankReport, *, limit_s: float, settle_s: float
) -> Verdict:
    """What all ranks are told of their reports.

    limit_s: what each operation may take. settle_s: for those who hear the alarm.

    Raises:
        CommTestError: the store does not answer.
    """
    try:
        verdict = status.meet(
            "end",
            report.to_json(),
            lambda texts, host_of: judge(
                {rank: RankReport.from_json(text) for rank, text in texts.items()},
                host_of,
                world_size=status.size,
                limit_s=limit_s,
            ).to_json(),
            # a rank that could not go on waits only for those whom the alarm calls
            wait_s=0.0 if report.stop else limit_s,
            settle_s=settle_s,
        )
    except CommError as error:
        where = f"; it was in {report.stop.what}" if report.stop else ""
        raise CommTestError(f"{error}{where}") from error
    return Verdict.from_json(verdict)
