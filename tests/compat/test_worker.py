"""Worker: results and tracebacks come back, and nothing is left behind."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.compat.tplib import Worker, init_dist_env
from torchdistpackage.errors import LaunchError, RankError
from torchdistpackage.launch.entrypoint import PackedCall
from torchdistpackage.launch.ipc import unpack


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
    """Of a function and a class that only this test has."""

    class Told:
        def __init__(self, what: tuple):
            self.what = what

    def nested(rank: int, name: str) -> Told:
        return Told(tell(rank, scale, name=name))

    scale = 2.0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = traces()
    results = Worker(3).run(nested, name="x")
    assert all(type(told) is Told for told in results)
    assert [told.what[:5] for told in results] == [(r, 3, "gloo", 6.0, "x") for r in range(3)]
    assert not any(Path(f"/proc/{told.what[-1]}").exists() for told in results)
    assert traces() == before
    assert "printed by 2" in capsys.readouterr().out


@pytest.mark.full
def test_a_rank_that_fails_says_how_and_nothing_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = traces()
    with pytest.raises(RankError) as caught:
        Worker(2, "tcp://localhost:1", "gloo").run(fail_on_1)
    assert str(caught.value).startswith("rank 1 of 2 failed")
    lines = str(caught.value).splitlines()
    first = lines[lines.index("Traceback (most recent call last):") + 1]
    assert first.endswith("in fail_on_1"), "our own frames say nothing"
    assert str(caught.value).endswith("ValueError: the tensor is not square")
    assert traces() == before


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


TYPED = """
import torch.distributed as dist
from torchdistpackage.compat.tplib import Worker

offset = 100

class Box:
    def __init__(self, value):
        self.value = value

    def add(self, rank, more, by):
        return Box(self.value + rank + by(more) + dist.get_world_size())

def twice(x):
    return 2 * x + offset

def main():
    def nested(rank, box):
        return box.value + rank

    boxes = Worker(2).run(Box(10).add, 1, by=lambda x: twice(x))
    assert all(type(box) is Box for box in boxes), boxes
    print([box.value for box in boxes], Worker(2).run(nested, boxes[0]) if NESTED else "")

main()
"""


@pytest.mark.full
@pytest.mark.parametrize("start", ["-c", "stdin", "-i"])
def test_functions_and_classes_that_were_typed_go_in_and_come_out(tmp_path, start):
    """A bound method of a typed class, with a lambda that calls a typed function; a nested one."""
    text = TYPED.replace("NESTED", str(start != "-c"))
    (tmp_path / "begun.py").write_text("begun = True\n")
    command = {"-c": ["-c", text], "stdin": ["-"], "-i": ["-i", str(tmp_path / "begun.py")]}[start]
    if start == "-i":  # a prompt takes one block at a time
        text = f"assert begun\nexec({text!r})\n"
    done = subprocess.run(
        [sys.executable, *command],
        input=None if start == "-c" else text,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    nested = "" if start == "-c" else [114, 115]
    assert done.stdout.splitlines() == [f"[114, 115] {nested}"], done.stderr


def by_name(rank: int, shift: int) -> int:
    return rank + shift


class Holder:
    def __init__(self, shift: int):
        self.shift = shift

    def method(self, rank: int) -> int:
        return rank + self.shift


def test_a_function_is_sent_by_name_where_it_can_be_and_else_by_value():
    def nested(rank: int) -> int:
        return rank + shift

    shift = 5
    call = PackedCall.of(by_name, 5)
    assert call.reference is not None and call.reference.resolve() is by_name
    assert unpack(call.packed) == ((5,), {})
    given = [
        nested,
        lambda rank: rank + shift,
        Holder(5).method,
        functools.partial(by_name, shift=5),
    ]
    for func in given:
        call = PackedCall.of(func)
        assert call.reference is None and unpack(call.packed)[0] is not func
        assert call.load()(2) == 7
    call = PackedCall.of(by_name, lambda: 5)
    function, (shift_of,), _ = unpack(call.packed)
    assert call.reference is None and function is by_name and shift_of() == 5


def test_what_cannot_be_sent_is_refused_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"cannot be run in another process: cannot pickle"):
        Worker(2).run(lambda rank: lock.locked())
    with pytest.raises(LaunchError, match="make what cannot be sent inside"):
        Worker(2).run(by_name, lock)
    with pytest.raises(LaunchError, match="world_size is 0"):
        Worker(0)
