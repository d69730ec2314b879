"""Placed programs: two branches on two ranks beside each alone, and what an operation costs.

Forward and backward of each; a branch alone is the same program without the other. The bar: both
together take at most 1.15 times the longer one. On a loaded machine two branches that compute also
share what is left of its cores, as two plain processes do (the limit in the same run); those that
are asleep for the same time show the program alone.
With one input of both, which is on the first rank, they overlap in `F.ahead()`.

A chain of two stages that are asleep 20 ms forward and 40 ms backward runs as a pipeline: the share
of a step in which the ranks did not sleep, beside the bubble that `simulate` says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import arguments, in_turns, local, rows, show, slowest, write

WIDTH, DEPTH, BATCH = 512, 12, 256
ASLEEP_S = 0.15
"""In the forward, and again in the backward."""
CHAIN_MS = (20, 40)
"""Of a stage of the chain and a microbatch, forward and backward."""
CHAIN_MICROBATCHES = (4, 8)


def asleep(forward_s: float, backward_s: float) -> tuple[Callable[[Any], Any], list[float]]:
    """(2 x after sleeping, as its gradient does; seconds of each sleep so far)."""
    import torch

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        slept.append(time.perf_counter() - begin)

    class Asleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            sleep(forward_s)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            sleep(backward_s)
            return gradients[0] * 2

    return Asleep.apply, slept


def branches(rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each side on this rank."""
    import torch
    from torch import nn

    from torchdistpackage import comm
    from torchdistpackage.comm.runtime import setup_distributed
    from torchdistpackage.compat.placed import DeviceFunctor

    setup_distributed("gloo")
    torch.manual_seed(0)
    F = DeviceFunctor(["cpu"] * 2)
    first, second = F.allocate_device(), F.allocate_device()

    def branch() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 8))

    right, left = on(F, second, branch()), on(F, first, branch())
    x = on(F, first, torch.randn(BATCH, WIDTH))
    y = on(F, second, torch.randn(BATCH, WIDTH))
    both_loss = on(F, first, lambda a, b: (a + b).square().mean())

    def step(loss: Any) -> None:
        loss.backward()
        loss.item()
        for module in (left, right):
            if module.is_here:
                module.zero_grad()

    world = program_group()
    sides: dict[str, Callable[[], object]] = {
        "left alone": lambda: step(left(x).square().mean()),
        "right alone": lambda: step(right(y).square().mean()),
        "both branches": lambda: step(both_loss(left(x), right(y))),
    }
    own_branch, own_input = branch(), torch.randn(BATCH, WIDTH)

    def plain(*ranks: int) -> None:
        """The branch of these ranks, without a program."""
        if F.program.rank in ranks:
            own_branch(own_input).square().mean().backward()
            own_branch.zero_grad()
        comm.barrier(world)

    sides |= {
        "plain, left alone": lambda: plain(0),
        "plain, right alone": lambda: plain(1),
        "plain, both branches": lambda: plain(0, 1),
    }
    sleeps = [on(F, place, asleep(ASLEEP_S, ASLEEP_S)[0]) for place in (first, second)]
    wanted = on(F, first, torch.ones(1, requires_grad=True))
    own = on(F, second, torch.ones(1, requires_grad=True))
    add = on(F, first, torch.add)

    def ahead(call: Callable[[], Any]) -> Any:
        with F.ahead():
            return call()

    sides |= {
        "asleep, left alone": lambda: step(sleeps[0](wanted)),
        "asleep, right alone": lambda: step(sleeps[1](own)),
        "asleep, both branches": lambda: step(add(sleeps[0](wanted), sleeps[1](own))),
        "asleep, one input": lambda: step(ahead(lambda: add(sleeps[0](wanted), sleeps[1](wanted)))),
    }
    times = in_turns(sides, rounds, lambda: comm.barrier(world))
    F.finish()
    return {**times, **operations(F, rounds)}


