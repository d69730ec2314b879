"""SIGKILL at every moment of a save or a prune leaves a complete checkpoint, and the next save
works.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.moments import NEVER, Moments
from torchdistpackage.checkpoint.commit import damage, latest, retain
from torchdistpackage.checkpoint.load import latest_together, load
from torchdistpackage.checkpoint.parts import Params
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.save import SharedFolder, save, start_save
from torchdistpackage.checkpoint.snapshot import HostCopies
from torchdistpackage.errors import RankError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import topology


def params_of(value: int) -> Params:
    rank = dist.get_rank()
    layout = Layout("w", (4, dist.get_world_size() * 2), ((), ("tensor",)))
    return {"w": (nn.Parameter(torch.full((4, 2), float(value + rank))), layout)}


def write(
    folder: str,
    step: int,
    value: int,
    victim: int = 0,
    kill_at: int = NEVER,
    beside: bool = False,
    keep_last: int = 2,
) -> int:
    """Save weights of `value`; the number of moments that passed on this rank.

    beside: from a copy, in threads, the weights changing meanwhile.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    moments = Moments(kill_at if rank == victim else NEVER)
    with pytest.MonkeyPatch.context() as patch:
        moments.watch(patch)
        params, world = params_of(value), topology((("tensor", size),), size)
        how: dict[str, Any] = {"tokens": value, "params": params, "topology": world, "rank": rank}
        if beside:
            pending = start_save(
                SharedFolder(folder, Retention()), step=step, copies=HostCopies(), **how
            )
            with torch.no_grad():
                params["w"][0].fill_(-1)
            pending.finish()
        else:
            save(folder, step=step, keep_last=keep_last, **how)
    return moments.passed


def recover(folder: str) -> tuple[int, int]:
    """(step, value) of the latest checkpoint, after seeing that all weights have the value."""
    size, rank = dist.get_world_size(), dist.get_rank()
    path = latest_together(folder, rank=rank)
    assert path is not None
    params = params_of(-1)
    loaded = load(path, params=params, topology=topology((("tensor", size),), size), rank=rank)
    assert torch.all(params["w"][0] == loaded.tokens + rank)
    return loaded.step, loaded.tokens


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [4, pytest.param(sys.maxsize, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "world_size,victim,next_step,beside",
    [(1, 0, 1, False), (1, 0, 0, False), (2, 1, 1, False), (1, 0, 1, True), (2, 1, 1, True)],
    ids=[
        *("a new step", "the same step again", "another rank than the first"),
        *("beside the steps", "another rank, beside the steps"),
    ],
)
def test_a_save_that_is_killed_anywhere_leaves_a_complete_checkpoint(
    ranks, tmp_path: Path, world_size: int, victim: int, next_step: int, beside: bool, most: int
):
    """At every moment, or at `most` of them: the first, the last, and some in between."""
    folder, run = str(tmp_path), ranks(world_size).run
    for step in (1, 2, 3, 4):  # the last one replaces as many as those below do
        run(write, folder, step, step)
    step, value = 4 + next_step, 5
    num_moments = run(write, folder, step, value, victim, NEVER, beside)[victim]
    outcomes: list[bool] = []
    num_kills = min(num_moments, most)
    for kill_at in (i * (num_moments - 1) // (num_kills - 1) for i in range(num_kills)):
        before, after = (step, value), (step + next_step, value + 1)
        with pytest.raises(RankError, match="SIGKILL"):
            run(write, folder, *after, victim, kill_at, beside)
        found = run(recover, folder)[0]
        assert found in (before, after), f"killed at moment {kill_at} of {num_moments}"
        outcomes.append(found == after)
        step, value = after[0], after[1] + 1
        run(write, folder, step, value)
        assert latest(folder, checksums=True) == tmp_path / f"step_{step:06d}"
        names = [path.name for path in tmp_path.iterdir()]
        assert len(names) == 2
        assert all(path.partition(".")[1] == "" for path in names)
    assert run(recover, folder)[0] == (step, value)
    # Once it counts it does not stop to count.
    assert outcomes == sorted(outcomes)
    assert not outcomes[0]
    assert num_moments >= (15 if victim == 0 else 5)


def prune(folder: str, kill_at: int = NEVER) -> int:
    """Remove all but the newest; the number of moments that passed."""
    moments = Moments(kill_at)
    with pytest.MonkeyPatch.context() as patch:
        moments.watch(patch)
        newest = latest(folder)
        assert newest is not None
        retain(Path(folder), Retention(1), newest)
    return moments.passed


@pytest.mark.parametrize("most", [3, pytest.param(sys.maxsize, marks=pytest.mark.full)])
def test_a_prune_that_is_killed_anywhere_leaves_what_it_keeps_and_nothing_half_removed(
    ranks, tmp_path: Path, most: int
):
    run = ranks(1).run

    def fill(folder: Path) -> None:
        for step in (1, 2, 3):
            run(write, str(folder), step, step, 0, NEVER, False, 3)

    fill(tmp_path / "counted")
    (num_moments,) = run(prune, str(tmp_path / "counted"))
    num_kills = min(num_moments, most)
    for kill_at in (i * (num_moments - 1) // (num_kills - 1) for i in range(num_kills)):
        folder = tmp_path / f"killed{kill_at}"
        fill(folder)
        with pytest.raises(RankError, match="SIGKILL"):
            run(prune, str(folder), kill_at)
        names = [path.name for path in folder.iterdir() if "." not in path.name]
        assert "step_000003" in names
        assert {damage(folder / name, checksums=True) for name in names} == {None}, kill_at
        assert run(recover, str(folder))[0] == (3, 3)
        run(prune, str(folder))
        assert [path.name for path in folder.iterdir()] == ["step_000003"], kill_at
