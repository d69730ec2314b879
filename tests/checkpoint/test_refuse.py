"""A save or load that cannot be done fails on all ranks, says why, and has changed nothing."""

import errno
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.each import each
from torchdistpackage.checkpoint import piece_table
from torchdistpackage.checkpoint import save as saving
from torchdistpackage.checkpoint.commit import folder_name, latest
from torchdistpackage.checkpoint.load import Loaded, latest_together, load
from torchdistpackage.checkpoint.parts import Params
from torchdistpackage.checkpoint.save import save
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Topology, topology

Axes = tuple[tuple[str, int], ...]
SHAPES = {"w": (8, 6), "b": (5,)}


def of(axes: Axes) -> Topology:
    return topology(axes, dist.get_world_size())


def whole(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def params_of(world: Topology, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Params:
    """Counting numbers; `w` is split by rows over the tensor axis."""
    params: Params = {}
    for name, shape in shapes.items():
        layout = Layout(name, shape, (("tensor",), ()) if name == "w" else ())
        ((where, _),) = blocks(layout, world.dense, dist.get_rank())
        params[name] = (nn.Parameter(whole(shape)[where].clone()), layout)
    return params


def save_simple(folder: str, axes: Axes, at: int = 1) -> None:
    world, rank = of(axes), dist.get_rank()
    params = params_of(world)
    save(folder, step=at, tokens=0, params=params, topology=world, rank=rank)


def error_of_save(folder: str, culprits: tuple[int, ...]) -> str:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rank = dist.get_rank()
    write = saving.write_snapshot
    saving.write_snapshot = fail if rank in culprits else write
    try:
        with pytest.raises(CheckpointError) as error:
            save_simple(folder, (("data", 2), ("tensor", 2)), at=2)
    finally:
        saving.write_snapshot = write
    return str(error.value)


@pytest.mark.parametrize("culprits", [(0,), (2,), (1, 3)])
def test_a_rank_that_cannot_write_is_named_on_all_and_nothing_is_left(ranks, tmp_path, culprits):
    ranks(4).run(save_simple, str(tmp_path), (("data", 2), ("tensor", 2)))
    texts = ranks(4).run(error_of_save, str(tmp_path), culprits)
    assert len(set(texts)) == 1
    assert f"step 2 to {tmp_path} failed on rank {culprits[0]} on " in texts[0]
    assert "No space left on device" in texts[0]
    assert ("and 1 more failed" in texts[0]) == (len(culprits) > 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_folder_that_cannot_be_made_fails_on_all(ranks, tmp_path):
    (tmp_path / "file").write_text("in the way")
    texts = ranks(2).run(error_of, "save_simple", str(tmp_path / "file"), (("tensor", 2),))
    assert "rank 0" in texts[0]
    assert texts[0] == texts[1]


def load_simple(
    folder: str,
    axes: Axes,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    at: int | None = None,
    **options: Any,
) -> Loaded:
    world, rank = of(axes), dist.get_rank()
    params = params_of(world, shapes)
    for param, _ in params.values():
        param.data = torch.zeros_like(param, dtype=dtype)
    path = latest(folder) if at is None else Path(folder) / folder_name(at)
    assert path is not None
    try:
        loaded = load(path, params=params, topology=world, rank=rank, **options)
    except CheckpointError:
        assert all(not param.any() for param, _ in params.values()), "changed before it failed"
        raise
    for name, (param, _) in params.items():
        assert torch.equal(param, params_of(world)[name][0])
    return loaded


def error_of(function: str, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        globals()[function](*args, **kwargs)
    return str(error.value)


def save_overlapping(folder: str) -> None:
    """Two rows twice and two not at all: as many elements as there should be."""
    world, rank = of((("data", 2),)), dist.get_rank()
    params = params_of(world)
    saving_collect = piece_table.collect

    def collect(*args: Any) -> dict[str, Any]:
        found = saving_collect(*args)
        (piece,) = found["w"].pieces
        halves = tuple(replace(piece, lengths=(4, 6)) for _ in range(2))
        return {**found, "w": replace(found["w"], pieces=halves)}

    piece_table.collect = collect
    try:
        save(folder, step=1, tokens=0, params=params, topology=world, rank=rank)
    finally:
        piece_table.collect = saving_collect


def test_a_manifest_with_a_hole_is_refused(ranks, tmp_path):
    ranks(2).run(save_overlapping, str(tmp_path))
    assert latest(tmp_path) is None
    texts = ranks(2).run(error_of, "load_simple", str(tmp_path), (("tensor", 2),), at=1)
    assert texts[0] == texts[1]
    assert "pieces of 'w' at (0, 0) and (0, 0) overlap" in texts[0]


OTHERS = [
    ({"b": (5,)}, torch.float32, "53 elements of parameters, but this run's model has 5"),
    ({**SHAPES, "more": (2,)}, torch.float32, "more is float32 of shape (2,) in this run"),
    ({"w": (8, 6), "b": (6,)}, torch.float32, "has float32 of shape (5,)"),
    ({"w": (8, 6), "b": (5,)}, torch.float64, "is float64 of shape (8, 6) in this run"),
]
"""(shapes, dtype, words of the refusal)"""


def test_another_model_or_precision_is_refused(ranks, tmp_path):
    ranks(2).run(save_simple, str(tmp_path), (("data", 2),))
    load = ("load_simple", str(tmp_path), (("data", 2),))
    texts = ranks(2).run(each, error_of, [(*load, shapes, dtype) for shapes, dtype, _ in OTHERS])
    assert texts[0] == texts[1]
    for text, (_, _, words) in zip(texts[0], OTHERS, strict=True):
        assert words in text


def latest_for_all(folder: str) -> tuple[Path | None, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("torchdistpackage")
    logger.addHandler(handler)
    try:
        return latest_together(folder, rank=dist.get_rank()), messages
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_byte_is_seen_by_all(ranks, tmp_path, rank):
    for at in (1, 2):
        ranks(2).run(save_simple, str(tmp_path), (("tensor", 2),), at)
    file = tmp_path / "step_000002" / f"rank{rank:05d}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    texts = ranks(2).run(error_of, "load_simple", str(tmp_path), (("tensor", 2),))
    assert f"failed on rank {rank}" in texts[0]
    assert "is damaged" in texts[0]
    assert texts[0] == texts[1]
    found = ranks(2).run(latest_for_all, str(tmp_path))
    assert [path for path, _ in found] == [tmp_path / "step_000001"] * 2
    warnings = [text for _, texts in found for text in texts]
    assert len(warnings) == 1
    assert str(tmp_path / "step_000002") in warnings[0]


def save_conflict(folder: str, kind: str) -> None:
    axis = "data" if kind == "shared" else "tensor"
    world, rank = of(((axis, 2),)), dist.get_rank()
    tensor = nn.Parameter(torch.ones(2))
    layout = Layout("a", (2,)) if kind == "shared" else Layout("a", (4,), (("tensor",),))
    params: Params = {"a": (tensor, layout)}
    optimizer = torch.optim.SGD([tensor], lr=1.0)
    if kind == "shared":
        params["b"] = (tensor, layout.named("b"))
    else:
        optimizer.state[tensor]["history"] = torch.zeros(2, 4)
    common: dict[str, Any] = {"topology": world, "rank": rank, "optimizer": optimizer}
    save(folder, step=1, tokens=0, params=params, **common)


def test_what_has_no_place_is_refused(ranks, tmp_path):
    cases = [("save_conflict", str(tmp_path), kind) for kind in ("shared", "history")]
    shared, history = ranks(2).run(each, error_of, cases)[0]
    assert "share memory" in shared and "a#history has shape (2, 4)" in history
    assert list(tmp_path.iterdir()) == []


def save_disagreeing(folder: str, kind: str) -> None:
    world, rank = of((("tensor", 2),)), dist.get_rank()
    layout = Layout("a", (4,), (("tensor",),))
    if kind == "hole" and rank == 1:
        params: Params = {}
    elif kind == "shape" and rank == 1:
        params = {"a": (nn.Parameter(torch.ones(4)), Layout("a", (8,), (("tensor",),)))}
    else:
        params = {"a": (nn.Parameter(torch.ones(2)), layout)}
    save(folder, step=1, tokens=0, params=params, topology=world, rank=rank)


def test_layouts_that_do_not_tile_a_tensor_are_refused(ranks, tmp_path):
    cases = [("save_disagreeing", str(tmp_path), kind) for kind in ("hole", "shape")]
    first, second = ranks(2).run(each, error_of, cases)
    assert first == second
    assert "own 2 elements of 4" in first[0] and "(8,) in rank00001.safetensors" in first[1]
    assert list(tmp_path.iterdir()) == []
