"""A step with Muon beside one with AdamW, by axis: bytes of each axis, and time.

    python -m benchmarks.muon --json benchmarks/results/muon.json

Two ranks of a GPT on gloo, a thread each. The two ways to iterate on split matrices and AdamW take
turns within a layout; ratios are medians of those of each round. Bytes are those that `tdp plan
--bytes` counts on the busiest rank.
"""

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.common import PRELOAD, in_turns, slowest, write
from benchmarks.pages import measured
from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.config.load import loads
from torchdistpackage.launch.workers import run_local
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.traffic import busiest
from torchdistpackage.train.build import build

RESULTS = Path(__file__).parent / "results" / "muon.json"
RECORD = RESULTS.with_suffix(".md")
MODEL = (
    *("model.layers=4", "model.dim=256", "model.heads=8", "model.vocab=512", "model.mlp=swiglu"),
    *("data.name=python_stdlib", "data.seq_len=128", "data.global_batch=8"),
    *("train.steps=1000", "train.eval_every=0", "train.check_replicas_every=0"),
)
EXPERTS = "model.moe.num_experts=4", "model.moe.top_k=2"
LAYOUTS = {
    "data": ("data=2",),
    "ZeRO 1": ("data=2", "zero=1"),
    "ZeRO 2": ("data=2", "zero=2"),
    "ZeRO 3": ("data=2", "zero=3"),
    "tensor": ("tensor=2",),
    "pipe": ("pipe=2",),
    "context": ("context=2",),
    "expert": ("data=2", "expert=2", *EXPERTS),
}
SIDES = {
    "adamw": ("optim.name=adamw",),
    "gather": ("optim.name=muon", "optim.muon_exchange=gather"),
    "together": ("optim.name=muon", "optim.muon_exchange=together"),
}


def sides_of(name: str) -> list[str]:
    """Return the sides of a layout: only tensor ranks split matrices."""
    return [side for side in SIDES if side != "together" or name == "tensor"]


def planned(name: str, side: str) -> Plan:
    keys = [x if x.startswith("model.") else f"parallel.{x}" for x in LAYOUTS[name]]
    degrees = [
        f"parallel.{axis}=1" for axis in ("data", "pipe") if f"{axis}=2" not in LAYOUTS[name]
    ]
    text = "launch: {local: {procs: null}}"
    return make_plan(loads(text, overrides=[*MODEL, *degrees, *keys, *SIDES[side]]), 2)


def rank_main(name: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the steps of each side, round by round."""
    rank = setup_distributed()[0]
    device = primitives.device_of(dist.group.WORLD)
    trainers = {side: build(planned(name, side), rank, device) for side in sides_of(name)}
    numbers = Counter[str]()

    def step(side: str) -> None:
        numbers[side] += 1
        trainers[side].train_step(numbers[side]).wait()

    sides = {side: lambda side=side: step(side) for side in trainers}
    times = in_turns(sides, rounds, dist.barrier)
    leave()
    return times


def bytes_by_axis(name: str, side: str) -> dict[str, int]:
    sent = Counter[str]()
    for call in busiest(planned(name, side))[1]:
        sent[call.axis] += int(call.num_bytes)
    return dict(sent)


def page(results: Mapping) -> str:
    """Return the record, as Markdown."""
    lines = [
        "# A step with Muon beside AdamW\n",
        f"`python -m benchmarks.muon`. {measured(results)}",
        "A GPT of 4 blocks, 256 wide, in float32 on two gloo ranks of one machine, a thread each;",
        "iterations in bfloat16. gather: each matrix that tensor ranks split goes to an owner;",
        "together: all iterate on their parts. A time is the slowest rank's, the ratio the median",
        "of rounds with the lower and upper quarter.\n",
        "| axis | exchange | AdamW, ms | Muon, ms | ratio | bytes of AdamW | bytes of Muon |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        low, middle, high = row["ratio"]
        lines.append(
            f"| {row['layout']} | {row['exchange']} | {row['adamw_ms']:.0f} | {row['muon_ms']:.0f} "
            f"| {middle:.2f} ({low:.2f} to {high:.2f}) | {_text(row['adamw_bytes'])} | "
            f"{_text(row['muon_bytes'])} |"
        )
    return "\n".join(lines) + "\n"


def _text(sent: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {number:,}" for axis, number in sent.items() if number > 4096)


def rows_of(name: str, rounds: int) -> list[dict]:
    env = {"OMP_NUM_THREADS": "1"}
    found = run_local(rank_main, (name, rounds), num_procs=2, env=env, preload=PRELOAD)
    times = slowest(found)
    rows: list[dict] = []
    for side in sides_of(name)[1:]:
        ratios = [a / b for a, b in zip(times[side], times["adamw"], strict=True)]
        rows.append(
            {
                "layout": name,
                "exchange": side if name == "tensor" else "none",
                "adamw_ms": statistics.median(times["adamw"]) * 1e3,
                "muon_ms": statistics.median(times[side]) * 1e3,
                "ratio": statistics.quantiles(ratios, n=4),
                "adamw_bytes": bytes_by_axis(name, "adamw"),
                "muon_bytes": bytes_by_axis(name, side),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the results and the record")
    parser.add_argument("--only", default="", help="the layout of this name alone")
    options = parser.parse_args(argv)
    names = [name for name in LAYOUTS if options.only in ("", name)]
    rows = [row for name in names for row in rows_of(name, options.rounds)]
    sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    write(options.json, {"rows": rows})
    if options.json is not None:
        RECORD.write_text(page(json.loads(options.json.read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
