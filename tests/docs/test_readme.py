"""Every block of README.md, AGENTS.md and llms.txt runs: the Python ones of a page one after
another on two ranks, commands as they are written, but short."""

import json
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.data_parallel.table import PAGES as DATA_PARALLEL
from benchmarks.pipeline.table import PAGES as PIPELINE
from torchdistpackage.cli.main import main
from torchdistpackage.launch.workers import run_local

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text("utf-8")
SHORT = ("train.steps=2", "optim.warmup_steps=1", "train.eval_batches=1", "log.every=1")


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[list[str]]:
    lines = "".join(blocks("sh", page)).splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def numbers_after(script: str) -> list[int]:
    names = runpy.run_path(script)
    return [names["tpc"].get_tp_size(), names["mlp"][0].weight.numel(), names["parts"].numel()]


def test_the_python_blocks_run_on_two_ranks(forks: None, tmp_path: Path):
    texts = blocks("python")
    assert texts
    script = tmp_path / "blocks.py"
    script.write_text("import torch\n" + "".join(texts), "utf-8")
    # half of a weight (32, 8), and the parts of both ranks
    assert run_local(numbers_after, (str(script),), num_procs=2) == [[2, 128, 6]] * 2


COMMANDS = commands("README.md")
GUIDES = ("AGENTS.md", "llms.txt")


def test_each_command_is_of_a_kind_that_a_test_runs():
    """Those of `tdp` below, once each; the install and the batch script in tests/slurm."""
    of_tdp = [words[1] for words in COMMANDS if words[0] == "tdp"]
    assert len(of_tdp) > 4 and len({*of_tdp}) == len(of_tdp)
    assert {words[0] for words in COMMANDS} <= {
        *("tdp", "pip", "sbatch", "./scripts/train", "./scripts/test")
    }
    assert all((ROOT / words[0]).exists() for words in COMMANDS if words[0].startswith("./"))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=[pytest.mark.full] * (words[1] == "comm"))
        for words in COMMANDS
        if words[0] == "tdp" and words[1] not in ("train", "report")
    ],
    ids=" ".join,
)
def test_a_tdp_command(words: list[str], tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    if words[1] == "submit":
        words = [*words[:-1], "--dry-run", f"run.dir={tmp_path}"]
    if words[1] == "jobs":
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(words[1:]) == 0, capfd.readouterr().err


def test_the_first_command_trains(tmp_path: Path):
    done = subprocess.run(
        [ROOT / "scripts" / "train", ROOT / "configs" / "gpt_tiny.yaml", *SHORT],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss" in done.stdout and "validation loss" in done.stdout


@pytest.mark.parametrize("page", GUIDES)
def test_the_commands_of_a_guide_run(page: str, tmp_path: Path, monkeypatch, capfd):
    text = (ROOT / page).read_text("utf-8")
    assert len(text.splitlines()) < 60
    for words in commands(page):
        if words[0] != "tdp":
            assert (ROOT / words[0]).is_file()
            if len(words) == 4:  # ./scripts/test FILE -k NAME
                assert re.search(rf"def test_\w*{words[3]}", (ROOT / words[1]).read_text("utf-8"))
            continue
        monkeypatch.chdir(tmp_path if page == "llms.txt" else ROOT)
        assert main(words[1:]) == 0, capfd.readouterr().err


def test_the_python_block_of_llms_txt_runs_on_two_ranks(forks: None, tmp_path: Path):
    (text,) = blocks("python", "llms.txt")
    script = tmp_path / "block.py"
    script.write_text(f"import torch\n{text}", "utf-8")
    assert run_local(ranks_after, (str(script),), num_procs=2) == [2, 2]


def ranks_after(script: str) -> int:
    return runpy.run_path(script)["tpc"].get_group_size("data")


def test_what_the_guide_names_is_there():
    """Each file and folder of AGENTS.md, and each example on the page of examples."""
    named = re.findall(r"`([\w./]+/[\w./]*|tests)`", (ROOT / "AGENTS.md").read_text("utf-8"))
    assert len(named) > 12
    homes = (ROOT, ROOT / "torchdistpackage")
    assert [x for x in named if not any((home / x).exists() for home in homes)] == []
    page = (ROOT / "examples" / "README.md").read_text("utf-8")
    listed = set(re.findall(r"\]\((\w+\.\w+)\)", page))
    assert listed == {x.name for x in (ROOT / "examples").glob("*.*")} - {"README.md"}


def test_the_numbers_are_those_measured():
    found = {}
    for pages in (DATA_PARALLEL, PIPELINE):
        results = yaml.safe_load(pages.results.read_text("utf-8"))
        found |= {each.what: f"{each.ratio:.2f}" for each in pages.judge(results)}
    table = dict(re.findall(r"^\| (\S.*?) \| ([\d., ;]+) \|$", TEXT, re.MULTILINE))
    on_gpu = json.loads((ROOT / "benchmarks" / "results" / "gpu_h100.json").read_text("utf-8"))
    ratios = [on_gpu[name] for name in ("over_bare_loop", "compiled_over_eager")]
    assert [re.split("[,;] ", cell) for cell in table.values()] == [
        [found[f"NaiveDDP / torch DDP{x}, 1g mlp"] for x in (", best cap", "")],
        [found["ZeRO-1 / torch DDP + ZeroRedundancy, 1g mlp"], found["ZeRO-3 / FSDP2, 1g mlp"]],
        [found[f"{x} / torch Schedule1F1B, 1g gpt, m 8"] for x in ("1f1b", "auto, cut by time")],
        *([str(ratio) for ratio in row.values()] for row in ratios),
    ]
