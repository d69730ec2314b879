"""What takes several ranks: the same numbers as one process, and times that depend on a peer.

Where there are fewer GPUs than ranks, several share one (`launch.share_gpus`), and no time is
judged. On the CPU ranks over gloo show that the script runs. A case that hangs is ended alone, and
what was run is kept, so that a run with `--resume` has the rest.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu import shared_bodies as bodies
from benchmarks.gpu.here import Here, cycles_per_s
from benchmarks.gpu.rows import Found, Status
from benchmarks.gpu.shared_cases import TESTS, cases
from benchmarks.gpu.shared_ranks import MOST as MOST_RANKS
from benchmarks.gpu.shared_ranks import DeviceRanks
from torchdistpackage.comm import primitives
from torchdistpackage.comm.nccl_library import loaded_nccl
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.environment.gpu_sharing import too_old
from torchdistpackage.harness.pool import RankPool
from torchdistpackage.launch.workers import run_local
from torchdistpackage.parallel.pipeline.pipeline import Pipeline
from torchdistpackage.train.job import PRELOAD

MOST, WIDTH, ROWS, STEPS = 4, 32, 64, 4
CLOSE = 1e-11
"""Sums of a few thousand products in float64, added in another order."""
BIG, SMALL = 2**26, 2**12
"""Elements of what is scattered."""
UNALIGNED = 1.05
"""What slices that begin anywhere may cost before aligning them pays."""
SLOW_S, MICROBATCHES = 0.02, 8
LEAST_S = 30.0
"""Without so many seconds the parts that measure do not begin."""


def measure(here: Here, found: Found) -> None:
    num_gpus = torch.cuda.device_count()
    problem = "" if here.small else too_old(loaded_nccl(), 2)
    if problem and num_gpus == 1:
        found.leave("several ranks", f"one GPU is visible, and {problem}")
        return
    number = 2 if here.small or num_gpus == 1 else min(num_gpus, MOST)
    measures: dict[str, Callable[[Here, Found, int], object]] = {
        f"data parallel, {number} ranks": _data_parallel,
        f"Pipeline, {number} stages": _pipeline,
        "slices that begin anywhere": _slices,
        "stages behind a slow one": _slow_stage,
    }
    if find_spec("pytest") is None:
        problem = "pytest is not installed, whose tests they are"
    if problem:
        found.leave("cases of the parity matrix", problem)
    else:
        run_cases(here, found)
    for name, run in measures.items():
        if found.choice.wants(name) and found.choice.left_s > LEAST_S:
            with found.case(name):
                run(here, found, number)


def run_cases(here: Here, found: Found) -> None:
    """The cases that are wanted and that a run before does not have, until the time is over."""
    every = cases(on_gpu=not here.small)
    wanted = [case for case in every if found.choice.wants(case.name)]
    if here.small and not found.choice.pattern:
        wanted = [case for case in wanted if case.by_default]
    wanted = [case for case in wanted if not found.is_known(case.name)]
    num_left = 0
    tests = (path.partition(":")[0] for path in TESTS.values())
    preload = [*PRELOAD, DeviceRanks.__module__, bodies.__name__, *tests]
    if any(case.kind == "lora" for case in wanted) and find_spec("transformers"):
        preload.append("transformers.models.llama.modeling_llama")
    with tempfile.TemporaryDirectory() as folder, RankPool(MOST_RANKS, preload=preload) as pool:
        ranks = DeviceRanks(Path(folder), pool)
        for number, case in enumerate(wanted):
            if found.choice.left_s < case.limit_s:
                num_left += 1
                continue
            ranks.limit_s = case.limit_s
            began_s = time.monotonic()
            with found.case(case.name):
                text = case.run(ranks)
                seconds = time.monotonic() - began_s
                found.judge(case.name, True, f"{text}; {seconds:.1f} s", seconds=seconds)
            if case.is_base and found.rows[-1].status == Status.FAILED:
                num_left = len(wanted) - number - 1
                break
    if num_left:
        found.leave("other cases", f"{num_left} are left; --resume runs them, and keeps these")


def _data_parallel(here: Here, found: Found, number: int) -> None:
    for each in zip(*_ranks(number, _distances), strict=True):
        name, off = each[0][0], max(off for _, off in each)
        found.judge(f"{name}, {number} ranks", off < CLOSE, f"off by {off:.1e}", off=off)


def _pipeline(here: Here, found: Found, number: int) -> None:
    off = max(_ranks(number, _pipeline_distance))
    found.judge(f"Pipeline, {number} stages", off < CLOSE, f"loss off by {off:.1e}", off=off)


def _slices(here: Here, found: Found, number: int) -> None:
    size = SMALL if here.small else BIG
    even_s, odd_s = (max(each) for each in zip(*_ranks(number, _scattered, size), strict=True))
    ratio = odd_s / even_s
    text = f"{ratio:.3f} of the time of aligned ones, {1e3 * even_s:.3f} ms"
    judge = found.judge_time if torch.cuda.device_count() >= number else _shown(found)
    judge("slices that begin anywhere", ratio < UNALIGNED, text, ratio=ratio)


def _slow_stage(here: Here, found: Found, number: int) -> None:
    step_s, least_s = _ranks(number, _slow_last)[0]
    text = f"{1e3 * step_s:.1f} ms a step where the slow stage alone takes {1e3 * least_s:.1f}"
    found.show("stages behind a slow one", text, ratio=step_s / least_s)


def _shown(found: Found) -> Callable[..., None]:
    """A time of ranks that share a GPU is judged by nobody."""
    return lambda name, holds, text, **numbers: found.show(name, text, **numbers)


def _ranks(number: int, work: Callable[..., object], *args: object) -> list:
    return run_local(in_a_rank, (work.__name__, args), num_procs=number, preload=PRELOAD)


def in_a_rank(name: str, args: Sequence[object]) -> object:
    """In a rank."""
    setup_distributed(share_gpus=True)
    try:
        return globals()[name](*args)
    finally:
        if tpc.is_set:
            tpc.destroy()
        leave()


def _device() -> torch.device:
    return primitives.device_of(dist.group.WORLD)


def _seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Median, from an idle device until it is idle again."""
    wait = torch.cuda.synchronize if _device().type == "cuda" else lambda: None
    taken = []
    for _ in range(rounds + 2):
        wait()
        primitives.barrier()
        begin = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[2:])


