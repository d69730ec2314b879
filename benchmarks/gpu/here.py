"""Where a part runs: the one GPU or, small, the CPU; and how time is taken there."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.common import take_turns
from benchmarks.turns import spread_ms
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc


@dataclass(frozen=True)
class Here:
    device: torch.device

    @classmethod
    def find(cls) -> "Here":
        found = torch.cuda.is_available()
        return cls(torch.device("cuda", 0) if found else torch.device("cpu"))

    @property
    def small(self) -> bool:
        return self.device.type == "cpu"

    def join(self) -> None:
        """A world of one, over NCCL on a GPU."""
        setup_distributed()
        tpc.setup_process_groups([("data", 1)])

    def leave(self) -> None:
        tpc.destroy()
        leave()

    def sync(self) -> None:
        if not self.small:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int = 1) -> float:
        """Of one call: from an idle device until it is idle again."""
        self.sync()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        self.sync()
        return (time.perf_counter() - begin) / times

    def median_s(self, work: Callable[[], object], rounds: int = 5, times: int = 1) -> float:
        work()
        return statistics.median(self.seconds(work, times) for _ in range(rounds))

    def in_turns(
        self, sides: Mapping[str, Callable[[], object]], rounds: int, times: int
    ) -> dict[str, Mapping]:
        """By side the spread of a call's milliseconds, each round `times` calls; on a CPU of 2
        rounds."""
        rounds = 2 if self.small else rounds
        taken = take_turns([*sides], (), rounds, lambda side: self.seconds(sides[side], times))
        return {
            side: spread_ms([statistics.median(x) for x in took]) for side, took in taken.items()
        }

    def issue_s(self, work: Callable[[], object], rounds: int = 5) -> float:
        """What the host takes for a call, the device left aside."""
        taken = []
        work()
        for _ in range(rounds):
            self.sync()
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
        self.sync()
        return statistics.median(taken)

    def sleep(self, seconds: float) -> None:
        """Keep the current stream busy for about so long; the host goes on."""
        if not self.small:
            torch.cuda._sleep(int(seconds * cycles_per_s()))


_rate: list[float] = []


def cycles_per_s() -> float:
    """Of `torch.cuda._sleep`, measured once."""
    if not _rate:
        torch.cuda._sleep(1000)
        cycles = 10_000_000
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        _rate.append(cycles / (begin.elapsed_time(end) / 1000))
    return _rate[0]
