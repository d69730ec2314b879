"""Your own modules are found beside the YAML, and take the place of none of Python's own.

No torch.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchdistpackage.plan.user_code import missing_module, missing_name

LOOK = """
import os, sys
from torchdistpackage.plan.user_code import add_user_code
folder = add_user_code(os.environ)
assert add_user_code(os.environ) == folder
assert sys.path.count(folder) == 1
import types, colorsys, wave  # those that Python has not loaded are looked for here
import mine, ruff
print(mine.__file__, colorsys.__file__, ruff.__file__)
"""
DATA = """
import torch

class Ones:
    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        ids = torch.ones(per_rank, 8, dtype=torch.int64)
        return ids, ids
"""
RUN = """
run: {name: shadowed}
model: {target: "mine:build", loss: "mine:loss"}
data: {target: "mine:Ones", global_batch: 8}
parallel: {data: 2}
train: {steps: 2, recompute: blocks}
optim: {warmup_steps: 1}
"""
MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
"""


def shadow(folder: Path) -> None:
    """A file in the name of each module of Python, that must not be imported."""
    here = (name for name in sys.stdlib_module_names if name != "__main__" and find_spec(name))
    for name in here:
        (folder / f"{name}.py").write_text("raise RuntimeError(__file__)")


@pytest.mark.few(1)
@pytest.mark.parametrize("by", ["working folder", "TDP_CODE"])
def test_no_file_takes_the_place_of_pythons_own(tmp_path: Path, by: str):
    shadow(tmp_path)
    for name in ("mine", "ruff"):
        (tmp_path / f"{name}.py").write_text("")
    env = os.environ | ({} if by == "working folder" else {"TDP_CODE": str(tmp_path)})
    cwd = tmp_path if by == "working folder" else Path.cwd()
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOOK], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    mine, colorsys, ruff = done.stdout.split()
    assert Path(mine) == tmp_path / "mine.py"
    assert Path(colorsys) == Path(os.__file__).with_name("colorsys.py")
    assert Path(ruff) == tmp_path / "ruff.py"  # installed too, and yours comes first


@pytest.mark.full
def test_ranks_train_beside_files_in_the_names_of_pythons_modules(tmp_path: Path):
    shadow(tmp_path)
    (tmp_path / "mine.py").write_text(DATA + MODEL)
    (tmp_path / "run.yaml").write_text(RUN)
    command = [sys.executable, "-P", "-m", "torchdistpackage", "train", "run.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "recomputed in the backward on rank 0: nothing" in done.stdout  # there are no blocks
    rows = (tmp_path / "runs" / "shadowed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows if "loss" in json.loads(row)] == [1, 2]


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("pkg.mod:build", ""),
        ("pkg.sub.deep:build", ""),
        ("pkg.other:build", "pkg.other"),
        ("pkg.mod.deeper:build", "pkg.mod.deeper"),
        ("nopkg.toy:build", "nopkg"),
        ("space.deep.mod:build", ""),
        ("space.deep.nomod:build", "space.deep.nomod"),
        ("json.decoder:JSONDecoder", ""),
        ("sys:exit", ""),
    ],
)
def test_a_module_that_is_not_there_is_found_out_without_importing(tmp_path, target, missing):
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "space" / "deep").mkdir(parents=True)  # without __init__.py
    (tmp_path / "space" / "deep" / "mod.py").touch()
    for name in ("__init__.py", "mod.py", "sub/__init__.py", "sub/deep.py"):
        (tmp_path / "pkg" / name).write_text("raise RuntimeError('imported')")
    assert missing_module(target, [str(tmp_path), *sys.path]) == missing


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("mod:smoothed", ""),
        ("mod:Net.of", ""),
        ("mod:imported", ""),
        ("mod:smothed", "did you mean smoothed?"),
        ("mod:entirely_other", "entirely_other in "),
        ("pkg:absent", "pkg/__init__.py"),
        ("star:anything", ""),
        ("broken:anything", ""),
        ("json.decoder:JSONDecoder", ""),
        ("json:nothing", "nothing in "),
    ],
)
def test_a_name_that_is_not_there_is_found_out_without_importing(tmp_path, target, missing):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    text = "from math import sqrt as imported\ndef smoothed(): ...\nclass Net: ...\n"
    (tmp_path / "mod.py").write_text(f"{text}raise RuntimeError('imported')\n")
    (tmp_path / "star.py").write_text("from math import *\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    found = missing_name(target, [str(tmp_path), *sys.path])
    assert missing in found if missing else found == ""
