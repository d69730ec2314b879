"""The loss of `model.hf` over tensor ranks: that of one process, and no rank holds all logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import SEQ_LEN, VOCAB, everywhere_float64, save_model
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.models.transformers_layout import shape_of_section
from torchdistpackage.models.transformers_model import TransformersStage, load_weights, stage
from torchdistpackage.topology.mesh import Mesh

BATCH = 3
FULL = (pytest.mark.full,)
SMALL_SET = (("llama", 4), ("gpt2", 2), ("gemma2", 2))
UNTIED = {f"{x}, untied": {**MODELS[x], "tie_word_embeddings": False} for x in ("gpt2", "gemma2")}
EVERY = {**MODELS, **UNTIED}


class TensorsSeen(TorchDispatchMode):
    """Shapes of what operations and collectives take and give."""

    def __init__(self):
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = tree_leaves((args, kwargs, out))
        self.shapes |= {tuple(x.shape) for x in found if isinstance(x, Tensor)}
        return out

    def has_all_logits(self) -> bool:
        """Of any position, or as many numbers as there are logits."""
        all_of_them = BATCH * SEQ_LEN * VOCAB
        return any(x[-1:] == (VOCAB,) or torch.Size(x).numel() >= all_of_them for x in self.shapes)


def tokens() -> tuple[Tensor, Tensor]:
    """Ids and targets; of the first sample none counts, of the second a few."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=draw)
    targets = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=draw)
    targets[0], targets[1, 3:] = -100, -100
    targets[2, :2] = torch.tensor([0, VOCAB - 1])
    return ids, targets


@contextmanager
def alone_and_split(folder: str, size: int) -> Iterator[tuple[TransformersStage, ...]]:
    """The model in one process, and this rank's part of it; all in float64."""
    tpc.setup_process_groups([("tensor", size)])
    shape = shape_of_section({"hf": folder}, SEQ_LEN, False)
    pair = tuple(
        stage(shape, group=group, dtype=torch.float64) for group in (None, tpc.get_group("tensor"))
    )
    for made in pair:
        load_weights(made, folder)
    with everywhere_float64():
        yield pair


def compare(folder: str, size: int) -> None:
    with alone_and_split(folder, size) as (alone, split):
        ids, targets = tokens()
        logits = alone(ids)
        truth, number = alone.loss(logits, targets)
        truth.backward()
        with TensorsSeen() as seen:
            mine = split(ids)
            loss, count = split.loss(mine, targets)
            loss.backward()
        width = even_sizes(VOCAB, size)[tpc.get_group("tensor").rank()]
        assert mine.shape == (BATCH, SEQ_LEN, width) and not seen.has_all_logits()
        close(loss, truth)
        assert count == number == 3 + SEQ_LEN
        expect_same_gradients(alone, split, size)
        with TensorsSeen() as seen:
            close(split.whole_logits(mine), logits)
        assert seen.has_all_logits()
        close(split.logits_at(mine, 4), logits[0, 4])
        none, count = split.loss(mine.detach().requires_grad_(), torch.full_like(targets, -100))
        assert none == 0 and count == 0


def expect_same_gradients(alone: TransformersStage, split: TransformersStage, size: int) -> None:
    """But where each rank has a part of the sum."""
    mesh, rank = Mesh((("tensor", size),)), tpc.get_group("tensor").rank()
    names, layouts = alone.global_names(), split.layouts()
    whole = {names[name]: p.grad for name, p in alone.named_parameters()}
    for name, parameter in split.named_parameters():
        layout = layouts[name]
        if not layout.unreduced and not layout.is_shared:
            for where, here in blocks(layout, mesh, rank):
                close(parameter.grad[here], whole[layout.name][where], name)


def close(mine: Tensor, truth: Tensor, name: str = "") -> None:
    worst = (mine - truth).abs().max() / truth.abs().max().clamp(min=1e-6)
    assert mine.shape == truth.shape and worst < 1e-9, f"{name}: off by {worst:.2e}"


@pytest.fixture(scope="module")
def folder_of(ranks, tmp_path_factory):
    made: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp("vocab") / "model")
            ranks(1).run(save_model, EVERY[name], made[name])
        return made[name]

    return of


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in SMALL_SET else FULL)
        for name in EVERY
        for size in (2, 4)
        if (name, size) != ("falcon", 4)  # more ranks than its fused keys
    ],
)
def test_the_loss_is_that_of_one_process_and_no_rank_holds_all_logits(ranks, folder_of, name, size):
    ranks(size).run(compare, folder_of(name), size)
