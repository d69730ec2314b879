"""A call in flight: its data, its effects on its tensors, and its handle.

Data travels between real peers over gloo, or from a rank that is all ranks. A transfer begins when
its call is issued, from copies of the inputs, and waits for no one, as a kernel on a device does.
Only who asks for it waits.

What a call writes is poison until it is done, what it reads is kept to compare with. The user's
version counter never moves by our own writes, so that every other write is seen. The poison of
floats is a signalling NaN: arithmetic returns another bit pattern, also where it cannot change a
NaN's value (`x * 1.0`).
"""

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.errors import RaceError
from torchdistpackage.thread_ranks.own_backend import HERE, OwnWork, Tensors

Parts = Sequence[Sequence[Tensor]]
"""The tensors that go to, or come from, each rank of a group, in its order."""
Posted = tuple[str, Tensor, int]
"""(`send` or `receive`, tensor, place of the peer in the group)"""


class Transfer:
    """Data in transit. rooms: received tensors by rank, or by message; full after `wait()`.

    keep: sent data. received: bytes, which become the tensors `into`.
    """

    def __init__(
        self,
        rooms: Parts,
        works: Sequence[dist.Work] = (),
        keep: object = None,
        received: Tensor | None = None,
        into: Sequence[Tensor] = (),
    ):
        self.rooms, self._works, self._keep = rooms, works, keep
        self._got, self._into = received, into
        self._waiter: Future | None = None

    def wait(self) -> None:
        if self._waiter is not None:
            self._waiter.result()
        else:
            self._wait_for_works()
        self._keep, at = None, 0
        for room in map(_bytes, self._into):
            room.copy_(self._got[at : at + len(room)])
            at += len(room)

    def is_ready(self, patience_s: float) -> bool:
        """Return whether `wait` would return at once.

        gloo does not report whether a message has arrived, so a thread waits for it.
        """
        if not self._works:
            return True
        if self._waiter is None:
            self._waiter = Future()
            threading.Thread(target=self._await, args=(self._waiter,), daemon=True).start()
        try:
            self._waiter.exception(patience_s)
        except TimeoutError:
            return False
        return True

    def _wait_for_works(self) -> None:
        for work in self._works:
            # gloo may still write into the buffers, which are read or freed next
            work.wait()

    def _await(self, waiter: Future) -> None:
        try:
            waiter.set_result(self._wait_for_works())
        except BaseException as error:  # it is the caller's
            waiter.set_exception(error)


