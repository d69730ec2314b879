"""How long a save beside the steps keeps a GPU's host and stream, beside a pinned copy."""

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.save import SharedFolder, save, start_save
from torchdistpackage.checkpoint.snapshot import HostCopies
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.layout.layout import Layout

WIDTH, SMALL_WIDTH = 4096, 64
LAYERS = 16
ROUNDS = 4
HOST_LIMIT_S, STREAM_LIMIT_S = 0.020, 0.020
"""What the host may take to begin a save, and the stream beyond a bare copy."""


def measure(here: Here, found: Found) -> None:
    here.join()
    with found.case("a save beside the steps"):
        _saves(here, found)
    here.leave()


def _saves(here: Here, found: Found) -> None:
    width = SMALL_WIDTH if here.small else WIDTH
    shape = (width, width)
    params = {
        f"w{i}": (nn.Parameter(torch.randn(shape, device=here.device)), Layout(f"w{i}", shape))
        for i in range(LAYERS)
    }
    host = [torch.empty(shape, pin_memory=not here.small) for _ in params]
    how = {"params": params, "topology": tpc.topology, "rank": 0, "tokens": 0}

    def copy() -> None:
        for buffer, (x, _) in zip(host, params.values(), strict=True):
            buffer.copy_(x.detach(), non_blocking=True)

    copies = HostCopies()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = SharedFolder(folder, Retention())
        start_save(target, step=1, copies=copies, **how).finish()  # allocates
        copy_s = here.median_s(copy, ROUNDS)
        host_s, stream_s, equal = list[float](), list[float](), list[bool]()
        for step in range(2, 2 + ROUNDS):
            here.sync()
            before = [x.detach().cpu() for x, _ in params.values()]
            begin = time.perf_counter()
            pending = start_save(target, step=step, copies=copies, **how)
            host_s.append(time.perf_counter() - begin)
            with torch.no_grad():  # what the next step does to the weights
                for x, _ in params.values():
                    x.add_(1)
            here.sync()
            stream_s.append(time.perf_counter() - begin)
            path = pending.finish()
            _fill(params, -1.0)
            load(path, **{k: v for k, v in how.items() if k != "tokens"})
            pairs = zip(before, params.values(), strict=True)
            equal.append(all(torch.equal(old, x.detach().cpu()) for old, (x, _) in pairs))
        save_s = here.median_s(lambda: save(folder, step=9, **how), 2)
    found.judge("what was saved is the state before the step", all(equal), f"{len(equal)} saves")
    size_mb = sum(x.nbytes for x, _ in params.values()) / 1e6
    numbers = {"host_s": min(host_s), "stream_s": min(stream_s), "copy_s": copy_s}
    found.judge_time(
        "the host is kept",
        min(host_s) < HOST_LIMIT_S,
        f"{min(host_s) * 1e3:.1f} ms for {size_mb:.0f} MB, at most {HOST_LIMIT_S * 1e3:.0f} ms",
        **numbers,
    )
    found.judge_time(
        "the stream is kept",
        min(stream_s) < copy_s + STREAM_LIMIT_S,
        f"{min(stream_s) * 1e3:.1f} ms, at most a pinned copy ({copy_s * 1e3:.1f} ms) "
        f"+ {STREAM_LIMIT_S * 1e3:.0f} ms",
        **numbers,
    )
    found.show("a save in turn", f"{save_s * 1e3:.0f} ms", save_s=save_s)


def _fill(params: dict[str, tuple[nn.Parameter, Layout]], value: float) -> None:
    with torch.no_grad():
        for x, _ in params.values():
            x.fill_(value)
