"""The table "Where something new goes" is followed row by row in a copy of the package: no file is
edited that the row does not name, and what was added works."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOISE = "noise: k.NotNegative = Field(default=0.0, description='Of the gradient.')"

EDITS: dict[str, list[tuple[str, str, str]]] = {
    "a pipeline schedule": [
        (
            "schedule/one_f_one_b.py",
            "",
            "import dataclasses\n"
            "def fill_drain(num_ranks, num_microbatches, chunks):\n"
            "    order = gpipe(num_ranks, num_microbatches, chunks)\n"
            "    return dataclasses.replace(order, name='fill-drain')\n",
        ),
        (
            "schedule/generators.py",
            r"GENERATORS: dict\[str, Generator\] = \{\n",
            "'fill-drain': fill_drain,\n",
        ),
        (
            "schedule/generators.py",
            r"from torchdistpackage.schedule.one_f_one_b import \(\n",
            "    fill_drain,\n",
        ),
    ],
    "a split layer": [
        (
            "parallel/tensor/scale.py",
            "",
            "import torch\n"
            "from torchdistpackage.parallel.tensor import layouts as cut\n"
            "from torchdistpackage.parallel.tensor.marked import Marked\n"
            "class Scale(Marked):\n"
            "    def __init__(self, dim):\n"
            "        super().__init__()\n"
            "        self.weight = torch.nn.Parameter(torch.ones(dim))\n"
            "    def forward(self, x):\n"
            "        return x * self.weight\n"
            "    def layouts(self):\n"
            "        return cut.norm(len(self.weight), False, 'tensor', False)\n",
        )
    ],
    "a communication hook": [
        (
            "ddp/comm_hooks.py",
            "",
            "def float32_compress(flat, group, op=primitives.SUM):\n"
            "    return _narrow(flat, group, op, torch.float32)\n",
        )
    ],
    "a check of the communication test": [
        (
            "harness/comm_checks.py",
            r'Check\("barrier", _barrier\),\n',
            'Check("a check that fails", _fails),\n',
        ),
        (
            "harness/comm_checks.py",
            "",
            "def _fails(member):\n    yield torch.zeros(1), torch.ones(1), ''\n",
        ),
    ],
    "a command of `tdp`": [
        ("cli/hello.py", "", "def hello() -> None:\n    'Greet.'\n    print('hello')\n"),
        ("cli/main.py", r"COMMANDS = \(", "'hello', "),
    ],
    "an option of sbatch": [
        ("config/slurm.py", r"OPTIONS: dict\[str, OptionType\] = \{\n", "'an-option': _TEXT,\n")
    ],
    "a logged value": [
        ("train/step_stats.py", r"    stop: Number\n(?=\n)", "    ranks: Number\n"),
        ("train/step_stats.py", r"    stop: bool\n", "    ranks: float\n"),
        ("train/step_stats.py", r'"lr": self.lr,\n', '"ranks": self.ranks,\n'),
        ("train/step_stats.py", r"stop=sums.stop > 0,\n", "ranks=sums.ranks,\n"),
        ("train/step.py", r"stop=float\(stop\(\)\)", ", ranks=1.0"),
    ],
    "something a run does between steps": [
        (
            "train/callbacks.py",
            "",
            "class Greeting(Callback):\n"
            "    def on_step(self, loop, result, issued):\n"
            "        loop.log.note(greeting='hello')\n",
        ),
        (
            "train/build.py",
            r"    callbacks: list\[Callback\] = \[\]\n",
            "    callbacks.append(Greeting())\n",
        ),
        ("train/build.py", r"from torchdistpackage.train.callbacks import \(\n", "    Greeting,\n"),
    ],
    "a key of the YAML": [
        ("config/schema.py", r"class OptimSection\(Section\):\n.*\n\n", f"    {NOISE}\n"),
        ("train/update.py", r"        halts: bool,\n", "        noise: float = 0.0,\n"),
        (
            "train/update.py",
            r"        self._halted = .*\n",
            "        print(f'noise of the update: {noise}')\n",
        ),
        ("train/build.py", r"            clip=optim.clip,\n", "            noise=optim.noise,\n"),
    ],
}  # fmt: skip


def rows() -> dict[str, str]:
    """What is to be added -> what CONTRIBUTING.md says to touch."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text[text.index("| to add | touch |") : text.index("## Words")]
    return dict(re.findall(r"^\| (a.*?|something.*?) \| (.*) \|$", table, re.MULTILINE))


