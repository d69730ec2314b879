"""A run goes on under other degrees, schedules and ZeRO stages as if nothing had happened."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.train import parity
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.train.train_state import TrainState, resume, save_state

BASE = [
    "model.layers=2", "model.dim=12", "model.heads=2", "model.vocab=33", "data.seq_len=8",
    "data.args={seq_len: 8, vocab: 33}", "data.target=tests.train.sources:UnevenTokens",
    "data.global_batch=48", "pipeline.microbatches=2", "train.steps=4", "optim.warmup_steps=0",
    "precision.dtype=float64",
]  # fmt: skip
RUNS = {
    "one": (1, []),
    "data2": (2, ["parallel.data=2"]),
    "data2-zero1": (2, ["parallel.data=2", "parallel.zero=1"]),
    "data4-zero1": (4, ["parallel.data=4", "parallel.zero=1"]),
    "data3-zero2": (3, ["parallel.data=3", "parallel.zero=2"]),
    "data2-zero3": (2, ["parallel.data=2", "parallel.zero=3"]),
    "data2xpipe2-zero2": (4, ["parallel.data=2", "parallel.pipe=2", "parallel.zero=2"]),
    "data2xpipe2-zbv-zero1": (
        4,
        ["parallel.data=2", "parallel.pipe=2", "parallel.zero=1", "pipeline.schedule=zb-v"],
    ),
    "pipe2-three": (2, ["parallel.pipe=2", "pipeline.schedule=interleaved", "pipeline.chunks=3"]),
    "data2xtensor2-zero1": (
        4,
        [
            *("parallel.data=2", "parallel.tensor=2", "parallel.zero=1"),
            "parallel.sequence_parallel=true",
        ],
    ),
    "data4-zero3-group2": (4, ["parallel.data=4", "parallel.zero=3", "parallel.zero_group=2"]),
    "data8-zero2-group4": (8, ["parallel.data=8", "parallel.zero=2", "parallel.zero_group=4"]),
    "context2-zero3": (2, ["parallel.context=2", "parallel.zero=3"]),
    "context4-zero1": (4, ["parallel.context=4", "parallel.zero=1"]),
    "data2xcontext2-zero2": (4, ["parallel.data=2", "parallel.context=2", "parallel.zero=2"]),
}
SMALL_SET = [
    ("data4-zero1", "one"), ("one", "data4-zero1"), ("data2xpipe2-zero2", "data2xtensor2-zero1"),
    ("data2-zero3", "data2-zero1"), ("data2-zero1", "data2-zero3"),
    ("data2xpipe2-zbv-zero1", "pipe2-three"), ("context4-zero1", "context2-zero3"),
    ("context2-zero3", "data2xcontext2-zero2"),
]  # fmt: skip


def first_half(name: str, folder: str) -> None:
    run = parity.trainer([*BASE, *RUNS[name][1]])
    tokens = sum(run.train_step(step).wait().tokens for step in (1, 2))
    save_state(run, TrainState(2, tokens), Path(folder), keep_last=1)


def second_half(name: str, folder: str, again: str) -> list[float]:
    """Losses; before them the state is saved again to the folder `again`."""
    run = parity.trainer([*BASE, *RUNS[name][1]])
    run.train_step(4)  # weights and state that must be overwritten
    state = resume(run, Path(folder), "auto")
    assert state.step == 2
    save_state(run, state, Path(again), keep_last=1)
    return [run.train_step(step).wait().loss for step in (3, 4)]


def all_steps(name: str) -> list[float]:
    run = parity.trainer([*BASE, *RUNS[name][1]])
    return [run.train_step(step).wait().loss for step in (1, 2, 3, 4)][2:]


def whole(run_folder: Path) -> dict[str, Tensor]:
    """Every tensor of a run's checkpoint by name."""
    path = run_folder / "checkpoints" / "step_000002"
    found: dict[str, Tensor] = {}
    for name, entry in read_manifest(path).tensors.items():
        tensor = torch.full(entry.shape, -7.0, dtype=getattr(torch, entry.dtype))
        seen = torch.zeros(entry.shape, dtype=torch.int32)
        for piece in entry.pieces:
            with safe_open(path / piece.file, framework="pt") as shard:
                tensor[piece.box] = shard.get_tensor(piece.key)
            seen[piece.box] += 1
        assert (seen == 1).all(), f"{name}: an element is written twice or not at all"
        found[name] = tensor
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(a, b, marks=[] if (a, b) in SMALL_SET else pytest.mark.full)
        for a in RUNS
        for b in RUNS
        if a != b
    ],
)
def test_state_is_the_same_to_the_bit_and_losses_go_on(ranks, tmp_path, before, after):
    folder, again = str(tmp_path / "run"), str(tmp_path / "again")
    ranks(RUNS[before][0]).run(first_half, before, folder)
    results = ranks(RUNS[after][0]).run(second_half, after, folder, again)
    old, new = whole(tmp_path / "run"), whole(tmp_path / "again")
    assert old.keys() == new.keys() and any(name.endswith("#exp_avg_sq") for name in old)
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]), name
    truth = ranks(1).run(all_steps, "one")[0]
    for losses in results:
        assert losses == pytest.approx(truth, rel=1e-9, abs=0)


BF16 = [
    *BASE, "precision.dtype=bf16", "precision.weights=bf16", "parallel.data=2", "parallel.zero=1",
]  # fmt: skip


def narrow_half(folder: str) -> list[float]:
    run = parity.trainer(BF16)
    for step in (1, 2):
        run.train_step(step).wait()
    save_state(run, TrainState(2, 0), Path(folder), keep_last=1)
    return [run.train_step(step).wait().loss for step in (3, 4)]


def narrow_again(folder: str) -> list[float]:
    run = parity.trainer([*BF16, "parallel.zero=2"])
    run.train_step(4)
    resume(run, Path(folder), "auto")
    return [run.train_step(step).wait().loss for step in (3, 4)]


def wide_weights(folder: str) -> parity.Held:
    """In a run that keeps its weights in float32."""
    run = parity.trainer([*BASE, "precision.dtype=bf16"])
    resume(run, Path(folder), "auto")
    return parity.held(run, "data")


def test_narrow_weights_go_on_from_their_wide_copies(ranks, tmp_path):
    """To the bit, in another stage; and the copies are the weights of a run without narrow ones."""
    losses = ranks(2).run(narrow_half, str(tmp_path))
    assert ranks(2).run(narrow_again, str(tmp_path)) == losses
    saved, found = whole(tmp_path), parity.whole(ranks(1).run(wide_weights, str(tmp_path)))
    for name, weight in found.items():
        assert saved[name].dtype == torch.bfloat16 and weight.dtype == torch.float32
        assert torch.equal(saved[f"{name}#master"], weight)
        assert torch.equal(saved[name], weight.bfloat16())


def test_every_rank_writes_its_part_of_the_weights_too(ranks, tmp_path):
    """Nobody gathers anything to save, and no rank writes for all."""
    ranks(4).run(first_half, "data4-zero1", str(tmp_path))
    path = tmp_path / "checkpoints" / "step_000002"
    sizes = [file.size_bytes for file in read_manifest(path).files.values()]
    assert max(sizes) < 1.3 * min(sizes)
