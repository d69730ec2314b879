"""The store where the ranks of one start meet, and the roll call there.

No rank waits for ever; a rank that waited in vain names the ranks that did not come. Rank 0 listens
on the first free candidate port; the others recognise its store by the token.
"""

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from torchdistpackage.environment.rendezvous import Rendezvous
from torchdistpackage.errors import AbsentError, LaunchError

PORT_WAIT_S = 2.0
"""Seconds of silence on a candidate port after which the next one is tried as well."""

BUSY_S = 6.0
"""Fewest seconds that a stranger may hold the only candidate port before a rank gives up."""

_TELL_WAIT_S = 10.0
"""Time limit in seconds for the rank that finds out who is missing; the others wait as long for its
answer.
"""
_HEARD_WAIT_S = 5.0
_LONGEST_PAUSE_S = 0.5
_NAMED = 20
_REFUSED = "refused: "


def serve(
    rendezvous: Rendezvous, ports: Sequence[int], *, timeout_s: float
) -> tuple[dist.Store, int]:
    """Listen on the first free candidate port, on rank 0; return its store and the port.

    Raises:
        LaunchError: all are taken.
    """
    for port in ports:
        try:
            # it listens on all interfaces; this address is only how rank 0 reaches itself
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                rendezvous.world_size,
                True,
                timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError:
            continue
        store.set("token", rendezvous.token)
        return store, port
    raise LaunchError(
        f"rank 0 cannot listen on {socket.gethostname()}: port{'s' * (len(ports) > 1)} "
        f"{_listed(ports)} {'are' if len(ports) > 1 else 'is'} taken; "
        f"set MASTER_PORT to a free port, or unset it to let the job choose"
    )


