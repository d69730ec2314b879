"""One rank of several in one process: a back end whose other ranks hold what this one holds.

One rule: it uses streams as NCCL does. An asynchronous call runs on the group's own stream,
after an event of the current one, and `wait()` holds up the current stream and not the host; a
call that is not asynchronous runs on the current stream. So what reads too early reads too
early here too, only that both sides are kernels that `TORCH_CUDA_SANITIZER` sees. `late` keeps
the group's stream busy ahead of each call, with NaN in what the call will write. On the CPU a
call runs when it is issued.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.here import Here
from torchdistpackage.comm import groups
from torchdistpackage.comm.backends import Transport, register_transport
from torchdistpackage.comm.runtime import leave
from torchdistpackage.comm.tpc import tpc

NAME, HOST = "one_of_several", "one_of_several_on_host"
"""On the device, and for what is in host memory, where gloo would wait for the others."""
LATE_S = 0.002
_settings = {"late": False}


@contextmanager
def world(here: Here, size: int) -> Generator[None]:
    """The default group is of `size` ranks, of which this process is the first."""
    if NAME.upper() not in dist.Backend._plugins:
        for name in (NAME, HOST):
            dist.Backend.register_backend(
                name, partial(_create, name), extended_api=True, devices=["cpu", "cuda"]
            )
        kind = here.device.type
        register_transport(Transport(NAME, queued=True, averages=True, device_type=kind))
        register_transport(Transport(HOST))
    _Mirror.here = here
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=size)
    groups._on_cpu[dist.group.WORLD] = dist.new_group(backend=HOST)
    try:
        yield
    finally:
        groups._on_cpu.pop(dist.group.WORLD)
        if tpc.is_set:
            tpc.destroy()
        leave()


@contextmanager
def late() -> Generator[None]:
    """Collectives issued inside begin late."""
    _settings["late"] = True
    try:
        yield
    finally:
        _settings["late"] = False


class _Done(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _UnderWay(dist.Work):
    def __init__(self, end: torch.cuda.Event, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._end, self._kept = end, kept

    def wait(self, timeout: object = None) -> bool:
        torch.cuda.current_stream().wait_event(self._end)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        return self._end.query()


class _Mirror(dist.ProcessGroup):
    here: Here

    def __init__(self, backend: str, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._backend, self._group_name = backend, name
        on_host = self.here.small or backend == HOST
        self._stream = None if on_host else torch.cuda.Stream(self.here.device)

    def getBackendName(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return self._group_name

    def _go(
        self, run: Callable[[], object], writes: Sequence[Tensor], reads: Sequence[Tensor], opts
    ) -> dist.Work:
        writes = [x.detach() for x in writes]
        if self._stream is None or not getattr(opts, "asyncOp", False):
            run()
            return _Done()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if _settings["late"]:
                kept = [x.clone() for x in writes]
                for x in writes:
                    x.fill_(float("nan") if x.is_floating_point() else 1)
                self.here.sleep(LATE_S)
                for x, was in zip(writes, kept, strict=True):
                    x.copy_(was)
            run()
            end = torch.cuda.Event()
            end.record()
        return _UnderWay(end, [*writes, *reads])

    def allreduce(self, tensors: list[Tensor], opts=None) -> dist.Work:
        (x,) = tensors
        is_sum = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        return self._go(lambda: x.detach().mul_(self.size() if is_sum else 1), [x], [], opts)

    def broadcast(self, tensors: list[Tensor], opts=None) -> dist.Work:
        (x,) = tensors
        return self._go(lambda: x.detach().mul_(1), [x], [], opts)

    def _all_gather(self, out: Tensor, x: Tensor, opts=None) -> dist.Work:
        def run() -> None:
            mine = x.detach().reshape(-1).clone()
            out.detach().view(self.size(), -1).copy_(mine.expand(self.size(), -1))

        is_inside = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return self._go(run, [out], [] if is_inside else [x], opts)

    def _reduce_scatter(self, out: Tensor, x: Tensor, opts=None) -> dist.Work:
        def run() -> None:
            mine = x.detach().reshape(self.size(), -1)[self.rank()].clone()
            is_sum = opts is None or opts.reduceOp == dist.ReduceOp.SUM
            out.detach().view(-1).copy_(mine * (self.size() if is_sum else 1))

        return self._go(run, [x], [out], opts)

    # both are spelled in two ways: torch 2.11, and 2.13
    _allgather_base = all_gather_single = _all_gather
    _reduce_scatter_base = reduce_scatter_single = _reduce_scatter

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts=None) -> dist.Work:
        (parts,), (x,) = outs, ins

        def run() -> None:
            mine = x.detach().clone()
            for part in parts:
                part.detach().copy_(mine.view(-1)[: part.numel()].view_as(part))

        return self._go(run, parts, [x], opts)

    def barrier(self, opts=None) -> dist.Work:
        return _Done()


def _create(backend: str, options, _) -> _Mirror:
    return _Mirror(backend, options.group_rank, options.group_size, options.group_id)
