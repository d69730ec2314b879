"""Plant one fault in one rank at one moment of its run: the data source of the fault matrix.

One rule: nothing of the package is told of the fault. The rank does to itself what the world would
do to it, at the change of phase that `Phases` notes anyway, and first writes down when it did.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness.stragglers.compare import Phases
from torchdistpackage.harness.watchdog import HangWatchdog
from torchdistpackage.train import worker
from torchdistpackage.train.step import Trainer

STEP = 4
"""The step in which a fault comes, after whose last phase the run validates and saves."""
PHASES = {
    "start": ("", 0),
    "first step": ("data", 1),
    "forward": ("forward", STEP),
    "backward": ("backward", STEP),
    "reduce": ("reduce", STEP),
    "save": ("save", STEP),
    "validation": ("validate", STEP),
    "end": ("", -1),
}
"""Name of `Phases` and step of each moment; `start` is before the first, `end` after the last."""
SLOW_S = 0.25
SLOW_LIMIT_S = 6.0
"""Limit of a validation or a save in the matrix; a run allows ten minutes."""
JUMP_S = 3600.0


class Planted:
    """Random ids, and the fault `fault` on `rank` in `phase`.

    note: file for the time of it.
    seed: decides what the fault leaves open, such as the bit that flips.
    """

    def __init__(
        self, seq_len: int, vocab: int, fault: str, phase: str, rank: int, note: str, seed: int = 0
    ):
        self.seq_len, self.vocab = seq_len, vocab
        if fault and dist.get_rank() == rank:
            _Plant(fault, phase, Path(note), random.Random(seed))

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        mix = (seed * 7919 + step) * 31 + (split == "val")
        draw = torch.Generator().manual_seed(mix * 1009 + first + data_index * per_rank)
        ids = torch.randint(self.vocab, (per_rank, self.seq_len + 1), generator=draw)
        return ids[:, :-1], ids[:, 1:].clone()


def limit_slow_parts() -> None:
    """Give the start, a validation and a save `SLOW_LIMIT_S`; of the process that forks ranks."""
    make = HangWatchdog.__init__

    def limited(self: HangWatchdog, *args: Any, **more: Any) -> None:
        make(self, *args, **more | {"slow_timeout_s": SLOW_LIMIT_S})
        self.start_timeout_s = SLOW_LIMIT_S

    HangWatchdog.__init__ = limited  # type: ignore[method-assign]


if os.environ.get("TDP_FAULT_MATRIX"):
    limit_slow_parts()


class _Plant:
    """Strikes once; a fault that lasts goes on from there."""

    def __init__(self, fault: str, phase: str, note: Path, draw: random.Random):
        self.fault, self.note, self.draw = fault, note, draw
        self.name, self.step = PHASES[phase]
        self.struck = False
        self.at_step = 0
        self.trainer: Trainer | None = None
        self.later: list[Callable[[], object]] = []
        go_to, train_step, finish = Phases._go_to, Trainer.train_step, worker.finish

        def on_phase(phases: Phases, name: str) -> None:
            go_to(phases, name)
            if name and name == self.name and self.at_step == self.step:
                self.strike()
            elif self.struck and self.fault == "slow rank" and name == self.name:
                time.sleep(SLOW_S)

        def on_step(trainer: Trainer, step: int, **more: Any) -> Any:
            self.trainer, self.at_step = trainer, step
            while self.later:
                self.later.pop()()
            return train_step(trainer, step, **more)

        def on_finish(*args: Any, **more: Any) -> None:
            if self.step < 0:
                self.strike()
            finish(*args, **more)

        Phases._go_to = on_phase  # type: ignore[method-assign]
        Trainer.train_step = on_step  # type: ignore[method-assign]
        worker.finish = on_finish
        if self.step == 0:
            self.name = "data"  # where a fault that lasts shows
            self.strike()

    def strike(self) -> None:
        if self.struck:
            return
        self.struck = True
        facts = {"at_s": time.time(), "pid": os.getpid()}
        self.note.with_suffix(".new").write_text(json.dumps(facts))
        self.note.with_suffix(".new").replace(self.note)
        getattr(self, f"_{self.fault.replace(' ', '_')}")()

    # -- what ends, stops or blocks the process -----------------------------------------------

    def _killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _out_of_memory(self) -> None:
        """In a cgroup that the caller has made; the kernel kills the process that passes its
        limit."""
        Path(os.environ["TDP_FAULT_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
        held = []
        while True:
            held.append(b"x" * (8 << 20))

    def _os_exit(self) -> None:
        os._exit(3)

    def _exception(self) -> None:
        raise ValueError("a planted exception")

    def _hang(self) -> None:
        while True:
            time.sleep(0.1)

    # -- calls ----------------------------------------------------------------------------------

    def _lone_collective(self) -> None:
        primitives.all_reduce(torch.ones(3), tpc.get_group("global") if tpc.is_set else _world())

    def _skipped_collective(self) -> None:
        self._next_all_reduce(lambda call, x, *rest: x)

    def _wrong_shape(self) -> None:
        def other(call: Callable[..., Any], x: torch.Tensor, *rest: Any) -> Any:
            call(torch.cat([x.flatten(), x.new_zeros(7)]), *rest)
            return x

        self._next_all_reduce(other)

    def _next_all_reduce(self, instead: Callable[..., Any]) -> None:
        """Replace the next all-reduce that is waited for at once, which has no handle."""
        call, barrier = primitives.all_reduce, primitives.barrier

        def at_barrier(*args: Any) -> None:
            """At the end no all-reduce comes any more."""
            primitives.barrier = barrier
            instead(call, torch.zeros(1), tpc.get_group("global"))

        if self.step < 0:
            primitives.barrier = at_barrier

        def once(x: torch.Tensor, *rest: Any, **more: Any) -> Any:
            if more or len(rest) > 2:
                return call(x, *rest, **more)
            primitives.all_reduce = call
            return instead(call, x, *rest)

        primitives.all_reduce = once

    # -- what makes slow ------------------------------------------------------------------------

    def _slow_rank(self) -> None:
        time.sleep(SLOW_S)

    def _slow_disk(self) -> None:
        sync = os.fsync

        def slow(fd: int) -> None:
            time.sleep(1.0)
            sync(fd)

        os.fsync = slow

    # -- disks, nodes, networks -----------------------------------------------------------------

    def _full_disk(self) -> None:
        """On a small disk of the run's own, which the caller has mounted."""
        fd = os.open(self.note.parent / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    os.write(fd, b"x" * size)
            except OSError:
                continue

    def _dead_node(self) -> None:
        self._unplugged()
        os.kill(os.getpid(), signal.SIGKILL)

    def _unplugged(self) -> None:
        """Cut the interface of the network namespace that this rank has for itself."""
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True, timeout=10)

    # -- numbers ----------------------------------------------------------------------------------

    def _nan(self) -> None:
        """In the gradient of one parameter from now on, as of a device that computes wrongly."""
        self._with_model(lambda: self._parameter().register_hook(lambda grad: grad * float("nan")))

    def _corrupted_weight(self) -> None:
        def flip() -> None:
            weight = self._parameter().data.flatten()
            index = self.draw.randrange(weight.numel())
            bits = weight[index : index + 1].view(torch.int32)
            bits ^= 1 << self.draw.randrange(20, 23)

        self._with_model(flip)

    def _parameter(self) -> torch.nn.Parameter:
        assert self.trainer is not None
        return self.draw.choice([p for p in self.trainer.stage.parameters() if p.dim() == 2])

    def _with_model(self, do: Callable[[], object]) -> None:
        if self.trainer is None:
            self.later.append(do)
        else:
            do()

    def _clock_jump(self) -> None:
        jump_s = self.draw.choice([-JUMP_S, JUMP_S])
        clock, clock_ns = time.time, time.time_ns
        time.time = lambda: clock() + jump_s
        time.time_ns = lambda: clock_ns() + int(jump_s * 1e9)


def _world() -> Any:
    return dist.group.WORLD
