"""Run functions on ranks: on a pool that tests reuse, or on the ranks of a topology.

A test sees fresh ranks without paying for them. What a function leaves behind is cleaned up in the
ranks; where that is not possible (it raised, hung or died), the ranks are killed and the next run
gets new ones. They meet through a file in a private folder, never through a port, so any number of
pools run side by side.

`run_on_topology` takes the ranks of a launcher, or starts new ones on this machine, once. What can
be refused is refused before a process is started.

This file needs no torch: only the ranks do, so a function may be given by its name.
"""

from __future__ import annotations

import builtins
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from torchdistpackage.environment.failure import Failure, report, root_cause
from torchdistpackage.environment.rendezvous import Rendezvous, detect
from torchdistpackage.errors import LaunchError, RankError, TopologyError
from torchdistpackage.files import tail
from torchdistpackage.harness.late.orders import is_late
from torchdistpackage.launch.entrypoint import EntryPoint, Result, pack_arguments
from torchdistpackage.launch.fork_server_client import ForkServer
from torchdistpackage.launch.ipc import unpack
from torchdistpackage.launch.workers import WorkerGroup, run_local
from torchdistpackage.topology.mesh import topology, whole_size

# Called in every rank after every run, where its module is loaded.
CLEANUPS = ("torchdistpackage.comm.tpc:tpc.destroy",)
_PRELOAD = ("torch", "torch.distributed", "numpy", "torchdistpackage.harness.pool_worker")
_STACKS_S = 2.0

WarningFilter = tuple[str, type[Warning]]
_ACTIONS = ("default", "error", "ignore", "always", "module", "once")

Axes = Sequence[tuple[str, int | None]]
"""Axes as (axis, size), outermost first; one size may be None: the number that the others leave."""

INIT_TIMEOUT_S = 60.0
"""Limit in seconds for ranks to meet, which may start one after the other."""
_RUN_WORKER = "torchdistpackage.harness.pool_worker:run_worker"


