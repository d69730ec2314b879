"""The ranks' side of `harness/pool.py`: wait for a job, run it, clean up, answer. And of a call on
ranks of their own: join, call, leave.

The next job of a pool must find what the first one found. Torch is imported here, once, in the fork
server, before the ranks exist.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import random
import signal
import socket
import sys
import warnings
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import end_processes, forget
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import is_interrupted
from torchdistpackage.comm.runtime import join, leave
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.environment.failure import Failure
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import CommError
from torchdistpackage.files import atomic_write
from torchdistpackage.harness.late.group import register
from torchdistpackage.harness.late.orders import LATE, is_late
from torchdistpackage.harness.late.strict import strictness
from torchdistpackage.harness.late.world import world
from torchdistpackage.harness.pool import Answer, Axes, Job, WarningFilter
from torchdistpackage.launch.entrypoint import EntryPoint, Result, load_and_call, run_catching
from torchdistpackage.launch.ipc import Channel
from torchdistpackage.launch.process import num_threads

log = logging.getLogger(__name__)

# Longer than any test may take: a hang is the pool's to report, with stacks, and not gloo's.
_GROUP_TIMEOUT = timedelta(hours=1)
_MANY_THREADS = 4


def run_worker(
    reference: EntryPoint,
    args: tuple[object, ...],
    axes: Axes,
    expert: int,
    init_timeout_s: float,
    note: str,
    share_gpus: bool,
    *,
    together: bool = False,
) -> Any:
    """Join, set up `tpc`, call, leave; the function's result on this rank, or with `together` those
    of all ranks, on rank 0 alone.

    After an exception the end of the process ends the groups: their members may be stuck.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of a node would otherwise each take all its cores
    end_processes()
    joined = join(detect(os.environ), init_timeout_s=init_timeout_s, share_gpus=share_gpus)
    if joined.sharing and joined.rendezvous.rank == 0:
        log.warning("%s", joined.sharing)
    tpc.setup_process_groups(axes, expert=expert)
    try:
        result: object = reference.resolve()(*args)
    except CommError as error:
        if note:
            atomic_write(Path(note), str(error))
        raise
    if together:
        results = primitives.gather_objects(result)
        result = results if tpc.rank == 0 else None
    tpc.destroy()
    leave()
    return result


def serve(
    channel: Channel, rank: int, world_size: int, stacks: str, filters: Sequence[WarningFilter]
) -> None:
    """Do jobs until the pool is gone."""
    torch.set_num_threads(1)
    with Path(stacks).open("w", encoding="utf-8") as stacks_file:
        worker = _PoolWorker(rank, world_size, stacks_file, filters)
        while True:
            try:
                job = cast(Job, channel.recv())
            except EOFError:
                return
            channel.send(worker.do(job))
            worker.drop_groups()


class _PoolWorker:
    def __init__(
        self, rank: int, world_size: int, stacks_file: TextIO, filters: Sequence[WarningFilter]
    ) -> None:
        self._filters = filters
        self._rank = rank
        self._world_size = world_size
        self._stacks_file = stacks_file
        self._default: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        self._num_jobs = 0  # in this world
        self._num_threads = num_threads()  # when groups of ended jobs were last dropped

    def do(self, job: Job) -> Answer:
        with self._fresh_process_state():
            outcomes: list[Result | Failure] = []
            for part in (self._meet, self._call, self._clean):
                outcomes.append(run_catching(self._rank, part, job))
                if isinstance(outcomes[-1], Failure):
                    return Answer(outcomes[-1], keeps_group=False)
        return Answer(outcomes[1], keeps_group=self._default is not None)

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
                for action, category in self._filters:
                    warnings.simplefilter(action, category)  # type: ignore[arg-type]
                yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)

    def _meet(self, job: Job) -> None:
        if job.store is None:
            return
        self._leave()  # a rank may have kept what another one lost
        self._store = store = _loopback_store(job.store, self._rank, self._world_size)
        self._num_jobs = 0
        register()
        dist.init_process_group(
            LATE if is_late(job.transport) else "gloo",
            store=dist.PrefixStore("world", store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=_GROUP_TIMEOUT,
        )
        dist.barrier()  # now every rank has written what it had to
        self._default = dist.group.WORLD
        self._own_keys()

    def _own_keys(self) -> None:
        """Give the next job keys of its own.

        Names of groups come again, and what their first owners wrote to the store would lead the
        next ones to addresses where no one listens any more.
        """
        assert self._default is not None and self._store is not None
        self._num_jobs += 1
        c10d = dist.distributed_c10d
        backend, _ = c10d._world.pg_map[self._default]
        store = dist.PrefixStore(f"job{self._num_jobs}", self._store)
        c10d._world.pg_map[self._default] = (backend, store)
        c10d._world.group_count = 1  # as after the world alone was made

    def _call(self, job: Job) -> object:
        if not is_late(job.transport):
            return load_and_call(job.reference, job.args)
        # the job ends while what is returned is still held
        with world.job(job.transport, self._rank), strictness(job.transport):
            return load_and_call(job.reference, job.args)

    def _clean(self, job: Job) -> None:
        for name in job.cleanups:
            reference = EntryPoint.of(name)
            if reference.module in sys.modules:
                reference.resolve()()
        if not self._all_keep_the_world():
            self._leave()
            return
        assert self._default is not None
        # A collective that not all ranks took part in shows here, not in a later job.
        dist.barrier()
        for group in [g for g in dist.distributed_c10d._world.pg_map if g is not self._default]:
            dist.destroy_process_group(group)
        forget(self._default)
        recorder.forget_all()
        self._own_keys()

    def _all_keep_the_world(self) -> bool:
        """Return whether no rank's job left its world or lost messages in it, so that the next job
        can use it.
        """
        if self._store is None or self._default is None:
            return False
        keeps = dist.group.WORLD is self._default and not self._lost_messages()
        key = f"job{self._num_jobs} keeps the world, rank "
        self._store.set(f"{key}{self._rank}", str(keeps))
        answers = self._store.multi_get([f"{key}{rank}" for rank in range(self._world_size)])
        return all(answer == b"True" for answer in answers)

    def _lost_messages(self) -> bool:
        """Return whether messages are in flight, which the next job would take for its own."""
        assert self._default is not None
        # A receive posted ahead of a call may still wait for the message of that number.
        return is_interrupted(self._default) or state_of(self._default).expected > 0

    def _leave(self) -> None:
        self._default = None
        leave()
        gc.collect()

    def drop_groups(self) -> None:
        """Drop what ended jobs left in cycles, once that holds several groups.

        Each has a thread of gloo's that looks at its sockets a hundred times a second, also while
        this rank waits. To be called when what the job returned is held no more: what stays is not
        looked at again, which keeps this short.
        """
        self._num_threads = min(self._num_threads, num_threads())
        if num_threads() >= self._num_threads + _MANY_THREADS:
            gc.collect()
            gc.freeze()
            self._num_threads = num_threads()


def _loopback_store(path: str, rank: int, world_size: int) -> dist.Store:
    """Return the ranks' store: rank 0 serves it on the loopback interface only, with its port in
    the file `path`.

    A `FileStore` looks for a key a hundred times a second: each group made would cost 10 to 20 ms.
    """
    meeting = dist.FileStore(path, world_size)
    listener = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
    if listener is not None:
        meeting.set("port", str(listener.getsockname()[1]))
    return dist.TCPStore(
        "127.0.0.1",
        int(meeting.get("port")),
        world_size,
        is_master=rank == 0,
        timeout=_GROUP_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
