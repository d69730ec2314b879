"""SIGKILL at every moment of a save leaves a complete checkpoint, and the next save works.

A moment is a call that changes the disk (or hands over to another rank): the writer dies before
it, and in those that write, also with half of it done.
"""

import os
import pathlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.checkpoint import writer
from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.checkpoint.load import latest_together, load
from torchdistpackage.checkpoint.parts import Params
from torchdistpackage.checkpoint.save import PendingSave, save
from torchdistpackage.checkpoint.snapshot import HostCopies
from torchdistpackage.comm import primitives
from torchdistpackage.errors import RankError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import topology

NEVER = -1


class Moments:
    """Counts the moments of a save, and kills this process at one of them."""

    def __init__(self, kill_at: int):
        self.kill_at, self.passed = kill_at, 0

    def __call__(self) -> bool:
        self.passed += 1
        return self.passed - 1 == self.kill_at

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "chmod", "fsync", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, self._before(getattr(os, name)))
        for name in ("gather_objects", "broadcast_object"):
            patch.setattr(primitives, name, self._before(getattr(primitives, name)))
        written = self._half(writer.write_safetensors, at=0)
        patch.setattr(writer, "write_safetensors", written)
        patch.setattr(pathlib.Path, "write_text", self._half(pathlib.Path.write_text, at=0))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return watched

    def _half(self, write: Callable[..., Any], at: int) -> Callable[..., Any]:
        """`write`, of whose file (argument `at`) half is written by the one who dies."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            if self():
                os.truncate(args[at], Path(args[at]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return self._before(watched)


def params_of(value: int) -> Params:
    rank = dist.get_rank()
    layout = Layout("w", (4, dist.get_world_size() * 2), ((), ("tensor",)))
    return {"w": (nn.Parameter(torch.full((4, 2), float(value + rank))), layout)}


def write(
    folder: str, step: int, value: int, victim: int = 0, kill_at: int = NEVER, beside: bool = False
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
            pending = PendingSave(folder, step=step, copies=HostCopies(), **how)
            with torch.no_grad():
                params["w"][0].fill_(-1)
            pending.finish()
        else:
            save(folder, step=step, **how)
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


@pytest.mark.few(3)
@pytest.mark.parametrize("most", [6, pytest.param(sys.maxsize, marks=pytest.mark.full)])
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
    assert num_moments >= (20 if victim == 0 else 5)
