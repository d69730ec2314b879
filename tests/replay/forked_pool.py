"""Ranks that are forked from this process, with all that it has imported and tried.

A sweep over many classes would else import and try each class in every rank.
"""

import os
import select
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torchdistpackage.environment.failure import Failure, root_cause
from torchdistpackage.errors import RankError
from torchdistpackage.harness.pool import CLEANUPS, Answer, Job
from torchdistpackage.launch.entrypoint import EntryPoint, Result, pack_arguments
from torchdistpackage.launch.ipc import Channel, unpack
from torchdistpackage.lazy import resolve


class ForkedPool:
    """Sets of ranks, like those of a `RankPool`; a set is forked when it is first asked to run."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="tdp-forked-")
        self._sets: dict[int, ForkedRanks] = {}

    def __call__(self, world_size: int) -> Any:
        if world_size not in self._sets:
            folder = Path(self._folder.name)
            self._sets[world_size] = ForkedRanks(world_size, folder, self.timeout_s)
        return self._sets[world_size]

    def close(self) -> None:
        for ranks in self._sets.values():
            ranks.end()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkedRanks:
    def __init__(self, world_size: int, folder: Path, timeout_s: float):
        self.world_size, self._folder, self._timeout_s = world_size, folder, timeout_s
        self._ranks: list[tuple[int, Channel]] = []
        self._num_stores = 0

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        store = None if self._ranks else self._start()
        job = Job(EntryPoint.of(fn), pack_arguments(*args, **kwargs), CLEANUPS, store)
        for _, channel in self._ranks:
            channel.send(job)
        answers: dict[int, Answer] = {}
        ends = time.monotonic() + self._timeout_s
        while len(answers) < self.world_size:
            waiting = {x: r for r, (_, x) in enumerate(self._ranks) if r not in answers}
            ready = select.select([*waiting], [], [], max(ends - time.monotonic(), 0))[0]
            if not ready:
                self.end()
                raise RankError(f"{fn.__qualname__} did not return within {self._timeout_s:g} s")
            for channel in ready:
                try:
                    answer = channel.recv()
                except EOFError as error:
                    self.end()
                    raise RankError(f"rank {waiting[channel]} died") from error
                assert isinstance(answer, Answer)
                answers[waiting[channel]] = answer
                if isinstance(answer.outcome, Failure):
                    ends = min(ends, time.monotonic() + 2.0)  # its peers may wait for it in vain
            failures = [x.outcome for x in answers.values() if isinstance(x.outcome, Failure)]
            if failures and (len(answers) == self.world_size or time.monotonic() >= ends - 2.0):
                self.end()
                culprit = root_cause(failures)
                error = RankError(culprit.detail if culprit else "a rank failed")
                error.culprit = culprit
                raise error
        results = [x.outcome for _, x in sorted(answers.items()) if isinstance(x.outcome, Result)]
        return [unpack(x.value) for x in results]

    def _start(self) -> str:
        """Fork the ranks, and return the file at which they meet."""
        self._num_stores += 1
        serve = resolve("torchdistpackage.harness.pool_worker:serve")
        for rank in range(self.world_size):
            ours, theirs = Channel.pair()
            pid = os.fork()
            if pid == 0:
                status = 1
                with suppress(BaseException):
                    ours.close()
                    for _, channel in self._ranks:
                        channel.close()
                    more = {"RANK": str(rank), "WORLD_SIZE": str(self.world_size)}
                    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **more})
                    stacks = self._folder / f"stacks{self.world_size}.{rank}"
                    serve(theirs, rank, self.world_size, str(stacks), [])
                    status = 0
                os._exit(status)
            theirs.close()
            self._ranks.append((pid, ours))
        return str(self._folder / f"store{self.world_size}.{self._num_stores}")

    def end(self) -> None:
        for pid, channel in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            channel.close()
        self._ranks.clear()
