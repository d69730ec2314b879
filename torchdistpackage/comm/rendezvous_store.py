"""The store where the ranks of one start meet, and the roll call at it.

No rank waits for ever, and one that waited in vain names those that did not come. Rank 0 listens on
the first candidate port that is free; the others know its store by the token.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from torchdistpackage.environment.rendezvous import Rendezvous
from torchdistpackage.errors import AbsentError, LaunchError

TOKEN_WAIT_S = 2.0
"""How long a candidate port may take to show its token before the next one is tried."""

BUSY_S = 6.0
"""How long a stranger may sit on the only candidate port before a rank gives up."""

_HEARD_WAIT_S = 2.0
_LONGEST_PAUSE_S = 0.5
_NAMED = 20
_REFUSED = "refused: "


def serve(
    rendezvous: Rendezvous, ports: Sequence[int], *, timeout_s: float
) -> tuple[dist.Store, int]:
    """Rank 0 listens on the first candidate port that is free: its store and the port.

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
    """The others try the candidates in turn until one shows the token: the store and its port.

    Raises:
        LaunchError: none did within `timeout_s`, or a stranger keeps the only port.
    """
    address, rank = rendezvous.address, rendezvous.rank
    end = time.monotonic() + timeout_s
    stranger_since: float | None = None
    seen, pause_s = "no process listened", 0.05
    while time.monotonic() < end:
        for port in ports:
            if time.monotonic() > end:
                break
            try:
                socket.create_connection((address, port), TOKEN_WAIT_S).close()
            except OSError as error:
                seen, stranger_since = f"port {port}: {error}", None
                continue
            tried = time.monotonic()
            try:
                store = connect(
                    address, port, world_size=rendezvous.world_size, timeout_s=TOKEN_WAIT_S
                )
                shown = store.get("token").decode()
            except (OSError, RuntimeError) as error:
                seen = f"port {port}: {error}"
            else:
                if shown == rendezvous.token:
                    store.set_timeout(timedelta(seconds=timeout_s))
                    return store, port
                seen = f"port {port} belongs to another job"
            stranger_since = stranger_since or tried
        if len(ports) == 1 and stranger_since and time.monotonic() - stranger_since > BUSY_S:
            raise LaunchError(
                f"rank {rank}: port {ports[0]} of {address} is taken by something that is not rank "
                f"0 of this job ({seen}); set MASTER_PORT to a free port, or unset it to let the "
                f"job choose"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)  # thousands may ask rank 0's host
    raise LaunchError(
        f"rank {rank} found no rank 0 of its job at {address}, ports {_listed(ports)}, within "
        f"{timeout_s:g} s (last: {seen}); see whether rank 0 runs, and whether {address} can be "
        f"reached from {socket.gethostname()}"
    )


def connect(address: str, port: int, *, world_size: int, timeout_s: float) -> dist.TCPStore:
    """The store that another process serves at this port.

    In a thread: a server of another kind may accept and then stay silent, for which torch has no
    time limit; the thread is then left to its wait.

    Raises:
        OSError, RuntimeError: nothing listens, or not a store.
    """
    found: list[dist.TCPStore | RuntimeError] = []

    def attempt() -> None:
        try:
            found.append(
                dist.TCPStore(
                    address,
                    port,
                    world_size,
                    False,
                    timedelta(seconds=timeout_s),
                    wait_for_workers=False,  # or a visit would count as an arrival over there
                )
            )
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=attempt, name="store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise TimeoutError(f"port {port} accepted but said nothing for {timeout_s:g} s")
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def await_all(
    store: dist.Store,
    rendezvous: Rendezvous,
    *,
    timeout_s: float,
    since: float,
    judge: Callable[[], str] = str,
) -> None:
    """Return when every rank has signed in at the store; if one gives up, all do.

    since: when the `timeout_s` began, as time.monotonic() says.
    judge: called on the last to come, for why all must not go on; "" if they may.

    Raises:
        AbsentError: some did not sign in within `timeout_s`; names them.
        LaunchError: on every rank, what `judge` found.
    """
    rank, here = rendezvous.rank, socket.gethostname()
    cause: Exception | None = None
    try:
        store.set(f"here/{rank}", here)
        # one word for all: the last to come and the first to give up may meet
        if store.add("arrived", 1) == rendezvous.world_size and store.add("decided", 1) == 1:
            found = judge()
            store.set("complete", f"{_REFUSED}{found}" if found else "yes")
        # a rank 0 that came late still needs a moment to count the others
        left_s = max(since + timeout_s - time.monotonic(), 1.0)
        store.wait(["complete"], timedelta(seconds=left_s))
        said = store.get("complete").decode()
    except RuntimeError as error:  # a file store has no narrower one for a wait in vain
        cause = error
        said = _give_up(store, rendezvous)
    if said == "yes":
        return
    speaker = rank
    with contextlib.suppress(RuntimeError):  # gone with its keeper
        speaker = next((r for r in range(rank) if store.check([f"here/{r}"])), rank)
    _hear(store, rendezvous.keeps_store)
    if said.startswith(_REFUSED):
        raise LaunchError(said.removeprefix(_REFUSED)) from cause
    found = (
        f"{said} within {timeout_s:g} s (I am rank {rank} on {here}, launched by "
        f"{rendezvous.source})"
    )
    raise AbsentError(
        f"{found}; look at their logs, or allow more with launch.init_timeout_s", found, speaker
    ) from cause


def _give_up(store: dist.Store, rendezvous: Rendezvous) -> str:
    """Which ranks are missing, as said to all, or "yes" if the last one came this moment."""
    world_size, hosts = rendezvous.world_size, rendezvous.hosts
    try:
        if store.add("decided", 1) == 1:
            missing = [r for r in range(world_size) if not store.check([f"here/{r}"])]
            shown = [f"{r} on {hosts[r]}" if hosts else f"{r}" for r in missing]
            many = "s" * (len(missing) > 1)
            store.set(
                "complete",
                f"{len(missing)} of {world_size} ranks did not come (rank{many} {_listed(shown)})",
            )
        store.wait(["complete"], timedelta(seconds=TOKEN_WAIT_S))
        return store.get("complete").decode()
    except RuntimeError:
        return f"rank 0, which keeps the list of the {world_size} ranks, left: not all had come"


def _hear(store: dist.Store, keeper: bool) -> None:
    """Note that this rank knows; the store's keeper stays until all that came do."""
    end = time.monotonic() + _HEARD_WAIT_S
    with contextlib.suppress(RuntimeError):  # gone with its keeper
        store.add("heard", 1)
        while keeper and store.add("heard", 0) < store.add("arrived", 0):
            if time.monotonic() > end:
                return
            time.sleep(0.05)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_NAMED])) + (", ..." if len(values) > _NAMED else "")
