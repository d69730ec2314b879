"""A folder is loaded over all ranks, one way after the other: time and memory of each."""

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.common import take_turns
from benchmarks.hugging_face.bars import BYTES, OURS, TRANSFORMERS
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.models.transformers_layout import shape_of_section
from torchdistpackage.models.transformers_model import load_weights, stage

_TOKENS = 16
_SAMPLE_S = 0.002
_BLOCK, _PAGE_BYTES = 1 << 24, 4096


def rank_main(small: str, folder: str, rounds: int) -> dict[str, Any]:
    """Of one rank, by side and round: when a turn began and ended, when the call in it did, the
    processor's time, and

    peak_bytes: resident at most, with pages of the files; private_bytes: without them; both beyond
    what was there before. held_bytes: of parameters. logits: of some tokens.
    """
    setup_distributed()
    tpc.setup_process_groups([("tensor", dist.get_world_size())])
    for load in SIDES.values():
        load(small)
    taken = take_turns([*SIDES], (), rounds, lambda side: turn(SIDES[side], folder))
    leave()
    return {side: [one for (one,) in found] for side, found in taken.items()}


def turn(load: Callable[[str], Any], folder: str) -> dict[str, Any]:
    """From nothing: what was freed has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, private = status("VmRSS"), _Peak("RssAnon")
    dist.barrier()
    begin, cpu_s = time.monotonic(), time.process_time()
    with private:
        made = load(folder)
        returned = time.monotonic()
        touch(made)
    end = time.monotonic()
    return {
        "turn": (begin, end),
        "call": (begin, returned),
        "cpu_s": time.process_time() - cpu_s,
        "peak_bytes": status("VmHWM") - before,
        "private_bytes": private.bytes,
        "held_bytes": sum(part.nbytes for part in parts(made)),
        "logits": logits(made),
    }


def ours(folder: str) -> nn.Module:
    shape = shape_of_section({"hf": folder}, _TOKENS, False)
    made = stage(shape, group=tpc.get_group("tensor"), dtype=torch.float32)
    load_weights(made, folder)
    return made


def transformers(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)


def its_bytes(folder: str) -> Tensor:
    """As many bytes as a rank's part, read one after another into fresh memory."""
    number, rank = dist.get_world_size(), dist.get_rank()
    files = sorted(Path(folder).glob("*.safetensors"))
    parts = [path.stat().st_size // number for path in files]
    into = torch.empty(sum(parts), dtype=torch.uint8)
    view, at = memoryview(into.numpy()), 0
    for path, size in zip(files, parts, strict=True):
        with path.open("rb", buffering=0) as file:
            end, where = at + size, rank * size
            while at < end:
                got = os.preadv(file.fileno(), [view[at : min(end, at + _BLOCK)]], where)
                at, where = at + got, where + got
    return into


SIDES: dict[str, Callable[[str], Any]] = {
    OURS: ours,
    TRANSFORMERS: transformers,
    BYTES: its_bytes,
}


def parts(made: nn.Module | Tensor) -> list[Tensor]:
    """What this rank holds of the weights."""
    if isinstance(made, Tensor):
        return [made]
    held = (p.detach() for p in made.parameters())
    return [p.to_local() if isinstance(p, DTensor) else p for p in held]


@torch.no_grad()
def touch(made: nn.Module | Tensor) -> None:
    """Write to each page of the weights, as training does.

    transformers maps files: a page is read when a weight is first used, and copied when it is
    first changed.
    """
    for part in parts(made):
        part.view(-1)[:: _PAGE_BYTES // part.itemsize].mul_(1)


@torch.no_grad()
def logits(made: nn.Module | Tensor) -> Tensor | None:
    """(tokens, vocabulary), the same on all ranks, by which sides are compared."""
    if isinstance(made, Tensor):
        return None
    ids = torch.arange(_TOKENS)[None]
    found = made.eval()(ids)
    return (found if isinstance(found, Tensor) else found.logits)[0]


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024


class _Peak:
    """The most of a line of the status beyond where it began, seen every 2 ms inside `with`."""

    def __init__(self, name: str):
        self._name, self._end, self.bytes = name, threading.Event(), 0
        self._before = status(name)
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            self.bytes = max(self.bytes, status(self._name) - self._before)
