"""Models of transformers beside transformers' own loading and Hugging Face's Trainer.

    python -m benchmarks.hugging_face                  2 GB into 4 ranks, steps on 2, tokens on 1
    python -m benchmarks.hugging_face --quick --gb 0.1

It needs the extra `hf`, accelerate, and the size of the model on the disk. A run replaces only the
parts that it measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import local, machine
from benchmarks.hugging_face.bars import (
    COMPUTATION,
    GENERATING,
    LOADING,
    MEMORY,
    MESSAGES,
    OURS,
    TRAINER,
    TRAINING,
    TRANSFORMERS,
    judge,
)
from benchmarks.hugging_face.table import PAGES
from benchmarks.judged import any_fails
from benchmarks.turns import rounds_s, spread_ms

PRELOAD = (
    *("torch", "torch._dynamo", "transformers.models.llama.modeling_llama"),
    *("benchmarks.hugging_face.loading", "benchmarks.hugging_face.training"),
)
CLOSE = 1e-4
"""Of logits of loaded models, relative to the largest."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    split = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--parts", type=split, default=[LOADING, TRAINING, GENERATING])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--gb", type=float, default=2.0, help="of float32 weights to load")
    parser.add_argument("--file-mb", type=int, default=500, help="of a file of them")
    parser.add_argument("--load-ranks", type=int, default=4)
    parser.add_argument("--dim", type=int, default=384, help="of the model that trains")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--train-ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="3 rounds, not written")
    parser.add_argument("--strict", action="store_true", help="exit code 1 if a bar fails")
    options = parser.parse_args(argv)
    options.rounds = 3 if options.quick else options.rounds
    path = PAGES.results
    known = json.loads(path.read_text()) if path.exists() and not options.quick else {}
    results = {**known, "parts": dict(known.get("parts", {}))}
    for part in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            results["parts"][part] = PARTS[part](options, Path(folder))
        show(part, results["parts"][part])
        results |= {"date": datetime.now().astimezone().isoformat(), "machine": machine()}
        if not options.quick:
            path.write_text(json.dumps(results, indent=1) + "\n")
    failed = any_fails(judge(results))
    if not options.quick:
        PAGES.write(results)
    return int(options.strict and failed)


def loading(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.hugging_face import loading, models

    size, small, large = models.size_of(options.gb), folder / "small", folder / "large"
    for one, where in ((models.SMALL, small), (size, large)):
        local(models.save, one, str(where), options.file_mb, num_procs=1, preload=PRELOAD)
    args = (str(small), str(large), options.rounds)
    ranks = local(loading.rank_main, *args, num_procs=options.load_ranks, preload=PRELOAD)
    turns = {side: [rank[side] for rank in ranks] for side in loading.SIDES}
    logits = [one["logits"] for side in (OURS, TRANSFORMERS) for r in turns[side] for one in r]
    distance = max(float((x - logits[-1]).abs().max() / x.abs().max()) for x in logits)
    if distance > CLOSE:
        raise ValueError(f"what was loaded has logits that are {distance:.1e} apart")
    return {
        "ranks": options.load_ranks,
        "rounds": options.rounds,
        "bytes": models.folder_bytes(large),
        "files": len([*large.glob("*.safetensors")]),
        "distance": distance,
        **{
            key: {
                side: spread_ms(rounds_s([[[one[span]] for one in rank] for rank in ranks]))
                for side, ranks in turns.items()
            }
            for key, span in (("time", "turn"), ("call", "call"))
        },
        **{
            key: {
                side: median(max(one[key] for one in turn) for turn in zip(*ranks, strict=True))
                for side, ranks in turns.items()
            }
            for key in ("cpu_s", *MEMORY, "held_bytes")
        },
    }


def training(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.hugging_face import models, training

    size, model = models.Size(options.dim, options.layers), str(folder / "model")
    local(models.save, size, model, options.file_mb, num_procs=1, preload=PRELOAD)
    args = (model, str(folder / "output"), options.rounds, options.steps, options.batch)
    args = (*args, options.seq_len)
    ranks = local(training.rank_main, *args, num_procs=options.train_ranks, preload=PRELOAD)
    return {
        "ranks": options.train_ranks,
        "rounds": options.rounds,
        "steps": options.steps,
        "tokens": options.train_ranks * options.batch * options.seq_len,
        **{key: ranks[0][key] for key in ("parameters", "distance")},
        "time": {
            side: spread_ms(rounds_s([r["turns"][side] for r in ranks], options.steps))
            for side in (OURS, TRAINER, COMPUTATION, MESSAGES)
        },
        "cpu_s": {
            side: median(map(max, zip(*(r["cpu_s"][side] for r in ranks), strict=True)))
            / options.steps
            for side in (OURS, TRAINER, COMPUTATION, MESSAGES)
        },
    }


def generating(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from benchmarks.hugging_face import generating, models

    size, model = models.Size(512, 4), str(folder / "model")
    local(models.save, size, model, options.file_mb, num_procs=1, preload=PRELOAD)
    args = (model, options.rounds, 512, 64)
    (rank,) = local(generating.rank_main, *args, num_procs=1, preload=PRELOAD)
    return {
        "prompt": 512,
        "new": 64,
        "layers": size.layers,
        "dim": size.dim,
        "rounds": options.rounds,
        "same": rank["same"],
        "time": {
            s: spread_ms(rounds_s([[[x] for x in turns]])) for s, turns in rank["turns"].items()
        },
        "cpu_s": {side: median(times) for side, times in rank["cpu_s"].items()},
    }


PARTS = {LOADING: loading, TRAINING: training, GENERATING: generating}


def show(part: str, found: dict[str, Any]) -> None:
    print(f"\n{part + ', ms':32}  median     min     max     CPU")
    for name, side in found["time"].items():
        times = f"{side['median']:8.1f}{side['min']:8.1f}{side['max']:8.1f}"
        print(f"{name:32}{times}{found['cpu_s'][name] * 1e3:8.1f}", flush=True)
    for key, what in MEMORY.items():
        for side, size in found.get(key, {}).items():
            print(f"{what}, {side}: {size / 1e6:,.0f} MB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
