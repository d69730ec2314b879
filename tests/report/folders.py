"""Run folders as runs leave them, written by hand: no process and no torch."""

import json
import math
from pathlib import Path

BEGAN_S = 1_790_000_000.0
CONFIG = """\
run: {{name: {name}, dir: runs}}
model: {{layers: 4, dim: 64}}
optim: {{lr: {lr}}}
train: {{steps: {steps}}}
"""


def metrics_row(step: int, lr: float) -> dict[str, object]:
    loss = 5 * math.exp(-step * lr) + 0.01 * math.sin(step)
    row: dict[str, object] = {
        "step": step, "loss": loss, "grad_norm": 1 + 1 / step, "lr": lr, "time_s": 0.2,
        "tokens_per_s": 5000.0 + step % 7, "bubble": 0.2, "tokens": step * 1000,
        "flops_per_s": 2e12,
    }  # fmt: skip
    if step % 100 == 0:
        row |= {"val_loss": loss + 0.05, "unigram": 3.3, "bigram": 2.4}
    if step == 40:
        row["stragglers"] = "rank 3 (data 1 pipe 1) on n2: the forward takes 90 ms a step"
    return row


def ranks_row(step: int) -> dict[str, object]:
    """Rank 3 of data 2 x pipe 2 is busy 50 % longer than its peer, rank 1."""
    slow = [1.0, 1.0, 1.0, 1.5]
    row: dict[str, object] = {
        "step": step, "steps": 10, "at_s": BEGAN_S + step, "time_s": [0.2] * 4,
        "phases": {
            "data": [0.0] * 4, "forward": [0.03 * x for x in slow],
            "backward": [0.06 * x for x in slow], "optimizer": [0.0] * 4,
        },
        "waits": {"data": [0.02] * 4, "pipe": [0.04] * 4, "several axes": [0.01] * 4},
        "memory_bytes": [2**30] * 4, "peak_bytes": [2**30, 2**30, 2**31, 2**31],
    }  # fmt: skip
    if step == 10:
        layout = [["data", 2], ["pipe", 2], ["context", 1], ["tensor", 1]]
        row |= {"hosts": ["n1", "n1", "n2", "n2"], "layout": layout}
    return row


def events(steps: int, lr: float) -> list[dict[str, object]]:
    """Two starts: the first is requeued half way, the second has another learning rate."""
    half = steps // 2
    keys = {"train.steps": [steps, "run.yaml:4"], "optim.lr": [lr / 2, "run.yaml:3"]}
    start = {"event": "start", "num_ranks": 4, "host": "n1", "device": "NVIDIA H100 80GB HBM3"}
    changed = {**keys, "optim.lr": [lr, "command line: optim.lr"]}
    return [
        {**start, "step": 0, "at_s": BEGAN_S, "attempt": "7.0", "keys": keys},
        {"event": "save", "step": half, "at_s": BEGAN_S + half, "took_s": 1.5},
        {"event": "end", "step": half, "at_s": BEGAN_S + half + 2, "word": "requeue",
         "reason": f"after step {half}: USR1"},
        {**start, "step": half, "at_s": BEGAN_S + half + 60, "attempt": "7.1", "keys": changed},
        {"event": "save", "step": steps, "at_s": BEGAN_S + steps + 60, "took_s": 1.25},
        {"event": "end", "step": steps, "at_s": BEGAN_S + steps + 62, "word": "finished",
         "reason": ""},
    ]  # fmt: skip


def write_run(folder: Path, steps: int = 200, lr: float = 0.01) -> Path:
    """A complete run folder with `steps` steps."""
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints" / f"step_{steps:06d}").mkdir(parents=True)
    config = CONFIG.format(name=folder.name, lr=lr, steps=steps)
    (folder / "resolved.yaml").write_text(config)
    lines = {
        "metrics.jsonl": [metrics_row(step, lr) for step in range(1, steps + 1)],
        "ranks.jsonl": [ranks_row(step) for step in range(10, steps + 1, 10)],
        "events.jsonl": events(steps, lr),
    }
    for name, rows in lines.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "logs" / "rank0.restart0.log").write_text("warning: <b>mind</b> the gap\nfine\n")
    (folder / "pipeline.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="60">'
        '<rect width="300" height="60" fill="#7aa6da"/></svg>'
    )
    return folder
