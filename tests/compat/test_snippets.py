"""The snippets of tplib's and torchshard's pages, run one by one with the import changed.

A snippet stands here as printed. What else had to change to run it stands in `CHANGES`, with the
reason, and nowhere else.
"""

from __future__ import annotations

import doctest
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm.runtime import find_free_port
from torchdistpackage.compat import tplib

IMPORTS = {
    "from tplib import": "from torchdistpackage.compat.tplib import",
    "import torchshard as ts": "import torchdistpackage.compat.torchshard as ts",
}

SNIPPETS = {
    "tplib: start": """
from tplib import init_dist_env

init_dist_env(world_size=2, rank=0, distributed_init_method="tcp://localhost:23456")
""",
    "tplib: worker": """
from tplib import Worker

def print_rank(rank):
    print(f"I am process {rank}")

worker = Worker(world_size=2)

worker.run(print_rank)
""",
    "tplib: groups": """
from tplib import init_model_parallel

init_model_parallel(tp_size=2)
""",
    "tplib: asking": """
from tplib import model_parallel_is_initialized

if model_parallel_is_initialized():
    return True
else:
    return False
""",
    "ts: init_process_group": """
>>> import torch
>>> import torchshard as ts
>>> torch.distributed.init_process_group(
        backend='nccl',
        init_method='tcp://127.0.0.1:8000',
        world_size=2,
        rank=0 # on Rank 0 / rank=1 on Rank 1
    )
>>> ts.distributed.init_process_group(group_size=2)
""",
    "ts: get_rank": """
>>> import torchshard as ts
>>> current_rank = ts.distributed.get_rank()
>>> current_rank
>>> 0 # Rank 0
>>> 1 # Rank 1
""",
    "ts: get_world_size": """
>>> import torchshard as ts
>>> world_size = ts.distributed.get_world_size()
>>> world_size
>>> 2 # Rank 0
>>> 2 # Rank 1
""",
    "ts: get_group_size": """
>>> import torchshard as ts
>>> group_size = ts.distributed.get_group_size()
>>> group_size
>>> 2 # Rank 0
>>> 2 # Rank 1
""",
    "ts: scatter": """
>>> import torchshard as ts
>>> input = torch.Tensor(6, 8)
>>> input.shape
torch.Size([6, 8])
>>> output = ts.distributed.scatter(input, dim=0)
>>> output.shape
torch.Size([3, 8])
>>> output = ts.distributed.scatter(input, dim=1)
>>> output.shape
torch.Size([6, 4])
""",
    "ts: gather": """
>>> import torchshard as ts
>>> input = torch.Tensor(6, 8)
>>> input.shape
torch.Size([6, 8])
>>> output = ts.distributed.gather(input, dim=0)
>>> output.shape
torch.Size([12, 8])
>>> output = ts.distributed.gather(input, dim=1)
>>> output.shape
torch.Size([6, 16])
""",
    "ts: reduce": """
>>> import torchshard as ts
>>> tensor = torch.arange(2, dtype=torch.int64) + 1 + 2 * rank
>>> tensor
tensor([1, 2]) # Rank 0
tensor([3, 4]) # Rank 1
>>> ts.distributed.reduce(tensor)
>>> tensor
tensor([4, 6]) # Rank 0
tensor([4, 6]) # Rank 1
""",
    "ts: copy": """
>>> import torchshard as ts
>>> input = torch.Tensor(6, 8)
>>> input = ts.distributed.copy(input)
""",
}

PROMPT = "the page puts a prompt before the outputs"
CHANGES = {
    "tplib: start": [
        ("rank=0", "rank=RANK", "the snippet is that of rank 0 only; a peer is supplied"),
        ("23456", "PORT", "a port that is free on the machine of the tests"),
    ],
    "tplib: asking": [
        ("return True", "answer = True", "a script cannot return"),
        ("return False", "answer = False", "a script cannot return"),
    ],
    "ts: init_process_group": [
        ("'nccl'", "'gloo'", "torch itself refuses nccl without a GPU"),
        ("rank=0 # on Rank 0 / rank=1 on Rank 1", "rank=RANK", "a peer is supplied"),
        ("8000", "PORT", "a port that is free on the machine of the tests"),
        ("\n    ", "\n...     ", "the page leaves out the prompts of continued lines"),
    ],
    "ts: get_rank": [(">>> 0", "0", PROMPT), (">>> 1", "1", PROMPT)],
    "ts: get_world_size": [(">>> 2", "2", PROMPT)],
    "ts: get_group_size": [(">>> 2", "2", PROMPT)],
    "ts: reduce": [
        (">>> ts.dist", ">>> _ = ts.dist", "the tensor is returned, which a prompt would show"),
    ],
}
"""Snippet -> (as printed, as run, why). Besides, `torch` and `rank` are there, as the text says."""