def chain(rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """(seconds of each step, and asleep in it, by number of microbatches; bubbles on paper)."""
    import torch
    from torch import nn

    from torchdistpackage import comm, simulate
    from torchdistpackage.comm.runtime import setup_distributed
    from torchdistpackage.compat.placed import DeviceFunctor, PlacedPipeline
    from torchdistpackage.schedule.actions import ActionKind

    forward_ms, backward_ms = CHAIN_MS
    sleep, slept = asleep(forward_ms / 1e3, backward_ms / 1e3)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sleep(x * self.scale)

    setup_distributed("gloo")
    F = DeviceFunctor(["cpu"] * 2)
    modules = [on(F, F.place(rank), Stage()) for rank in range(2)]
    times, on_paper = dict[str, list[float]](), dict[str, float]()
    for m in CHAIN_MICROBATCHES:
        pipe = PlacedPipeline(modules, loss=nn.functional.mse_loss, num_microbatches=m)
        x, name = torch.ones(m, 4), f"{m} microbatches"
        found = times[name], times[f"{name}, asleep"] = [], []
        for number in range(rounds + 1):
            comm.barrier(program_group())
            slept.clear()
            begin = time.perf_counter()
            pipe.step(x, targets=x)
            comm.barrier(program_group())
            if number > 0:  # shapes are agreed on in the first
                found[0].append(time.perf_counter() - begin)
                found[1].append(sum(slept))
        costs = {ActionKind.F: forward_ms, ActionKind.B: backward_ms}
        on_paper[name] = simulate(pipe.schedule, costs).bubble
    F.finish()
    return times, on_paper


def bubbles(rounds: int) -> dict[str, dict[str, float]]:
    """By number of microbatches the bubble of the chain, measured and on paper, in percent."""
    per_rank = local(chain, rounds)
    times, on_paper = [times for times, _ in per_rank], per_rank[0][1]
    found = {}
    for name, share in on_paper.items():
        busy = [sum(each) / 2 for each in zip(*(t[f"{name}, asleep"] for t in times), strict=True)]
        steps = [max(each) for each in zip(*(t[name] for t in times), strict=True)]
        measured = statistics.median(1 - b / s for b, s in zip(busy, steps, strict=True))
        found[name] = {"measured": measured * 100, "simulated": share * 100}
    return found


def on(F: Any, place: Any, obj: Any) -> Any:
    """`F(obj)` on a place."""
    with F.under(place):
        return F(obj)


def program_group() -> Any:
    from torchdistpackage.comm.creation import world

    return world()


def operations(F: Any, rounds: int, number: int = 200) -> dict[str, list[float]]:
    """Seconds of one operation and its backward: on its place, and from the other rank."""
    import torch

    first, second = F.place(0), F.place(1)
    with F.under(first):
        x = F(torch.ones(8, requires_grad=True))
        add = F(lambda a: a + 1)
    with F.under(second):
        far = F(lambda a: a + 1)

    def chain(functions: list[Any]) -> None:
        value = x
        for i in range(number):
            value = functions[i % len(functions)](value)
        value.sum().backward()
        value.detach().sum().item()

    found = {}
    for name, functions in (("operation", [add]), ("operation elsewhere", [far, add])):
        chain(functions)
        found[name] = []
        for _ in range(rounds):
            begin = time.perf_counter()
            chain(functions)
            found[name].append((time.perf_counter() - begin) / number)
    F.finish()
    return found


def ratios_of(
    times: dict[str, list[float]], kind: str = "", both: str = "both branches"
) -> list[float]:
    """Round by round, of both branches to the longer one alone."""
    names = ("left alone", "right alone", both)
    rounds = zip(*(times[kind + name] for name in names), strict=True)
    return [together / max(left, right) for left, right, together in rounds]


def main() -> None:
    options = arguments(__doc__)
    times = slowest(local(branches, options.rounds))
    ratios = ratios_of(times)
    table = rows(times)
    steps = {name: row for name, row in table.items() if "operation" not in name}
    show("a step of two branches", steps, "ms")
    each = {name: row for name, row in rows(times, 1e6).items() if name not in steps}
    show("an operation, forward and backward", each, "us")
    middle = statistics.median(ratios)
    asleep = statistics.median(ratios_of(times, "asleep, "))
    one = statistics.median(ratios_of(times, "asleep, ", "one input"))
    print("\nboth branches / the longer one alone (bar 1.15):", end=" ")
    print(f"{middle:.3f}, asleep {asleep:.3f}, of one input {one:.3f}")
    limit = statistics.median(ratios_of(times, "plain, "))
    print(f"two processes that compute the branches without a program: {limit:.3f}")
    forward_ms, backward_ms = CHAIN_MS
    print(f"\na chain of two stages, asleep {forward_ms} ms forward and {backward_ms} ms backward:")
    found = bubbles(options.rounds)
    for name, row in found.items():
        print(f"{name}: bubble {row['measured']:.1f} %, simulated {row['simulated']:.1f} %")
    results = {"steps_ms": steps, "operations_us": each, "ratios": ratios, "bubbles": found}
    write(options.json, results)


if __name__ == "__main__":
    main()