# -- the same numbers ---------------------------------------------------------------------


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
    return nn.Sequential(*layers).to(_device(), torch.float64)


def _batch() -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS * 12, WIDTH, generator=draw, dtype=torch.float64).to(_device())


def _sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def _naive(net: nn.Module):
    wrapped = NaiveDDP(net, bucket_cap_mb=0.02)
    return wrapped, _sgd(wrapped)


def _zero(net: nn.Module, stage: int):
    return net, ZeroOptimizer(_sgd(net), net, stage=stage, bucket_cap_mb=0.02)


BUILDS = {
    "NaiveDDP": _naive,
    "ZeRO 1": partial(_zero, stage=1),
    "ZeRO 2": partial(_zero, stage=2),
    "ZeRO 3": partial(_zero, stage=3),
}


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def _distances() -> list[tuple[str, float]]:
    """Largest of a parameter from that of one process that has the whole batch, by way."""
    rank, number = _place()
    tpc.setup_process_groups([("data", number)])
    whole, x = _net(), _batch()
    _train(whole, _sgd(whole), x)
    found = []
    for name, build in BUILDS.items():
        mine = _net()
        net, optimizer = build(mine)
        _train(net, optimizer, x.chunk(number)[rank])
        getattr(optimizer, "finish", lambda: None)()
        pairs = zip(mine.parameters(), whole.parameters(), strict=True)
        found.append((name, max(float((a - b).detach().abs().max()) for a, b in pairs)))
    return found


def _place() -> tuple[int, int]:
    """My rank, and how many there are."""
    return dist.get_rank(), dist.get_world_size()


def _stages(number: int) -> nn.Sequential:
    """Those of this rank."""
    rank, each = dist.get_rank(), 8 // number
    return _net()[rank * each : (rank + 1) * each if rank < number - 1 else 8]


def _loss(y: Tensor) -> Tensor:
    return y.square().mean()


def _pipeline_distance() -> float:
    _, number = _place()
    tpc.setup_process_groups([("pipe", number)])
    whole, x = _net(), _batch()
    optimizer = _sgd(whole)
    stage = _stages(number)
    pipe, own = Pipeline(stage, loss=_loss, num_microbatches=4), _sgd(stage)
    off = 0.0
    for _ in range(STEPS):
        optimizer.zero_grad()
        own.zero_grad()
        expected = _loss(whole(x))
        expected.backward()
        off = max(off, float((pipe.step(x) - expected).detach().abs()))
        optimizer.step()
        own.step()
    return off


# -- times --------------------------------------------------------------------------------


def _scattered(size: int) -> tuple[float, float]:
    """Of a sum to owners in bf16: aligned slices, and such of an odd number of elements."""
    number = dist.get_world_size()
    found = []
    for each in (size // number, size // number + 1):
        x = torch.ones(each * number, device=_device(), dtype=torch.bfloat16)
        sum_ = partial(primitives.reduce_scatter, x, dist.group.WORLD)
        found.append(_seconds(sum_))
    return found[0], found[1]


class _Slow(nn.Module):
    """Keeps its device, or its host, busy."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            torch.cuda._sleep(int(SLOW_S * cycles_per_s()))
        else:
            time.sleep(SLOW_S)
        return x


def _slow_last() -> tuple[float, float]:
    """Seconds of a step, and what the slow last stage takes by itself."""
    rank, number = _place()
    tpc.setup_process_groups([("pipe", number)])
    stage = _stages(number)
    if rank == number - 1:
        stage = nn.Sequential(_Slow(), *stage)
    pipe = Pipeline(stage, loss=_loss, num_microbatches=MICROBATCHES)
    step_s = _seconds(lambda: pipe.step(_batch()), rounds=5)
    alone_s = _seconds(
        lambda: [_Slow()(torch.ones(1, device=_device())) for _ in range(MICROBATCHES)], 3
    )
    return step_s, alone_s
