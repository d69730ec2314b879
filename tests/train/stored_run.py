"""Make a small run with the package of a commit, and keep what later versions must read.

The run has ZeRO, data and tensor ranks, clipping, a warm-up, dropout-free blocks and a validation.
It saves in the middle; what is kept is the folder as it was at that save, and beside it what the
same version then did: the losses and norms of the steps after it, and the loss of `tdp eval`.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).parent / "stored"
SAVED, STEPS = 2, 4
IDS, EXPECTED = "ids.bin", "expected.json"
CONFIG = f"""\
run: {{name: run, dir: ., seed: 3}}
parallel: {{data: 2, tensor: 2, zero: 2}}
model: {{name: gpt, layers: 1, dim: 8, heads: 2, vocab: 32}}
data: {{name: tokens, path: {IDS}, seq_len: 8, global_batch: 8, val_fraction: 0.25}}
optim: {{name: adamw, lr: 1e-2, weight_decay: 0.1, warmup_steps: 1, clip: 1.0}}
precision: {{dtype: float64}}
train: {{steps: {STEPS}, eval_every: {SAVED}, eval_batches: 2, generate_tokens: 0}}
checkpoint: {{save_every: {SAVED}, keep_last: 2}}
log: {{every: 1, plot: false}}
"""


def go_back(folder: Path) -> None:
    """Leave of a run that has ended what was there at its first save."""
    for name in ("metrics.jsonl", "ranks.jsonl", "events.jsonl"):
        lines = (folder / name).read_text("utf-8").splitlines(keepends=True)
        rows = [json.loads(line) for line in lines]
        kept = [x for x, row in zip(lines, rows, strict=True) if row["step"] <= SAVED]
        (folder / name).write_text("".join(kept), "utf-8")
    shutil.rmtree(folder / "logs")
    for path in (folder / "checkpoints").iterdir():
        if not path.name.endswith(str(SAVED)):
            shutil.rmtree(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/stored_run", description=__doc__)
    parser.add_argument("commit", help="a tag, or any commit")
    parser.add_argument("--name", help="the folder in tests/train/stored; by default the commit")
    given = parser.parse_args(argv)
    target = STORED / (given.name or given.commit)
    with tempfile.TemporaryDirectory() as work:
        package, folder = Path(work, "package"), Path(work, "run")
        package.mkdir()
        archive = ["git", "archive", given.commit, "torchdistpackage"]
        tree = subprocess.run(archive, cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(package)], input=tree, check=True)
        draw = random.Random(1)
        ids = array.array("H", (draw.randrange(32) for _ in range(600)))
        Path(work, IDS).write_bytes(ids.tobytes())
        Path(work, "run.yaml").write_text(CONFIG, "utf-8")
        env = {**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}

        def tdp(*words: str) -> str:
            command = [sys.executable, "-m", "torchdistpackage", *words]
            return subprocess.run(
                command, cwd=work, env=env, check=True, stdout=subprocess.PIPE, text=True
            ).stdout

        tdp("train", "run.yaml")
        (saved,) = (folder / "checkpoints").glob(f"step_*{SAVED}")
        evaluated = json.loads(tdp("eval", "run", "--checkpoint", str(saved), "--json"))
        rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(target, ignore_errors=True)
        go_back(folder)
        shutil.copytree(folder, target / "run")
        shutil.copy2(Path(work, IDS), target)
        (target / EXPECTED).write_text(json.dumps({"eval": evaluated, "rows": rows}, indent=1))
    print(f"{target}: {sum(x.stat().st_size for x in target.rglob('*') if x.is_file())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