class Peers:
    """Real peers, over a gloo group of the same ranks that nothing else uses."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        self._rank, self._size = rank, size
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout) if size > 1 else None

    def begin(self, sends: Parts, likes: Parts) -> Transfer:
        """Start an exchange in which sends[i] go to rank i, and tensors like likes[i] come from
        it.
        """
        rooms = [[torch.empty_like(x, memory_format=_DENSE) for x in parts] for parts in likes]
        # at the root of a broadcast there is no room
        for x, room in zip(sends[self._rank], rooms[self._rank], strict=False):
            room.view(-1).copy_(x.detach().reshape(-1))
        if self._size == 1:
            return Transfer(rooms)
        others = [i for i in range(self._size) if i != self._rank]
        going, coming = (
            [sum(x.nbytes for x in tensors) * (i in others) for i, tensors in enumerate(parts)]
            for parts in (sends, rooms)
        )
        # one collective whatever the call is: bytes of any dtype, any number to any rank
        parts = [_bytes(x.detach().clone(memory_format=_DENSE)) for i in others for x in sends[i]]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sum(coming), dtype=torch.uint8)
        work = self.gloo.alltoall_base(received, sent, coming, going)
        return Transfer(rooms, [work], sent, received, [x for i in others for x in rooms[i]])

    def post(self, messages: Sequence[Posted]) -> Transfer:
        """Post messages to and from peers; those of a pair match in order, as NCCL knows no
        tags.
        """
        rooms, works = [], []
        for direction, x, peer in messages:
            room = x.detach().clone(memory_format=_DENSE)
            rooms.append([room])
            function = self.gloo.send if direction == "send" else self.gloo.recv
            works.append(function([room], peer, 0))
        return Transfer(rooms, works, rooms)


class Mirror:
    """A stand-in for peers: one process is rank `rank` of `size`, and all others hold the same
    values.
    """

    gloo = None

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._sent: deque[Tensor] = deque()

    def begin(self, sends: Parts, likes: Parts) -> Transfer:
        messages_of_rank = sends[self._rank]
        rooms = [zip(messages_of_rank or parts, parts, strict=False) for parts in likes]
        return Transfer([[_fitted(x, like) for x, like in pairs] for pairs in rooms])

    def post(self, messages: Sequence[Posted]) -> Transfer:
        """Let a rank receive what it sent itself, in that order."""
        rooms = [[x.detach().clone()] for _, x, _ in messages]
        self._sent += [room for (direction, _, _), (room,) in zip(messages, rooms, strict=True)
                       if direction == "send"]  # fmt: skip
        for (direction, x, _), room in zip(messages, rooms, strict=True):
            if direction == "receive" and self._sent:
                room[0] = _fitted(self._sent.popleft(), x)
        return Transfer(rooms)


_DENSE = torch.contiguous_format


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _fitted(x: Tensor, like: Tensor) -> Tensor:
    """Return a copy of `x` in the shape of `like`: a mirrored rank uses its own slice for uneven
    ones, cut or filled up with zeros.
    """
    flat, number = x.detach().reshape(-1), like.numel()
    if len(flat) < number:
        flat = torch.cat([flat, flat.new_zeros(number - len(flat))])
    return flat[:number].clone().view(like.shape)


_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_NUM_FRAMES = 6
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = {
    torch.float16: 0x7DAD,
    torch.bfloat16: 0x7FAD,
    torch.float32: 0x7FADDEAD,
    torch.float64: 0x7FF5DEADDEADDEAD,
    torch.bool: 1,
    torch.uint8: 0xAD,
    torch.int8: 0x5D,
    torch.int16: 0x5EAD,
    torch.int32: 0x3EADDEAD,
    torch.int64: 0x3EADDEAD,
}
_OTHER = 0x7F  # NaN in each of the float8 formats


GIVEN_BACK = "its memory was given back while in flight"
READ = "it was read before wait()"
WRITTEN = "it was written to while in flight"
CHANGED = "its input was changed while in flight"

own_operations = torch._C._DisableTorchDispatch
"""Context in which no mode sees the operations of this transport."""


def span(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of `x` and of the first byte after it. The range is
    empty if `x` has gaps, which may belong to other tensors.
    """
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    if reach != x.numel():
        return 0, 0
    return x.data_ptr(), x.data_ptr() + reach * x.itemsize


class Guard:
    """A tensor that a call in flight reads, or (`written`) writes."""

    __slots__ = ("_before", "_nbytes", "_version", "pointer", "shape", "span", "written", "x")

    def __init__(self, x: Tensor, written: bool):
        # for others to be counted: a tensor of its own that shares memory and version counter
        self.x = x.detach()
        self.written, self.shape, self.span = written, tuple(x.shape), span(x)
        storage = x.untyped_storage()
        self._nbytes, self.pointer = storage.nbytes(), storage.data_ptr()
        # tensors of one storage share a counter: of this one only where it is all of it
        alone = x.numel() * x.itemsize == self._nbytes and not x.is_inference()
        self._version = x._version if alone else None

    def is_shared(self, own_count: int) -> bool:
        """Return whether anything besides the call's `own_count` tensors holds the memory."""
        wrapper = 1  # Python's, through which one asks
        storage = self.x.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > own_count + wrapper

    def hold(self) -> None:
        """Keep the current contents."""
        self._before = _bits(self.x).clone()

    def poison(self) -> None:
        """Fill the output with a pattern: nobody may read or write it until the call ends."""
        if self.written:
            _bits(self.x).fill_(_pattern(self.x))

    def lift(self) -> str:
        """Check and remove the pattern; return what happened to the tensor meanwhile, or ""."""
        storage = self.x.untyped_storage()
        if storage.nbytes() < self._nbytes or storage.data_ptr() != self.pointer:
            return GIVEN_BACK
        if self.written:
            bits = _bits(self.x)
            touched = not bool((bits == _pattern(self.x)).all())
            bits.copy_(self._before)
            if touched or self._version not in (None, self.x._version):
                return WRITTEN
        return ""

    def compare(self) -> str:
        """Return a fault of a tensor that the call only reads, once all poison is gone; "" if there
        is none.
        """
        same = self._version in (None, self.x._version)
        if same and torch.equal(_bits(self.x), self._before):
            return ""
        return CHANGED


