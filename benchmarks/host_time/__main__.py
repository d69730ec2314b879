"""What the host needs to issue a step, by this package and by torch's own machinery.

    python -m benchmarks.host_time                           two minutes, its JSON and its page
    python -m benchmarks.host_time --parts block --rounds 5

Two ranks, one thread each, over loopback, and tensors so small that nothing but the host's work is
left. Measured is the processor time of the calling thread, so waiting for a peer does not count,
and other work on the machine hardly does. Sides take turns; ratios are of the same round.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch.distributed as dist

from benchmarks.common import local, take_turns, write
from benchmarks.host_time.page import RESULTS, write_page
from benchmarks.host_time.sides import NUM_MICROBATCHES, PARTS
from benchmarks.host_time.train import measured
from torchdistpackage.comm.runtime import leave, setup_distributed

PRELOAD = ("torch", "torch.distributed.fsdp", "benchmarks.host_time.sides")
WARM_UP_STEPS, NUM_STEPS = 6, 5
PEER_BAR, BY_HAND_BAR, TRAIN_BAR_US = 1.0, 1.3, 300.0
TRAIN = "tdp train"
OF_PEER = "of torch's"


def rank_main(parts: Sequence[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By part and side, us a step of this rank's thread, a median for each round."""
    setup_distributed()
    found = {}
    for part in parts:
        steps: dict[str, Callable[[], object]] = {}
        share = NUM_MICROBATCHES if part.startswith("microbatch") else 1
        for side, make in PARTS[part].items():
            steps[side] = make()
            for _ in range(WARM_UP_STEPS):
                steps[side]()
        taken = take_turns([*steps], (), rounds, lambda side, steps=steps: turn_us(steps[side]))
        found[part] = {side: [us / share for (us,) in turns] for side, turns in taken.items()}
        dist.barrier()
    leave()
    return found


def turn_us(step: Callable[[], object]) -> float:
    dist.barrier()
    times = []
    for _ in range(NUM_STEPS):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
    return median(times) * 1e6


def rows_of(part: str, ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, dict]:
    """By side the time and how it compares with torch's, means of the ranks round by round."""
    us = {
        side: [sum(one) / len(ranks) for one in zip(*(rank[side] for rank in ranks), strict=True)]
        for side in ranks[0]
    }
    peer = [*us][1]
    return {
        side: {
            "us": round(median(times), 1),
            OF_PEER: round(median(a / b for a, b in zip(times, us[peer], strict=True)), 3),
            **(
                {"of by hand": round(median(map(_ratio, times, us["by hand"])), 3)}
                if "by hand" in us
                else {}
            ),
        }
        for side, times in us.items()
    }


def _ratio(a: float, b: float) -> float:
    return a / b


def failed_bars(parts: Mapping[str, Mapping[str, Mapping[str, float]]], own_us: float) -> list[str]:
    """A line for each bar that is missed."""
    missed = []
    for part, sides in parts.items():
        ours = [s for i, s in enumerate(sides) if i > 1 and s != "by hand"]
        for side in ours:
            for what, bar in ((OF_PEER, PEER_BAR), ("of by hand", BY_HAND_BAR)):
                if sides[side].get(what, 0.0) > bar:
                    missed.append(f"{part}, {side}: {sides[side][what]:.2f} {what}, bar {bar:.2f}")
    if own_us > TRAIN_BAR_US:
        missed.append(f"{TRAIN}: {own_us:.0f} us of its own a step, bar {TRAIN_BAR_US:.0f}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", type=lambda text: text.split(";"), default=[*PARTS, TRAIN])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    parts, own = dict(known.get("parts", {})), known.get("train", {})
    if chosen := [part for part in options.parts if part != TRAIN]:
        ranks = local(rank_main, chosen, options.rounds, preload=PRELOAD)
        parts |= {part: rows_of(part, [rank[part] for rank in ranks]) for part in chosen}
    if TRAIN in options.parts:
        own = {name: round(us, 1) for name, us in measured().items()}
    for part, sides in parts.items():
        print(f"\n{part:32}{'us':>9}{'/ torch':>9}{'/ by hand':>11}")
        for side, row in sides.items():
            hand = f"{row['of by hand']:11.2f}" if "of by hand" in row else ""
            print(f"{side:32}{row['us']:9.0f}{row[OF_PEER]:9.2f}{hand}")
    if own:
        print(f"\n{TRAIN}: {own['own']:.0f} us of its own in a step of {own['whole']:.0f}")
    if "by hand" in own:
        print(f"a bare loop that reads and logs: {own['by hand']:.0f}")
    missed = failed_bars(parts, own.get("own", 0.0))
    print("\nmissed: " + ("; ".join(missed) or "none"))
    found = {"unit": "us", "rounds": options.rounds, "parts": parts, "train": own, "missed": missed}
    write(options.json, found)
    if options.json == RESULTS:
        write_page(json.loads(RESULTS.read_text()))


if __name__ == "__main__":
    main()