def as_run(name: str, rank: int, port: str) -> str:
    """The snippet for this rank."""
    text = SNIPPETS[name]
    for printed, ours in IMPORTS.items():
        text = text.replace(printed, ours)
    for printed, ours, _ in CHANGES.get(name, ()):
        assert printed in text, f"{printed!r} is not in the snippet any more"
        text = text.replace(printed, ours)
    return text.replace("RANK", str(rank)).replace("PORT", port)


def of_this_rank(text: str, rank: int) -> str:
    """Without the outputs of other ranks; those of all ranks stand below each other."""
    kept = [x for x in text.splitlines() if (m := re.search(r"# Rank (\d)", x)) is None
            or int(m[1]) == rank]  # fmt: skip
    return "\n".join(line.partition(" # Rank")[0].rstrip() for line in kept) + "\n"


def by_prompt(name: str, rank: int, port: str) -> dict:
    """Run the snippet as if typed; what it leaves, if all that it shows is as printed."""
    text = of_this_rank(as_run(name, rank, port), rank)
    left: dict = {"torch": torch, "rank": rank}
    test = doctest.DocTestParser().get_doctest(text, left, name, None, None)
    seen: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    failed, tried = runner.run(test, out=seen.append, clear_globs=False)
    assert tried >= 2 and not failed, "".join(seen)
    return test.globs


def page_of_tplib(folder: Path, port: str) -> None:
    """Its snippets in the order of the page, in processes that have joined nothing yet."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)

    def run(name: str) -> dict:
        script = folder / f"{name.split(': ')[1]}{rank}.py"
        script.write_text(as_run(name, rank, port))
        return runpy.run_path(str(script))

    run("tplib: start")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    assert tplib.get_local_rank() == rank
    assert run("tplib: asking")["answer"] is False
    run("tplib: groups")
    assert run("tplib: asking")["answer"] is True
    total = tplib.tp_all_reduce(torch.ones(1))
    assert total.tolist() == [2]
    tplib.destroy_dist_env()


def test_the_page_of_tplib(ranks, tmp_path):
    ranks(2).run(page_of_tplib, tmp_path, find_free_port())


def test_the_worker_of_tplib_as_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(as_run("tplib: worker", 0, ""))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["I am process 0", "I am process 1"]


@pytest.mark.full
def test_the_script_of_the_page_on_coming_from_tplib(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "coming_from.md"
    text = page.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "script.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(page.parents[1])}
    command = [sys.executable, str(tmp_path / "script.py")]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == text.rpartition("# ")[2] == "[(0, 9), (1, 9)]\n"


def page_of_torchshard(port: str) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    for name in (name for name in SNIPPETS if name.startswith("ts: ")):
        left = by_prompt(name, rank, port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SNIPPETS, "ts: scatter", SNIPPETS["ts: scatter"].replace("3, 8", "3, 9"))
        with pytest.raises(AssertionError, match=r"Got:\s+torch\.Size\(\[3, 8\]\)"):
            by_prompt("ts: scatter", rank, port)  # outputs are really compared
    # what the last one says of gradients
    x = torch.ones(6, 8, requires_grad=True)
    copied = left["ts"].distributed.copy(x)
    (copied * (1 + rank)).sum().backward()
    assert torch.equal(copied, x) and torch.equal(x.grad, torch.full((6, 8), 3.0))
    left["ts"].distributed.destroy_process_group()
    dist.destroy_process_group()


def test_the_page_of_torchshard(ranks):
    ranks(2).run(page_of_torchshard, find_free_port())


def test_every_change_has_a_reason():
    assert set(CHANGES) <= set(SNIPPETS)
    assert all(why for changes in CHANGES.values() for _, _, why in changes)
