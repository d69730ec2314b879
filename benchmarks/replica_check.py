"""The check that replicas hold the same bits, beside a step of a GPT of 124M on two CPU ranks.

    python -m benchmarks.replica_check --json benchmarks/results/replica_check.json

The check reads weights and AdamW's states, whatever the step has computed, so that a step of few
tokens is the worst case: here one sample of 128 tokens a rank, for every layout. The share is that
of the default of train.check_replicas_every.
"""

import itertools
import json
import statistics
import sys

import torch.distributed as dist

from benchmarks.common import arguments, in_turns, local, slowest, write
from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.config.load import loads
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build
from torchdistpackage.train.replica_check import ReplicaCheck

MODEL = (
    *("model.layers=12", "model.dim=768", "model.heads=12", "model.vocab=50304"),
    *("data.name=python_stdlib", "data.seq_len=128", "data.global_batch=2"),
    *("train.steps=1000", "train.eval_every=0", "parallel.pipe=1", "pipeline.microbatches=1"),
)
LAYOUTS = {
    "data": ("parallel.data=2",),
    "ZeRO 1": ("parallel.data=2", "parallel.zero=1"),
    "tensor": ("parallel.data=1", "parallel.tensor=2"),
}


def config_of(name: str):
    return loads("launch: {local: {procs: null}}", overrides=[*MODEL, *LAYOUTS[name]])


def rank_main(name: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps and of checks, round by round."""
    rank = setup_distributed()[0]
    trainer = build(make_plan(config_of(name), 2), rank, primitives.device_of(dist.group.WORLD))
    check, numbers = ReplicaCheck(trainer), itertools.count(1)
    for _ in range(2):  # the first steps make buckets and states
        trainer.train_step(next(numbers)).wait()
        check()
    sides = {"step": lambda: trainer.train_step(next(numbers)).wait(), "check": check}
    times = in_turns(sides, rounds, dist.barrier)
    trainer.close()
    leave()
    return times


def row_of(name: str, rounds: int) -> dict[str, object]:
    times = slowest(local(rank_main, name, rounds))
    step, check = (statistics.median(times[side]) for side in ("step", "check"))
    every = config_of(name).train.check_replicas_every
    return {
        "layout": name,
        "step_s": round(step, 3),
        "check_s": round(check, 3),
        "every": every,
        "share": check / (every * step),
    }


def main() -> int:
    options = arguments(__doc__)
    rows = [row_of(name, options.rounds) for name in LAYOUTS]
    sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    write(options.json, {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
