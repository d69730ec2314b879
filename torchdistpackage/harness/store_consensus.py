"""Decisions of all ranks over the default store, beside their groups: a stuck group holds up none.

One rule: no rank waits for ever, not even for the store, which lives in a process that may itself
be stopped. So a thread of its own asks it, over a connection of its own, and waits for that thread
have a time limit. At a meeting one rank decides for all: the last to come, or the first that has
waited in vain.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from torchdistpackage.errors import CommError

Answer = TypeVar("Answer")
Judge = Callable[[dict[int, str], Callable[[int], str]], str]
"""(texts by rank of those who came, host of a rank or "") -> the verdict that all are told."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


class SharedStatus:
    """One matter that all ranks of the default group go through together, in the same order.

    topic: a name for it; one that comes again gets new keys. Use it as a context.
    """

    def __init__(self, topic: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._default = dist.distributed_c10d._get_default_store()
        self._topic, self._prefix = topic, ""
        self._store: dist.Store | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._glance: Future[bool] | None = None
        self._alarmed = False
        threading.Thread(target=self._work, name=f"bulletin {topic}", daemon=True).start()

    def __enter__(self) -> "SharedStatus":
        return self

    def __exit__(self, *_: object) -> None:
        self._tasks.put(None)

    def meet(self, place: str, text: str, judge: Judge, *, wait_s: float, settle_s: float) -> str:
        """Leave `text`, and return the verdict when all have come or time is up.

        wait_s: for the others. settle_s: then for those who hear the alarm.

        Raises:
            CommError: the store does not answer, so nobody can be told anything.
        """

        def attend(store: dist.Store) -> str | None:
            store.set(self._key(place, self.rank), text)
            if store.add(self._key(place, "came"), 1) == self.size:
                self._decide(store, place, judge)
            verdict = self._verdict(store, place, wait_s)
            if verdict is None:
                store.set(self._key("alarm"), "yes")
                verdict = self._verdict(store, place, settle_s)
            if verdict is None:
                self._decide(store, place, judge)
                verdict = self._verdict(store, place, settle_s)
            return verdict

        limit_s = wait_s + 3 * settle_s
        verdict = self._answer(self._submit(attend), limit_s)
        if verdict is None:
            raise CommError(
                f"rank {self.rank} on {socket.gethostname()}: the rank that was to say how it went "
                f"ended before it did; look at the logs of the other ranks"
            )
        return verdict

    def alarmed(self) -> bool:
        """Whether somebody has waited in vain, or the store is gone. Never waits."""
        if self._glance is None:
            self._glance = self._submit(lambda store: store.check([self._key("alarm")]))
        elif self._glance.done():
            self._alarmed |= self._glance.exception() is not None or self._glance.result()
            self._glance = None
        return self._alarmed

    # -- in the thread ---------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _opened(self) -> dist.Store:
        if self._store is None:
            store = self._default.clone()
            number = store.add(f"{self._topic}/times/{self.rank}", 1)
            self._prefix, self._store = f"{self._topic}/{number}", store
            store.set(self._key("host", self.rank), socket.gethostname())
        return self._store

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def _verdict(self, store: dist.Store, place: str, wait_s: float) -> str | None:
        # asked again and again, because a wait in vain makes torch write to stderr
        key, end_s, pause_s = self._key(place, "verdict"), time.monotonic() + wait_s, 0.0
        while not store.check([key]):
            if time.monotonic() > end_s:
                return None
            pause_s = min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            time.sleep(pause_s)
        return store.get(key).decode()

    def _decide(self, store: dist.Store, place: str, judge: Judge) -> None:
        if store.add(self._key(place, "decided"), 1) == 1:
            keys = {rank: self._key(place, rank) for rank in range(self.size)}
            texts = {r: store.get(key).decode() for r, key in keys.items() if store.check([key])}
            verdict = judge(texts, lambda rank: self._host(store, rank))
            store.set(self._key(place, "verdict"), verdict)

    def _host(self, store: dist.Store, rank: int) -> str:
        if store.check([key := self._key("host", rank)]):
            return store.get(key).decode()
        # who has not come yet had signed in when the ranks met (comm/rendezvous_store.py)
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
            if store.check([f"here/{rank}"]):
                return store.get(f"here/{rank}").decode()
        return ""

    # -- across ----------------------------------------------------------------------

    def _submit(self, what: Callable[[dist.Store], Answer]) -> "Future[Answer]":
        future: Future[Answer] = Future()

        def task() -> None:
            try:
                future.set_result(what(self._opened()))
            except RuntimeError as error:  # a store that is gone
                future.set_exception(error)

        self._tasks.put(task)
        return future

    def _answer(self, future: "Future[Answer]", within_s: float) -> Answer:
        try:
            return future.result(within_s)
        except (RuntimeError, TimeoutError) as error:
            silent = isinstance(error, TimeoutError)
            why = f"does not answer within {within_s:.1f} s" if silent else "is gone"
            raise CommError(
                f"rank {self.rank} on {socket.gethostname()}: {self._keeper()} {why}, so the ranks "
                f"cannot tell each other how it went; see whether rank 0 still runs"
            ) from error

    def _keeper(self) -> str:
        store = self._default
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.FileStore):
            return f"the store in the file {store.path}"
        where = f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
        return f"the store{where}, which rank 0 keeps (under torchrun its agent),"
