"""Worker: results and tracebacks come back, and nothing is left behind."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.compat.tplib import Worker, init_dist_env
from torchdistpackage.errors import LaunchError, RankError


def tell(rank: int, scale: float, *, name: str) -> tuple:
    init_dist_env(world_size=dist.get_world_size(), rank=rank)  # as it is written for tplib
    total = torch.tensor([scale * rank])
    dist.all_reduce(total)
    print(f"printed by {rank}")
    return rank, dist.get_world_size(), dist.get_backend(), float(total), name, os.getpid()


def fail_on_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("the tensor is not square")
    dist.barrier()


def traces() -> tuple:
    """What a run could leave behind: open files, environment, temporary files, children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())
    mine = [name for name in files if name.startswith("tdp-")]
    return len(list(Path("/proc/self/fd").iterdir())), dict(os.environ), mine, children


def test_results_come_back_and_nothing_stays(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = traces()
    results = Worker(3).run(tell, 2.0, name="x")
    assert [result[:5] for result in results] == [(r, 3, "gloo", 6.0, "x") for r in range(3)]
    assert not any(Path(f"/proc/{pid}").exists() for *_, pid in results)
    with pytest.raises(RankError) as caught:
        Worker(2, "tcp://localhost:1", "gloo").run(fail_on_1)
    assert str(caught.value).startswith("rank 1 of 2 failed")
    lines = str(caught.value).splitlines()
    first = lines[lines.index("Traceback (most recent call last):") + 1]
    assert first.endswith("in fail_on_1"), "our own frames say nothing"
    assert str(caught.value).endswith("ValueError: the tensor is not square")
    assert traces() == before
    assert "printed by 2" in capsys.readouterr().out


GUARDED = """
import sys
from torchdistpackage.compat.tplib import Worker

class Box:
    def __init__(self, value):
        self.value = value

def add(rank, box, by=0):
    return Box(box.value + rank + by)

def main():
    print([box.value for box in Worker(2).run(add, Box(10), by=5)])
    print([box.value for box in Worker(1).run(add, Box(1))])
"""


@pytest.mark.full
@pytest.mark.parametrize("end", ["if __name__ == '__main__':\n    main()", "main()"])
def test_classes_of_a_script_go_in_and_come_out_with_and_without_a_guard(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(f"{GUARDED}\n{end}\n")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["[15, 16]", "[1]"], done.stderr


@pytest.mark.full
def test_a_worker_of_one(capsys):
    assert Worker(1).run(tell, 1.0, name="y")[0][:5] == (0, 1, "gloo", 0.0, "y")


def test_what_no_other_process_could_find_is_refused_before_anything_starts():
    def local(rank: int) -> None: ...

    for func in (local, lambda rank: None, functools.partial(tell, name="x")):
        with pytest.raises(LaunchError, match="cannot be run in another process"):
            Worker(2).run(func)
    with pytest.raises(LaunchError, match="bound to an object"):
        Worker(2).run(Worker(2).run)
    with pytest.raises(LaunchError, match="world_size is 0"):
        Worker(0)
