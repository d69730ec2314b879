"""A time limit for what blocks the host until others come: making and connecting groups.

The rule: nobody waits for ever, and whoever waits in vain says for whom. No back end on devices has
such a limit, and the host cannot be called back from it: a thread beside it speaks. A process
that this package started is then ended; in a user's own the text is all.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from torchdistpackage.errors import CommError
from torchdistpackage.launch.failure import Failure, FailureKind, to_json
from torchdistpackage.launch.files import atomic_write

HasCome = Callable[[dist.Store, int], bool]
"""(store, rank) -> whether the rank has come. Blocks nobody."""

MARGIN_S = 5.0
"""Back ends with a limit of their own (gloo) have the first word."""
_NAMED = 20


@contextmanager
def creation_limit(
    what: str, ranks: Sequence[int], has_come: HasCome, store: dist.Store, limit_s: float
) -> Iterator[None]:
    """Inside, who waits for more than `limit_s` says which of `ranks` have not come.

    what: is being made, for the text.

    Raises:
        CommError: the back end gave up, and some had not come; names them.
    """
    wait = _TimedWait(what, tuple(ranks), has_come, store, limit_s)
    timer = threading.Timer(limit_s + MARGIN_S, wait.is_over)
    timer.daemon = True
    timer.start()
    try:
        yield
    except CommError:  # it says what is wrong
        raise
    except RuntimeError as error:
        if text := wait.absent():
            raise CommError(text) from error
        raise
    finally:
        wait.ended = True
        timer.cancel()


@contextmanager
def joins_within(store: dist.Store, rank: int, world_size: int, limit_s: float) -> Iterator[None]:
    """`creation_limit` of the default group, at the store where its ranks meet."""
    store.set(f"joins/{rank}", "")
    with creation_limit("the default group", range(world_size), _has_joined, store, limit_s):
        yield


def _has_joined(store: dist.Store, rank: int) -> bool:
    return store.check([f"joins/{rank}"])


class _TimedWait:
    """ended: nobody waits any more."""

    def __init__(
        self,
        what: str,
        ranks: tuple[int, ...],
        has_come: HasCome,
        store: dist.Store,
        limit_s: float,
    ):
        self._what, self._ranks, self._has_come = what, ranks, has_come
        self._store, self._limit_s, self.ended = store, limit_s, False
        self._since_s = time.monotonic()

    def absent(self) -> str:
        """Who has not come, as far as the store says; "" where nobody is known to be absent."""
        with suppress(RuntimeError):  # gone with its keeper
            store = self._store.clone()  # the thread that waits may hold the connection
            absent = [rank for rank in self._ranks if not self._has_come(store, rank)]
            if absent:
                return self._told([_with_host(store, rank) for rank in absent])
        return ""

    def is_over(self) -> None:
        """Say so, and end the process if it is ours."""
        text = self.absent() or self._all_came()
        if self.ended:
            return
        rank, host = _rank(), socket.gethostname()
        message = f"rank {rank} on {host} waits in vain: {text}"
        if path := os.environ.get("TDP_FAILURE"):
            failure = Failure(
                rank, host, os.getpid(), time.time(), FailureKind.ERROR, 1, text, message
            )
            with suppress(OSError):
                atomic_write(Path(path), to_json(failure))
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os.write(2, f"{message}\n".encode())
        if path or _ends:
            os._exit(1)

    def _told(self, absent: Sequence[str]) -> str:
        many = "s" * (len(absent) > 1)
        listed = ", ".join(absent[:_NAMED]) + ", ..." * (len(absent) > _NAMED)
        return (
            f"{self._what}: {len(absent)} of {len(self._ranks)} ranks did not come in "
            f"{time.monotonic() - self._since_s:.1f} s, with a time limit of {self._limit_s:g} s "
            f"(rank{many} {listed}); see what they do instead, and whether all ranks ask for "
            f"their groups in one order"
        )

    def _all_came(self) -> str:
        return (
            f"{self._what}: its {len(self._ranks)} ranks came, but are not connected after the "
            f"time limit of {self._limit_s:g} s; see whether they reach each other "
            f"(NCCL_SOCKET_IFNAME, a firewall; NCCL_DEBUG=INFO tells more)"
        )


def _with_host(store: dist.Store, rank: int) -> str:
    """With the host by which it signed in (comm/rendezvous_store.py), if it did."""
    with suppress(RuntimeError, AttributeError):  # a store within no other one
        while True:
            if store.check([f"here/{rank}"]):
                return f"{rank} on {store.get(f'here/{rank}').decode()}"
            store = store.underlying_store  # type: ignore[attr-defined]
    return f"{rank}"


_ends = False


def end_processes() -> None:
    """This process is ours, whoever started it: a wait in vain ends it."""
    global _ends
    _ends = True


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
