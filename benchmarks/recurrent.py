"""A recurrent layer over context ranks: its states cross them, or each gets the whole sequence.

    python -m benchmarks.recurrent --json benchmarks/results/recurrent.json

Two gloo ranks, a thread each; forward and backward of one layer of transformers in float32, one
sample. The two ways take turns; bytes are those that a rank gave to its calls, by the record.
"""

import copy
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import PRELOAD, arguments, in_turns, local, slowest, write
from benchmarks.pages import measured
from torchdistpackage.comm.flight_recorder import DTYPE, SHAPE, recorder
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.parallel.context.hugging_face import attend_over
from torchdistpackage.parallel.context.model import ContextSequence

RECORD = Path(__file__).parent / "results" / "recurrent.md"
WIDTH, LENGTHS = 512, (4096, 16384)


def layers() -> dict[str, Callable[[], nn.Module]]:
    """Return what makes each layer, of the same width."""
    from transformers import Mamba2Config, Qwen3NextConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mamba = Mamba2Config(
        hidden_size=WIDTH, num_heads=16, head_dim=64, state_size=64, n_groups=1, chunk_size=64
    )
    delta = Qwen3NextConfig(
        hidden_size=WIDTH,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return {
        "Mamba2Mixer": lambda: Mamba2Mixer(mamba, 0),
        "Qwen3NextGatedDeltaNet": lambda: Qwen3NextGatedDeltaNet(delta, 0),
    }


def rank_main(name: str, length: int, rounds: int) -> dict[str, object]:
    """Return the seconds of each way, and the bytes that this rank gave to calls in one."""
    setup_distributed()
    sequence = ContextSequence(dist.group.WORLD, "all_gather")
    torch.manual_seed(0)
    made = layers()[name]()
    ways = {"states": copy.deepcopy(made), "whole": copy.deepcopy(made)}
    attend_over(ways["states"], sequence, scanned=[name])
    attend_over(ways["whole"], sequence, gathered=[name])
    x = sequence.part(torch.randn(1, length, WIDTH)).requires_grad_()
    outputs: dict[str, torch.Tensor] = {}

    def step(way: str) -> None:
        outputs[way] = ways[way](x)
        outputs[way].square().mean().backward()

    sent: dict[str, int] = {}
    for way in ways:
        recorder._ring.clear()
        step(way)
        sent[way] = sum(math.prod(c[SHAPE]) * c[DTYPE].itemsize for c in recorder._ring)
    assert torch.allclose(outputs["states"], outputs["whole"], atol=1e-4, rtol=1e-3)
    times = in_turns({way: lambda way=way: step(way) for way in ways}, rounds, dist.barrier)
    leave()
    return {"times": times, "bytes": sent}


def page(results: dict) -> str:
    """Return the record, as Markdown."""
    lines = [
        "# Recurrent layers over context ranks\n",
        f"`python -m benchmarks.recurrent`. {measured(results)}",
        f"One layer {WIDTH} wide, one sample, forward and backward in float32 on two gloo ranks of",
        "one machine, a thread each. states: they cross the ranks; whole: each rank gets the whole",
        "sequence. A time is the slowest rank's; the ratio is the median of rounds.\n",
        "| layer | tokens | states, ms | whole, ms | ratio | bytes, states | bytes, whole |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results["rows"]:
        lines.append(
            f"| {r['layer']} | {r['tokens']:,} | {r['states_ms']:.0f} | {r['whole_ms']:.0f} | "
            f"{r['ratio']:.2f} | {r['bytes']['states']:,} | {r['bytes']['whole']:,} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    options = arguments(__doc__)
    rows: list[dict] = []
    for length in LENGTHS:
        for name in layers():
            preload = (*PRELOAD, "transformers")
            found = local(rank_main, name, length, options.rounds, preload=preload)
            times = slowest([each["times"] for each in found])
            ratios = [a / b for a, b in zip(times["states"], times["whole"], strict=True)]
            rows.append(
                {
                    "layer": name,
                    "tokens": length,
                    "states_ms": statistics.median(times["states"]) * 1e3,
                    "whole_ms": statistics.median(times["whole"]) * 1e3,
                    "ratio": statistics.median(ratios),
                    "bytes": found[0]["bytes"],
                }
            )
            sys.stdout.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.flush()
            write(options.json, {"rows": rows})  # the long ones take minutes
            if options.json is not None:
                RECORD.write_text(page(json.loads(options.json.read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