@dataclass(frozen=True, slots=True)
class Job:
    """One run, as a rank gets it.

    store: meet there first, as the old default group is gone, or of another back end.
    transport: `gloo`, or an order of the late transport (harness/late/orders.py).
    """

    reference: EntryPoint
    args: bytes
    cleanups: tuple[str, ...]
    store: str | None
    transport: str = "gloo"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a rank to a job. keeps_group: the job left the default group as it was."""

    outcome: Result | Failure
    keeps_group: bool


class RankPool:
    """Sets of 1 to `max_size` ranks, one set a size, each started when first asked for.

    Every size has processes of its own: a fork is cheaper than leaving and joining a group when
    tests take turns in their sizes, and those that wait are stopped and cost only shared memory.
    preload: more modules to import before the ranks are forked, e.g. "pytest".
    warnings: what a warning does in the ranks, as Python's option -W has it: "error" fails the run,
    "error,default::FutureWarning" but for warnings of one kind. By default it is printed to the
    rank's output, which a failure shows.

    Raises:
        LaunchError: there is no such action or kind.
    """

    def __init__(
        self,
        max_size: int = 8,
        timeout_s: float = 60.0,
        *,
        preload: Sequence[str] = (),
        cleanups: Sequence[str] = CLEANUPS,
        warnings: str = "default",
    ) -> None:
        self.max_size = max_size
        self.timeout_s = timeout_s
        self.filters = warning_filters(warnings)
        self.cleanups = tuple(cleanups)
        self.server = ForkServer((*_PRELOAD, *preload))
        self._sets: dict[int, Ranks] = {}
        self._awake: Ranks | None = None

    def __call__(self, world_size: int) -> Ranks:
        """Return the ranks of a world of `world_size`.

        Raises:
            LaunchError: `world_size` is not within 1 and the pool's size.
        """
        if not 1 <= world_size <= self.max_size:
            raise LaunchError(
                f"{world_size} ranks were asked of a pool of 1 to {self.max_size}; "
                "make it with a larger max_size"
            )
        if world_size not in self._sets:
            self._sets[world_size] = Ranks(self, world_size)
        return self._sets[world_size]

    def wake(self, ranks: Ranks) -> None:
        """Let `ranks` go on, and stop those of the size that ran before.

        A thread of gloo's looks at the sockets of its group a hundred times a second, also while
        nobody asks: a dozen ranks that wait would take two percent of a core.
        """
        if self._awake is not ranks:
            if self._awake is not None:
                self._awake.signal(signal.SIGSTOP)
            ranks.signal(signal.SIGCONT)
            self._awake = ranks

    def end(self, world_size: int) -> None:
        """End the ranks of one world, which may hold memory of a device; asked for again, it gets
        new ones.
        """
        if world_size in self._sets:
            # the object stays: it counts the files to meet at, whose old ones have an old port
            self._sets[world_size].end()

    def close(self) -> None:
        """End all ranks. Ending the interpreter, by whatever means, does so too."""
        self.server.close()
        self._sets.clear()
        self._awake = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def warning_filters(options: str) -> tuple[WarningFilter, ...]:
    """Return (action, category) of each option "action" or "action::category"; later options take
    precedence.

    Raises:
        LaunchError: there is no such action, or no such category among Python's own.
    """
    filters: list[WarningFilter] = []
    for option in options.split(","):
        action, _, name = option.partition("::")
        category: object = getattr(builtins, name or "Warning", None)
        if action not in _ACTIONS or not (
            isinstance(category, type) and issubclass(category, Warning)
        ):
            raise LaunchError(
                f"warnings={options!r}: {option!r} is not an action ({', '.join(_ACTIONS)}), "
                f'alone or with one of Python\'s own categories, such as "error::UserWarning"'
            )
        filters.append((action, category))
    return tuple(filters)


class Ranks:
    """The ranks of one world; get it from a `RankPool`."""

    def __init__(self, pool: RankPool, world_size: int) -> None:
        self.world_size = world_size
        self._pool = pool
        self._group = WorkerGroup(pool.server)
        self._num_stores = 0
        self._met_late: bool | None = None  # under the late transport or not; None: not at all

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        transport: str = "gloo",
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; the results by rank.

        Inside, the default process group is exactly this world, the random seeds are 0 and torch
        has one thread. `fn` is found by name, arguments and results are pickled.
        transport: `gloo`, or `late`, which delivers as late as NCCL may (docs/late_transport.md).

        Raises:
            ConfigError: there is no such transport.
            RankError: a rank raised, died, or did not return within `timeout_s` (default: the
                pool's); the text holds that rank's traceback, or the stacks of all ranks.
        """
        reference = EntryPoint.of(fn)
        packed = pack_arguments(*args, **kwargs)
        limit_s = self._pool.timeout_s if timeout_s is None else timeout_s
        late = is_late(transport)
        try:
            self._pool.wake(self)
            self._ready()
            store = None if self._met_late == late else self._next_store()
            job = Job(reference, packed, self._pool.cleanups, store, transport)
            deadline_s = time.monotonic() + limit_s
            answers = self._answers(job, deadline_s)
            outcomes = {rank: answer.outcome for rank, answer in answers.items()}
            if failures := self._failures(answers):
                waiting = set(range(self.world_size)) - set(outcomes) - {f.rank for f in failures}
                text = f"ranks {sorted(waiting)} were still running then\n" if waiting else ""
                text += report(failures, self.world_size)
                error = RankError(f"{text}\ntransport: {transport}" if late else text)
                error.culprit = root_cause(failures)
                raise error
            if len(outcomes) < self.world_size:
                raise RankError(self._hung(fn, limit_s, set(outcomes)))
        except BaseException:
            self.end()
            raise
        self._met_late = late if all(a.keeps_group for a in answers.values()) else None
        values = [o.value for _, o in sorted(outcomes.items()) if isinstance(o, Result)]
        return [unpack(value, reference.aliases) for value in values]

    def signal(self, signum: int) -> None:
        """Send it to every rank that runs."""
        self._group.signal(signum)

    def _ready(self) -> None:
        """Make sure that all ranks run; start them anew if one has ended since the last run."""
        if self._group.ranks:
            self._group.poll(0)  # the server's word of an end may be late on a busy machine
            if self._group.hung_up:
                self.end()
        for rank in range(len(self._group.ranks), self.world_size):
            environment = {
                **os.environ,
                # A host name may lead to an address that is not up; the loopback always is.
                "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
            }
            for file in (self._stacks(rank), self._output(rank)):
                file.write_bytes(b"")
            args = (rank, self.world_size, str(self._stacks(rank)), self._pool.filters)
            target = "torchdistpackage.harness.pool_worker:serve"
            self._group.start(target, args, environment, self._output(rank))

    def _next_store(self) -> str:
        self._num_stores += 1
        return str(self._pool.server.folder / f"store{self.world_size}.{self._num_stores}")

    def _answers(self, job: Job, deadline_s: float) -> dict[int, Answer]:
        """Collect answers by rank until all are in, the time is up, or no more can come."""
        answers: dict[int, Answer] = {}
        for worker in self._group.ranks:
            try:
                worker.channel.send(job, timeout_s=max(deadline_s - time.monotonic(), 0.1))
            except (BrokenPipeError, ConnectionResetError):
                continue  # it just died, which the server will report
            except TimeoutError:
                return answers
        while len(self._group.ended | answers.keys()) < self.world_size:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            answers |= cast(dict[int, Answer], dict(self._group.poll(left_s)))
            if failures := self._failures(answers):
                # Its peers now wait for it in vain, unless they are about to fail as well.
                deadline_s = min(deadline_s, time.monotonic() + self._group.news_s(failures))
        return answers

    def _failures(self, answers: Mapping[int, Answer]) -> list[Failure]:
        """Collect the failures: those that ranks reported, and the ends of ranks that reported
        nothing.
        """
        failures = [a.outcome for a in answers.values() if isinstance(a.outcome, Failure)]
        return failures + [
            worker.with_output(ended)
            for worker in self._group.ranks
            if worker.rank not in answers and (ended := worker.exit_failure())
        ]

    def _hung(self, fn: Callable[..., Any], limit_s: float, answered: set[int]) -> str:
        """Return the error text of a hang, with every rank's stack, which this call asks for."""
        waiting = sorted(set(range(self.world_size)) - answered)
        children = [worker.child for worker in self._group.ranks]
        for rank in waiting:
            children[rank].signal(signal.SIGUSR1)
        end_s = time.monotonic() + _STACKS_S
        sizes = None
        while time.monotonic() < end_s:  # until all have written, and none is still writing
            able = [rank for rank in waiting if not children[rank].is_stopped]
            now = [self._stacks(rank).stat().st_size for rank in able]
            if all(now) and now == sizes:
                break
            sizes = now
            time.sleep(0.05)  # the ranks need a moment to write their stacks
        name = getattr(fn, "__qualname__", repr(fn))
        lines = [
            f"{name} did not return within {limit_s:g} s on ranks {waiting} of "
            f"{self.world_size}; their stacks, innermost call first:"
        ]
        for rank, child in enumerate(children):
            state = "stopped, so it shows none" if child.is_stopped else "running"
            if rank in answered:
                state = "had returned"
            lines.append(f"--- rank {rank} (pid {child.pid}): {state} ---")
            if rank not in answered:
                stacks = self._stacks(rank).read_text("utf-8", errors="replace").rstrip()
                lines += [text for text in (stacks, tail(self._output(rank))) if text]
        return "\n".join(lines)

    def end(self) -> None:
        """End the processes; the next run starts new ones."""
        self._group.kill()
        self._met_late = None

    def _output(self, rank: int) -> Path:
        return self._pool.server.folder / f"size{self.world_size}.rank{rank}.output"

    def _stacks(self, rank: int) -> Path:
        return self._pool.server.folder / f"size{self.world_size}.rank{rank}.stacks"


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    timeout_s: float = 60.0,
    transport: str = "gloo",
    warnings: str = "default",
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` once on `world_size` new ranks; as `Ranks.run` of a `RankPool`."""
    preload = [name for name in ("pytest",) if name in sys.modules]
    with RankPool(world_size, timeout_s, preload=preload, warnings=warnings) as pool:
        return pool(world_size).run(fn, *args, transport=transport, **kwargs)


def run_on_topology(
    fn: str | Callable[..., object],
    args: Sequence[object] = (),
    *,
    axes: Axes,
    procs: int | None = None,
    expert: int = 1,
    init_timeout_s: float = INIT_TIMEOUT_S,
    note: str = "",
    share_gpus: bool = False,
) -> list[Any] | None:
    """Call `fn(*args)` on every rank, in groups along `axes`.

    Under torchrun or srun this process is one of the ranks; else it starts `procs` of them.

    fn: "module:function", or a function at the top level of a module.
    procs: ranks; None: as the launcher says, or as the axes multiply to.
    expert: ranks along the data axis that share the experts.
    note: a file for the text of a CommError of a rank, which the parent may end before it is heard.
    share_gpus: as `setup_distributed` takes it.

    Returns the results by rank, in one process: the one that started the ranks, or under a
    launcher rank 0. None in all others.

    Raises:
        TopologyError: the axes do not tile the ranks; nothing has been started.
        RankError: a rank that was started here failed.
        LaunchError: ranks are missing, or no process can be started.
    """
    rendezvous = detect(os.environ)
    world_size = num_ranks(axes, procs, rendezvous)
    topology(axes, world_size, expert=expert)
    call = (EntryPoint.of(fn), tuple(args), tuple(axes), expert, init_timeout_s, note, share_gpus)
    if rendezvous.source != "alone":
        return EntryPoint.of(_RUN_WORKER).resolve()(*call, together=True)  # type: ignore[return-value]
    return run_local(_RUN_WORKER, call, num_procs=world_size, preload=_PRELOAD)


def num_ranks(axes: Axes, procs: int | None, rendezvous: Rendezvous) -> int:
    """Return how many ranks there are, or are to be started.

    Raises:
        TopologyError: `procs` is not what the launcher says, or nothing says how many.
    """
    if rendezvous.source != "alone":
        if procs not in (None, rendezvous.world_size):
            raise TopologyError(
                f"{procs} processes are asked for, but {rendezvous.source} has started "
                f"{rendezvous.world_size} ranks; leave the number out under a launcher"
            )
        return rendezvous.world_size
    if procs is not None:
        return whole_size("of processes", procs)
    if left_open := [name for name, size in axes if size is None]:
        raise TopologyError(
            f"the size of {' and '.join(left_open)} is left open, and so is the number of ranks; "
            f"give --procs, or every size in --axes"
        )
    return math.prod(whole_size(name, size) for name, size in axes)
