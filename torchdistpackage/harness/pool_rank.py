"""The rank's side of `harness/pool.py`: wait for a job, run it, clean up, answer.

One rule: the next job must find what the first one found. Torch is imported here, once, in the
fork server, before the ranks exist.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import TextIO, cast

import numpy as np
import torch
import torch.distributed as dist

from torchdistpackage.comm.runtime import leave
from torchdistpackage.harness.late import group
from torchdistpackage.harness.late.orders import LATE, is_late
from torchdistpackage.harness.late.strict import strictness
from torchdistpackage.harness.late.world import world
from torchdistpackage.harness.pool_job import Answer, Job
from torchdistpackage.launch.failure import Failure
from torchdistpackage.launch.rank import attempt, load_and_call
from torchdistpackage.launch.reference import Reference
from torchdistpackage.launch.wire import Channel

# Longer than any test may take: a hang is the pool's to report, with stacks, and not gloo's.
_GROUP_TIMEOUT = timedelta(hours=1)


def serve(channel: Channel, rank: int, world_size: int, stacks: str) -> None:
    """Do jobs until the pool is gone."""
    torch.set_num_threads(1)
    with Path(stacks).open("w", encoding="utf-8") as stacks_file:
        worker = _Worker(rank, world_size, stacks_file)
        while True:
            try:
                job = cast(Job, channel.recv())
            except EOFError:
                return
            channel.send(worker.do(job))


class _Worker:
    def __init__(self, rank: int, world_size: int, stacks_file: TextIO) -> None:
        self._rank = rank
        self._world_size = world_size
        self._stacks_file = stacks_file
        self._default: dist.ProcessGroup | None = None
        self._store: dist.FileStore | None = None
        self._num_keys = 0

    def do(self, job: Job) -> Answer:
        with self._fresh_process_state():
            if job.store is not None:
                met = attempt(self._rank, self._meet, job.store, is_late(job.transport))
                if isinstance(met, Failure):
                    return Answer(met, keeps_group=False)
            outcome = attempt(self._rank, self._call, job)
            if isinstance(outcome, Failure):
                return Answer(outcome, keeps_group=False)
            cleaned = attempt(self._rank, self._clean, job)
            if isinstance(cleaned, Failure):
                return Answer(cleaned, keeps_group=False)
        return Answer(outcome, keeps_group=self._default is not None)

    @contextlib.contextmanager
    def _fresh_process_state(self) -> Generator[None]:
        # Anew each time: a job may have put its own handler in the place of this one.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=self._stacks_file, all_threads=True)
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        environment, folder = dict(os.environ), Path.cwd()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)

    def _meet(self, store_path: str, late: bool) -> None:
        self._leave()  # a rank may have kept what another one lost
        self._store = store = dist.FileStore(store_path, self._world_size)
        group.register()
        dist.init_process_group(
            LATE if late else "gloo",
            store=store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=_GROUP_TIMEOUT,
        )
        dist.barrier()  # now every rank has written what it had to
        self._num_keys = store.num_keys()
        self._default = dist.group.WORLD

    def _call(self, job: Job) -> object:
        if not is_late(job.transport):
            return load_and_call(job.reference, job.args)
        # the job ends while what is returned is still held
        with world.job(job.transport, self._rank), strictness(job.transport):
            return load_and_call(job.reference, job.args)

    def _clean(self, job: Job) -> None:
        for name in job.cleanups:
            reference = Reference.of(name)
            if reference.module in sys.modules:
                reference.resolve()()
        if dist.group.WORLD is self._default:
            # A collective that not all ranks took part in shows here, not in a later job.
            dist.barrier()
            if self._store is not None and self._store.num_keys() == self._num_keys:
                return
        # The job made groups or left its world. Group names come again, and what their first owners
        # wrote to the store would lead the next ones to addresses where nobody listens any more.
        self._leave()

    def _leave(self) -> None:
        self._default = None
        leave()
        # What the job left in cycles still holds its groups, each with a thread of gloo's that
        # looks at its sockets a hundred times a second. What stays is not looked at again, which
        # keeps this short.
        gc.collect()
        gc.freeze()
