"""Saves beside the steps: the same bytes as saves in turn, and a failure is everybody's."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.train import parity
from torchdistpackage.checkpoint import save as saves
from torchdistpackage.checkpoint.commit import damage, latest
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.checkpoint.parts import TopologyRank
from torchdistpackage.checkpoint.retention import Retention
from torchdistpackage.checkpoint.save import SharedFolder, start_save
from torchdistpackage.checkpoint.snapshot import HostCopies, take_snapshot
from torchdistpackage.checkpoint.writer import write_snapshot
from torchdistpackage.errors import CheckpointError, RaceError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.testing import ordered_streams
from torchdistpackage.topology.mesh import topology
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.train_state import TrainState, resume

BASE = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8"),
    *("model.dropout=0.2", "pipeline.microbatches=2", "train.generate_tokens=0", "log.every=1"),
    *("train.steps=6", "train.eval_every=3", "train.eval_batches=1", "checkpoint.save_every=2"),
    *("checkpoint.keep_last=9", "log.plot=false", "data.name=null"),
    "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 256}",
]  # fmt: skip


def train(folder: Path, extra: list[str], slow_s: float = 0.0, fails_at: int = 0) -> str:
    """Train to the end; what was noted of saves, and what stopped it.

    slow_s: how long a file takes; fails_at: the step whose file rank 1 cannot write.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves, "write_snapshot", disk(slow_s, fails_at))
        run = parity.trainer([*BASE, *extra])
        loop, said = make_loop(run, resume(run, folder, "auto"), folder), list[str]()
        loop.saver.note = said.append
        try:
            assert loop.run() is not None
        except CheckpointError as error:
            said.append(f"after step {loop.state.step}: {error}")
    return "\n".join(said)


def disk(slow_s: float, fails_at: int) -> Callable[..., Any]:
    def write(folder: Path, *args: Any) -> Any:
        time.sleep(slow_s)
        if dist.get_rank() == 1 and folder.name.startswith(f"step_{fails_at:06d}"):
            raise OSError(28, "No space left on device", str(folder))
        return write_snapshot(folder, *args)

    return write


def bytes_of(folder: Path) -> dict[str, bytes]:
    """All files of all checkpoints."""
    top = folder / "checkpoints"
    return {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}


LAYOUTS = [["parallel.zero=1"], ["parallel.pipe=2", "parallel.data=1"]]
MORE = [["parallel.zero=2"], ["parallel.zero=3"], ["parallel.tensor=2", "parallel.data=1"],
        ["precision.dtype=bf16", "precision.weights=bf16", "parallel.zero=1"]]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(x, marks=pytest.mark.full) for x in MORE)], ids=str
)
def test_files_are_equal_to_the_byte_whenever_they_are_written(ranks, tmp_path, layout):
    """A slow disk has each of them written while the weights already change."""
    found = []
    for mode, slow_s in (("disabled", 0.0), ("async", 0.2)):
        folder = tmp_path / mode
        folder.mkdir()
        extra = [*layout, f"checkpoint.async_mode={mode}"]
        assert all("failed" not in said for said in ranks(2).run(train, folder, extra, slow_s))
        found.append(bytes_of(folder))
    assert found[0].keys() == found[1].keys()
    assert sum(name.endswith(".safetensors") for name in found[0]) == 2 * 3
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []


def test_a_second_save_waits_for_the_first_and_says_so(ranks, tmp_path):
    extra = ["checkpoint.save_every=1", "checkpoint.async_mode=async", "train.steps=3"]
    for said in ranks(2).run(train, tmp_path, extra, 1.0):
        assert "save of step 2 waited " in said
        assert " s for that of step 1 to be written" in said
    assert {damage(p, checksums=True) for p in (tmp_path / "checkpoints").iterdir()} == {None}


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_failure_stops_all_ranks_at_one_step(ranks, tmp_path, mode):
    extra = [f"checkpoint.async_mode={mode}"]
    stopped = [x.splitlines()[-1] for x in ranks(2).run(train, tmp_path, extra, 0.0, 4)]
    assert len(set(stopped)) == 1
    assert "writing the checkpoint of step 4" in stopped[0] and "failed on rank 1" in stopped[0]
    assert "No space left on device" in stopped[0]
    assert int(stopped[0].split()[2].rstrip(":")) in (4, 5, 6)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
    assert damage(tmp_path / "checkpoints" / "step_000002", checksums=True) is None


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_or_it_is_said_and_training_goes_on(ranks, tmp_path, mode):
    extra = [f"checkpoint.async_mode={mode}", "checkpoint.on_error=continue"]
    for said in ranks(2).run(train, tmp_path, extra, 0.0, 4):
        assert "no checkpoint: writing the checkpoint of step 4" in said
        assert "training goes on (checkpoint.on_error: continue)" in said
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000006"]


