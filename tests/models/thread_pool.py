"""Ranks that are threads of this process, for the same calls as a `RankPool` of processes.

A trial of a class of transformers, which takes seconds, is then made once, and not in every rank.
"""

from collections.abc import Callable
from contextlib import nullcontext
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.models import coverage_ranks
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.thread_ranks import run as run_module
from torchdistpackage.thread_ranks.threads import Threads
from torchdistpackage.topology.mesh import topology

LIMIT_S = 200.0


class _ModeThreads(Threads):
    """Threads that take the mode in which they compute with them: it changes torch for all."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._patience_s = LIMIT_S  # two never run at once

    def _hand_over(self, rank: int) -> None:
        mode = coverage_ranks.COMPUTING.get(get_ident())
        with coverage_ranks.narrow() if mode == "everywhere" else nullcontext():
            super()._hand_over(rank)


class ThreadPool:
    """Stands in for a `RankPool`: `pool(2).run(work, ...)` calls `work` on two ranks."""

    def __call__(self, size: int) -> "ThreadRanks":
        return ThreadRanks(size)


class ThreadRanks:
    """The ranks of one world."""

    def __init__(self, size: int):
        self.size = size

    def run(self, work: Callable[..., Any], *given: Any) -> list[Any]:
        """Return what `work` returns on each rank.

        Raises:
            Exception: what the first rank that stopped has raised.
            RuntimeError: ranks wait for each other.
        """
        if self.size == 1:
            return [_run_alone(work, *given)]

        def step(rank: int) -> Any:
            tpc.destroy()  # a run sets up its own axes
            try:
                return work(*given)
            except Exception as error:
                errors.append(error)
                raise

        errors = list[Exception]()
        layout = topology([("data", self.size)], self.size)
        with patch.object(run_module, "Threads", _ModeThreads):
            run = run_module.run_ranks(step, layout, limit_s=LIMIT_S, queued=False)
        if errors:
            raise errors[0]
        if run.finding is not None:
            raise RuntimeError(run.finding.text.splitlines()[0])
        return list(run.results)


def _run_alone(work: Callable[..., Any], *given: Any) -> Any:
    """Return what `work` returns in a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return work(*given)
    finally:
        tpc.destroy()
        dist.destroy_process_group()