@pytest.mark.parametrize("row", EDITS)
def test_a_row_names_every_file_that_is_edited(row: str):
    """And the train files of `train/` by their own names after the first."""
    named = re.findall(r"`([\w/]+(?:\.py|/))`", rows()[row])
    folders = [name for name in named if name.endswith("/")]
    for path, _, _ in EDITS[row]:
        known = [*named, *(f"train/{name}" for name in named)]
        assert path in known or any(path.startswith(folder) for folder in folders), path


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all rows followed."""
    copy = tmp_path_factory.mktemp("edited")
    shutil.copytree(ROOT / "torchdistpackage", copy / "torchdistpackage")
    for path, before, added in (edit for edits in EDITS.values() for edit in edits):
        file = copy / "torchdistpackage" / path
        if not before:
            text = file.read_text("utf-8") if file.exists() else ""
            file.write_text(f"{text}\n\n{added}", "utf-8")
            continue
        text, count = re.subn(
            before, lambda m, new=added: m[0] + new, file.read_text("utf-8"), count=1
        )
        assert count, f"{path} has no {before}"
        file.write_text(text, "utf-8")
    return copy


def run(edited: Path, *words: str, code: int = 0) -> str:
    """What python with these words prints, where the package is the edited one."""
    done = subprocess.run(
        [sys.executable, *words], cwd=edited, env={**os.environ, "PYTHONPATH": str(edited)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


ALONE = """
import torch
from torchdistpackage.cli.main import main
from torchdistpackage.config.slurm import OPTIONS
assert main(["schedule", "fill-drain", "--stages", "2", "--microbatches", "3"]) == 0
assert main(["hello"]) == 0
assert "an-option" in OPTIONS

from torchdistpackage import NaiveDDP, setup_distributed, tpc
from torchdistpackage.ddp.comm_hooks import float32_compress
from torchdistpackage.parallel.tensor.scale import Scale
setup_distributed()
tpc.setup_process_groups([("data", 1)])
x = torch.randn(3, 4, dtype=torch.float64)
model = NaiveDDP(Scale(4).double(), comm_hook=float32_compress)
model(x).sum().backward()
assert torch.allclose(model.module.weight.grad, x.sum(0))
"""


def test_a_schedule_a_layer_a_hook_an_option_and_a_command(edited: Path):
    shown = run(edited, "-c", ALONE)
    assert "fill-drain" in shown and "hello" in shown


def test_a_key_a_logged_value_and_a_callback_in_a_run(edited: Path):
    tiny = ROOT / "configs" / "gpt_tiny.yaml"
    changes = ("pipeline.schedule=fill-drain", "optim.noise=0.5", "train.steps=2", "--procs=2")
    small = ("model.layers=2", "model.dim=16", "model.heads=2", "optim.warmup_steps=0")
    less = ("train.generate_tokens=0", "log.plot=false", "data.seq_len=16", "parallel.data=1")
    shown = run(edited, "-m", "torchdistpackage", "train", str(tiny), *changes, *small, *less)
    assert "noise of the update: 0.5" in shown
    (metrics,) = edited.glob("runs/*/metrics.jsonl")
    found = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    assert [(row["ranks"], row["greeting"]) for row in found] == [(2.0, "hello")] * 2


def test_a_check_of_the_communication_test(edited: Path):
    shown = run(edited, "-m", "torchdistpackage", "comm", "test", "--axes", "data=2", code=1)
    assert "a check that fails" in shown