def beside(folder: str) -> None:
    """A save in a thread, with the weights changed meanwhile."""
    size, rank = dist.get_world_size(), dist.get_rank()
    world = topology((("tensor", size),), size)
    weight = nn.Parameter(torch.full((4, 2), float(rank)))
    params = {"w": (weight, Layout("w", (4, 2 * size), ((), ("tensor",))))}
    copies = HostCopies()
    for step in (1, 2):
        common: dict[str, Any] = {"tokens": 0, "params": params, "topology": world, "rank": rank}
        pending = start_save(SharedFolder(folder, Retention()), step=step, copies=copies, **common)
        with torch.no_grad():
            weight += 10
        path = pending.finish()
        assert damage(path, checksums=True) is None


def test_what_is_written_is_the_copy(ranks, tmp_path):
    ranks(2).run(beside, str(tmp_path))
    path = latest(tmp_path)
    assert path is not None
    for rank in (0, 1):
        held = load_file(path / f"rank0000{rank}.safetensors")
        assert torch.equal(held["w[0]"], torch.full((4, 2), 10.0 + rank))
    assert read_manifest(path).step == 2


def test_a_frozen_parameter_is_copied_again_only_when_it_has_changed():
    world = topology((("data", 1),), 1)
    layout = Layout("w", (4,))
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    trained = nn.Parameter(torch.ones(4))
    params = {"f": (frozen, layout.named("f")), "t": (trained, layout.named("t"))}
    copies = HostCopies()

    def copied() -> dict[str, float]:
        taken = take_snapshot("a", params, TopologyRank(world, 0), None, {})
        return {key: x[0].item() for key, x in copies.copy(taken).tensors.items()}

    assert copied() == {"f[0]": 1.0, "t[0]": 1.0}
    copies._buffers["f[0]"].fill_(7)  # what stands there stays
    copies._buffers["t[0]"].fill_(7)
    assert copied() == {"f[0]": 7.0, "t[0]": 1.0}
    with torch.no_grad():
        frozen.add_(1)
    assert copied() == {"f[0]": 2.0, "t[0]": 1.0}


def kept(weight: torch.Tensor, buffer: torch.Tensor, *, deferred: bool) -> HostCopies:
    """Copies of a weight, and of a buffer or frozen weight, which are on their way."""
    world = topology((("data", 1),), 1)
    params = {
        "w": (weight, Layout("w", tuple(weight.shape))),
        "b": (buffer, Layout("b", tuple(buffer.shape))),
    }
    copies = HostCopies(deferred=deferred)
    copies.copy(take_snapshot("a", params, TopologyRank(world, 0), None, {}))
    return copies


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_copies_hold_up_the_next_update_and_no_forward_before_it(deferred, is_frozen):
    with ordered_streams():
        weight, buffer = nn.Parameter(torch.ones(4)), torch.ones(3)
        if is_frozen:  # such as a teacher's weight, an average of ours
            buffer = nn.Parameter(buffer, requires_grad=False)
        copies = kept(weight, buffer, deferred=deferred)
        (weight * 2).sum().backward()
        buffer.add_(1)  # as a forward may
        copies.before_update()
        with torch.no_grad():
            weight.add_(1)
    with ordered_streams():
        weight = nn.Parameter(torch.ones(4))
        kept(weight, torch.ones(3), deferred=deferred)
        with torch.no_grad():
            if deferred:
                with pytest.raises(RaceError, match=r"add_.* writes memory that copy on stream"):
                    weight.add_(1)
            else:
                weight.add_(1)


def awaited(folder: Path) -> list[str]:
    """What a run does between a save and the end of the next step."""
    run, seen = parity.trainer([*BASE, "checkpoint.async_mode=async"]), list[str]()
    loop = make_loop(run, TrainState(), folder)
    loop.saver.save(TrainState(step=1))
    before = run.update.before_step
    assert before.__self__ is loop.saver._copies
    run.update.before_step = lambda: seen.append("copies") or before()
    run.stage.register_forward_hook(lambda *_: seen.append("forward"))
    step = run.update.inner.step
    run.update.inner.step = lambda *args: seen.append("update") or step(*args)
    run.train_step(1).wait()
    loop.saver.flush()
    run.close()
    return seen


def test_a_step_waits_for_copies_before_it_updates(ranks, tmp_path):
    ((*before, second, last),) = ranks(1).run(awaited, tmp_path)
    assert {*before} == {"forward"} and (second, last) == ("copies", "update")