class LateCall:
    """One call from its issue to its delivery. finish: writes the transfer's results."""

    def __init__(
        self,
        name: str,
        guards: Sequence[Guard],
        transfer: Transfer,
        finish: Callable[[Transfer, Tensors], None],
    ):
        self.name, self.guards, self.transfer, self._finish = name, guards, transfer, finish
        self.where = issued_at()
        self.done = self.waited = False
        self.handle: Callable[[], object] = lambda: None
        for guard in guards:  # all of them first, for one may be part of another
            guard.hold()
        for guard in guards:
            guard.poison()

    def deliver(self) -> None:
        """Wait for the data and write the results; RaceError if the tensors were touched."""
        # the data come with the other members' calls
        self.transfer.wait()
        self.done = True
        with own_operations():
            for guard in self.guards:
                self._refuse(guard, guard.lift())
            for guard in self.guards:
                if not guard.written:
                    self._refuse(guard, guard.compare())
            self._finish(self.transfer, [guard.x for guard in self.guards if guard.written])
            self.guards, self.transfer = (), Transfer(())

    @property
    def is_lost(self) -> bool:
        """Return whether nobody can wait for the call, but somebody still has its output."""
        if self.done or self.waited or self.handle() is not None:
            return False
        memory = Counter(guard.pointer for guard in self.guards)
        return any(g.written and g.is_shared(memory[g.pointer]) for g in self.guards)

    def _refuse(self, guard: Guard, misuse: str) -> None:
        if misuse:
            raise RaceError(f"{self.name}, tensor of shape {guard.shape}: {misuse}{self.where}")


class LateWork(OwnWork):
    """Handle of a call. settle: completes the call. call: None once that is done."""

    def __init__(self, call: LateCall | None, settle: Callable[[], None], result: Tensors):
        super().__init__(result)
        if call is not None:
            call.handle = weakref.ref(self)
        self.call, self._settle, self._asked = call, settle, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            name = "a call" if self.call is None else self.call.name
            raise RaceError(
                f"{name}: wait(timeout={timeout}) blocks the host on NCCL until the device is "
                f"done; call wait() and leave the limit to the group{issued_at()}"
            )
        if self.call is not None:
            self.call.waited = True
            self._settle()
        return True

    def is_completed(self) -> bool:
        """Answer as a device does when queried: not at first, then as soon as the peers have
        come.
        """
        call = self.call
        if call is None or call.done:
            return True
        if not self._asked:
            self._asked = True
        elif call.transfer.is_ready(0.0):
            # the transfer has ended, so this returns at once and delivers the result
            self.wait()
        return call.done

    def is_success(self) -> bool:
        return self.call is None or self.call.done

    def result(self) -> list[Tensor]:
        return self._result


def issued_at() -> str:
    """Return the innermost lines of the program that led here, for a message."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < _NUM_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith((_HERE, HERE, _TORCH)):
            lines.append(f"\n  at {code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return "".join(lines)


def _bits(x: Tensor) -> Tensor:
    """Return the same memory as integers; `.data` has a version counter of its own."""
    data = torch.view_as_real(x.data) if x.is_complex() else x.data
    return data.view(_BITS[data.itemsize])


def _pattern(x: Tensor) -> int:
    dtype = x.dtype.to_real() if x.is_complex() else x.dtype
    return _POISON.get(dtype, _OTHER)