def find(
    rendezvous: Rendezvous, ports: Sequence[int], *, timeout_s: float
) -> tuple[dist.Store, int]:
    """Try the candidates until one shows the token; return the store and its port.

    A silent port may belong to rank 0 while it is busy or briefly stopped, so it may still answer
    while others are tried. Only a wrong answer proves a stranger.

    Raises:
        LaunchError: none did within `timeout_s`, or a stranger keeps the only port.
    """
    address, rank = rendezvous.address, rendezvous.rank
    end = time.monotonic() + timeout_s
    stranger_since: float | None = None
    last_answer, pause_s = "no process listened", 0.05
    # its own numbers: the user may have seeded those of `random`
    draw = random.Random(rank)
    silent: dict[int, _Visit] = {}
    while (left_s := end - time.monotonic()) > 0:
        for port in ports:
            visit = silent.pop(port, None)
            if visit is None:
                # Of one port torch waits until it listens. A look before would double the
                # connections that rank 0 has to accept, one after another.
                if len(ports) > 1:
                    try:
                        wait_s = min(PORT_WAIT_S, left_s)
                        socket.create_connection((address, port), wait_s).close()
                    except OSError as error:
                        last_answer, stranger_since = f"port {port}: {error}", None
                        continue
                visit = _Visit(address, port, rendezvous.world_size, left_s)
            try:
                store = visit.store(min(PORT_WAIT_S, max(end - time.monotonic(), 0.0)))
            except TimeoutError as error:
                last_answer, silent[port] = str(error), visit
                # torch asks a server of another kind again and again, for as long as it may; one
                # rank looks for all, as each look is a connection more
                looks = len(ports) == 1 and rank == 1 and visit.silent_s > BUSY_S
                if not (looks and _speaks(address, port)):
                    stranger_since = None
                    continue
            except RuntimeError as error:
                last_answer = f"port {port}: {str(error).splitlines()[0]}"
            else:
                if visit.token == rendezvous.token:
                    store.set_timeout(timedelta(seconds=timeout_s))
                    return store, port
                last_answer = f"port {port} belongs to another job"
            stranger_since = stranger_since or visit.since
        if len(ports) == 1 and stranger_since and time.monotonic() - stranger_since > BUSY_S:
            raise LaunchError(
                f"rank {rank}: port {ports[0]} of {address} is taken by something that is not rank "
                f"0 of this job ({last_answer}); set MASTER_PORT to a free port, or unset it to "
                f"let the job choose"
            )
        if len(silent) < len(ports):
            # thousands may ask rank 0's host, and not all at the same moment
            time.sleep(pause_s * draw.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise LaunchError(
        f"rank {rank} found no rank 0 of its job at {address}, ports {_listed(ports)}, within "
        f"{timeout_s:g} s (last: {last_answer}); see whether rank 0 runs, and whether {address} "
        f"can be reached from {socket.gethostname()}"
    )


def connect(address: str, port: int, *, world_size: int, timeout_s: float) -> dist.TCPStore:
    """Return the store that another process serves at this port.

    Raises:
        OSError, RuntimeError: nothing listens, or not a store, or it does not answer.
    """
    return _Visit(address, port, world_size, timeout_s, reads_token=False).store(timeout_s)


def _speaks(address: str, port: int) -> bool:
    """Return whether the server speaks first or hangs up, which no store does."""
    try:
        with socket.create_connection((address, port), PORT_WAIT_S) as connection:
            try:
                connection.recv(1)
            except TimeoutError:
                return False
            except OSError:  # it hung up
                pass
            return True
    except OSError:
        return False


class _Visit:
    """A client of the store at a port, and the token that it shows.

    It looks in a thread, because a server may accept and then stay silent, for which torch has no
    time limit. The thread of a server that never answers is abandoned.

    timeout_s: to connect, and of the store that is found. since: start of the visit by
    time.monotonic().
    """

    def __init__(
        self, address: str, port: int, world_size: int, timeout_s: float, reads_token: bool = True
    ):
        self.since = time.monotonic()
        self.token = ""
        self._port = port
        self._is_store = False
        self._found: list[dist.TCPStore | RuntimeError] = []

        def attempt() -> None:
            try:
                store = dist.TCPStore(
                    address,
                    port,
                    world_size,
                    False,
                    timedelta(seconds=timeout_s),
                    wait_for_workers=False,  # or a visit would count as an arrival over there
                )
                self._is_store = True
                if reads_token:
                    # rank 0 sets it some time after it listens, so a store without one may be its
                    self.token = store.get("token").decode()
                self._found.append(store)
            except RuntimeError as error:
                self._found.append(error)

        self._thread = threading.Thread(target=attempt, name="store", daemon=True)
        self._thread.start()

    @property
    def silent_s(self) -> float:
        """Return how long ago the visit began."""
        return time.monotonic() - self.since

    def store(self, wait_s: float) -> dist.TCPStore:
        """Return the store, waiting this long for it; may be called again.

        Raises:
            TimeoutError: no answer yet.
            RuntimeError: nothing listens, or not a store.
        """
        # torch has no time limit for a server that stays silent, but a wait for a thread has one
        self._thread.join(wait_s)
        if not self._found:
            fault = "is a store without a token" if self._is_store else "has not answered"
            raise TimeoutError(f"port {self._port} {fault} for {self.silent_s:.0f} s")
        if isinstance(self._found[0], RuntimeError):
            raise self._found[0]
        return self._found[0]


def await_all(
    store: dist.Store,
    rendezvous: Rendezvous,
    *,
    timeout_s: float,
    since: float,
    judge: Callable[[], str] = str,
) -> None:
    """Return when every rank has signed in at the store; if one gives up, all do.

    since: start of `timeout_s` by time.monotonic(). judge: called on rank 0 once all have come;
    returns why they must not continue, or "".

    Raises:
        AbsentError: some did not sign in within `timeout_s`; names them.
        LaunchError: on every rank, what `judge` found.
    """
    rank, host = rendezvous.rank, socket.gethostname()
    cause: Exception | None = None
    try:
        store.set(f"here/{rank}", host)
        # one word for all: the last to come and the first to give up may meet
        if store.add("arrived", 1) == rendezvous.world_size and store.add("decided", 1) == 1:
            store.set("settled", "")
        # a rank 0 that came late still needs a moment to count the others
        left_s = max(since + timeout_s - time.monotonic(), 1.0)
        store.wait(["settled" if rank == 0 else "complete"], timedelta(seconds=left_s))
        if rank == 0:
            _complete(store, judge)
        verdict = store.get("complete").decode()
    except RuntimeError as error:  # a file store has no narrower one for a wait in vain
        cause = error
        verdict = _give_up(store, rendezvous, judge)
    if verdict == "yes":
        return
    speaker = rank
    with contextlib.suppress(RuntimeError):  # gone with its keeper
        if store.check(["speaker"]):
            speaker = int(store.get("speaker"))
    _hear(store, rendezvous.keeps_store)
    if verdict.startswith(_REFUSED):
        raise LaunchError(verdict.removeprefix(_REFUSED)) from cause
    cause_text = (
        f"{verdict} within {timeout_s:g} s (I am rank {rank} on {host}, launched by "
        f"{rendezvous.source})"
    )
    raise AbsentError(
        f"{cause_text}; look at their logs, or allow more with launch.init_timeout_s",
        cause_text,
        speaker,
    ) from cause


def _complete(store: dist.Store, judge: Callable[[], str]) -> None:
    """Announce on rank 0 whether all may continue, unless a rank that gave up has announced
    otherwise.

    Rank 0 reads every rank's entry, because its host keeps the store.
    """
    if not store.check(["complete"]):
        refusal = judge()
        store.set("complete", f"{_REFUSED}{refusal}" if refusal else "yes")


def _give_up(store: dist.Store, rendezvous: Rendezvous, judge: Callable[[], str]) -> str:
    """Return the missing ranks, as announced to all, or "yes" if the last one came at this
    moment.
    """
    world_size, hosts = rendezvous.world_size, rendezvous.hosts
    try:
        if store.add("decided", 1) == 1:
            missing = _missing(store, range(world_size))
            shown = [f"{r} on {hosts[r]}" if hosts else f"{r}" for r in missing]
            many = "s" * (len(missing) > 1)
            absent = {*missing}
            first = next(r for r in range(world_size) if r not in absent)
            store.set("speaker", str(first))
            store.set(
                "complete",
                f"{len(missing)} of {world_size} ranks did not come (rank{many} {_listed(shown)})",
            )
            store.set("settled", "")
        if rendezvous.rank == 0:
            # rank 0 keeps the store, and must not end it before the rank that decides has written
            store.wait(["settled"], timedelta(seconds=_TELL_WAIT_S))
            _complete(store, judge)
        store.wait(["complete"], timedelta(seconds=_TELL_WAIT_S))
        return store.get("complete").decode()
    except RuntimeError:
        return (
            f"rank 0, which keeps the list of the {world_size} ranks, ended before all had come; "
            "look at its log"
        )


def _missing(store: dist.Store, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have not signed in: one request for each, and few if most have."""
    if not ranks or store.check([f"here/{r}" for r in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return _missing(store, ranks[:half]) + _missing(store, ranks[half:])


def _hear(store: dist.Store, keeper: bool) -> None:
    """Note that this rank knows; the store's keeper stays until all that came do."""
    end = time.monotonic() + _HEARD_WAIT_S
    with contextlib.suppress(RuntimeError):  # gone with its keeper
        store.add("heard", 1)
        # polls, because a store cannot wait for a number
        while keeper and store.add("heard", 0) < store.add("arrived", 0):
            if time.monotonic() > end:
                return
            time.sleep(0.05)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_NAMED])) + (", ..." if len(values) > _NAMED else "")
