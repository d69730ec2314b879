"""What was saved comes back bitwise on every rank, and any reader can put it together."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from torchdistpackage.checkpoint.load import latest_together, load
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.checkpoint.save import save
from torchdistpackage.comm.random import seed_from
from torchdistpackage.layout.derive import blocks, local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Topology, topology

T = (("tensor",), ())
STATE = {"step", "exp_avg", "exp_avg_sq"}
Params = dict[str, tuple[Tensor, Layout]]

WORLDS: list[tuple[tuple[str, int], ...]] = [
    (("data", 1), ("pipe", 1), ("tensor", 1)),
    (("data", 2), ("pipe", 1), ("tensor", 1)),
    (("pipe", 2), ("tensor", 1)),
    (("data", 1), ("tensor", 2)),
    (("data", 2), ("pipe", 2), ("tensor", 1)),
    (("pipe", 2), ("data", 1), ("tensor", 2)),
    (("tensor", 4),),
]


def layouts(num_stages: int) -> dict[str, Layout]:
    """Local name -> layout, of every kind there is."""
    last = num_stages - 1
    return {
        "whole": Layout("whole", (6, 4)),
        "rows": Layout("rows", (8, 6), T),
        "columns": Layout("columns", (3, 8), ((), ("tensor",))),
        "fused": Layout("fused", (24, 3), T, parts=((12, 4, 8), ())),
        "uneven": Layout("uneven", (7, 3), T, uneven=True),
        "few": Layout("few", (2, 3), T, uneven=True),
        "expert": Layout("expert", (4, 3), (("expert",), ()), view="expert"),
        "scalar": Layout("scalar", ()),
        "first": Layout("stage", (4, 2), T).on(0),
        "final": Layout("final", (5,)).on(last),
        "embedding": Layout("tied", (12, 4), T).on(0, last),
        "head": Layout("tied", (12, 4), T).on(0, last),
        "bf16": Layout("bf16", (3, 3)),
    }


def full(name: str, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed_from(name, salt))
    return torch.randn(shape, generator=draw)


def build(world: Topology, rank: int, salt: int = 0) -> Params:
    """The parameters that `rank` holds, cut out of the full ones."""
    stage = world.dense.coord(rank).get("pipe", 0)
    params: Params = {}
    for local_name, layout in layouts(world.dense.axis_size("pipe")).items():
        where = {"embedding": layout.stages[:1], "head": layout.stages[-1:]}
        stages = where.get(local_name, layout.stages)
        if stages and stage not in stages:
            continue
        params[local_name] = (nn.Parameter(cut(layout, world, rank, salt)), layout)
    return params


def cut(layout: Layout, world: Topology, rank: int, salt: int) -> Tensor:
    mesh = world.view(layout.view)
    dtype = torch.bfloat16 if layout.name == "bf16" else torch.float32
    part = torch.empty(local_shape(layout, mesh, rank), dtype=dtype)
    for where, local in blocks(layout, mesh, rank):
        part[local] = full(layout.name, layout.shape, salt)[where].to(dtype)
    return part


def adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param, _ in params.values()], lr=0.1)


def step(params: Params, optimizer: torch.optim.Optimizer, world: Topology, rank: int, salt: int):
    """One update, with gradients that are the same under every layout."""
    for param, layout in params.values():
        param.grad = cut(layout, world, rank, salt)
    optimizer.step()


def of(axes: tuple[tuple[str, int], ...]) -> Topology:
    num_ranks = math.prod(size for _, size in axes)
    expert = 2 if ("data", 2) in axes else 1
    return topology(axes, num_ranks, expert=expert)


def same(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def round_trip(folder: str, axes: tuple[tuple[str, int], ...]) -> None:
    world, rank = of(axes), dist.get_rank()
    params = build(world, rank)
    optimizer = adamw(params)
    for salt in (1, 2):
        step(params, optimizer, world, rank, salt)
    torch.rand(rank + 1)
    extras = {"rng": torch.get_rng_state(), "position": 10**12 + rank, "none": torch.zeros(0)}
    common: dict[str, Any] = {"topology": world, "rank": rank}
    more: dict[str, Any] = {"optimizer": optimizer, "extras": extras, "facts": {"seed": 5}}
    path = save(folder, step=400, tokens=99, params=params, **more, **common)
    assert path == Path(folder) / "step_000400"
    assert latest_together(folder, rank=rank) == path

    other = build(world, rank, salt=9)
    into = adamw(other)
    step(other, into, world, rank, 7)  # state that must be overwritten
    loaded = load(path, params=other, optimizer=into, **common)
    assert (loaded.step, loaded.tokens, loaded.facts) == (400, 99, {"seed": 5})
    assert loaded.extras.keys() == extras.keys()
    assert loaded.extras["position"] == 10**12 + rank
    assert torch.equal(torch.as_tensor(loaded.extras["rng"]), torch.get_rng_state())
    check_equal(params, optimizer, other, into)
    for each, its in ((params, optimizer), (other, into)):
        step(each, its, world, rank, 3)
    check_equal(params, optimizer, other, into)


def check_equal(
    params: Params,
    optimizer: torch.optim.Optimizer,
    other: Params,
    into: torch.optim.Optimizer,
) -> None:
    for name, (param, _) in params.items():
        copy, _ = other[name]
        assert same(param, copy), name
        assert into.state[copy].keys() == STATE, name
        for key, value in optimizer.state[param].items():
            assert same(value, into.state[copy][key]), (name, key)


@pytest.mark.few(4)
@pytest.mark.parametrize("axes", WORLDS, ids=str)
def test_parameters_moments_and_extras_come_back_bitwise(ranks, tmp_path, axes):
    ranks(of(axes).world_size).run(round_trip, str(tmp_path), axes)
    check_files(tmp_path / "step_000400")


def check_files(path: Path) -> None:
    """Any reader can put the whole tensors together again, with safetensors and the manifest."""
    manifest = read_manifest(path)
    one = of((("data", 1),))
    whole = build(one, 0)
    alone = adamw(whole)
    for salt in (1, 2):
        step(whole, alone, one, 0, salt)
    expected = {layout.name: param.detach() for param, layout in whole.values()}
    for param, layout in whole.values():
        for key, value in alone.state[param].items():
            expected[f"{layout.name}#{key}"] = value
    assert manifest.tensors.keys() == expected.keys()
    for name, entry in manifest.tensors.items():
        assert entry.shape == tuple(expected[name].shape)
        filled = torch.full(entry.shape, float("nan"), dtype=expected[name].dtype)
        for piece in entry.pieces:
            at = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.lengths, strict=True))
            with safe_open(path / piece.file, framework="pt") as shard:
                assert filled[at].isnan().all(), f"{name} is written twice"
                filled[at] = shard.get_tensor(piece.key)
        assert torch.equal(filled, expected[name]), name


def test_every_rank_has_a_file_and_nothing_else_is_there(ranks, tmp_path):
    ranks(2).run(round_trip, str(tmp_path), (("tensor", 2),))
    names = sorted(path.name for path in (tmp_path / "step_000400").iterdir())
    assert names == ["manifest.json", "rank00000.safetensors", "rank00001.safetensors"]


def other_optimizer(folder: str) -> None:
    """Momentum, a frozen parameter, and a parameter that has had no gradient yet."""
    world, rank = of((("data", 1),)), 0
    names = ("moved", "frozen", "idle")
    params: Params = {n: (nn.Parameter(full(n, (3,))), Layout(n, (3,))) for n in names}
    others: Params = {n: (nn.Parameter(torch.zeros(3)), Layout(n, (3,))) for n in names}
    optimizers = []
    for each in (params, others):
        trained = [each[n][0] for n in ("moved", "idle")]
        optimizers.append(torch.optim.SGD(trained, lr=0.1, momentum=0.9))
    params["moved"][0].grad = torch.ones(3)
    optimizers[0].step()
    common: dict[str, Any] = {"topology": world, "rank": rank}
    path = save(folder, step=1, tokens=0, params=params, optimizer=optimizers[0], **common)
    load(path, params=others, optimizer=optimizers[1], **common)
    for name in names:
        assert torch.equal(params[name][0], others[name][0])
    state = [optimizers[i].state[each["moved"][0]] for i, each in enumerate((params, others))]
    assert torch.equal(state[0]["momentum_buffer"], state[1]["momentum_buffer"])
    assert not optimizers[1].state[others["idle"][0]]


def test_other_optimizers_and_parameters_without_state_come_back(ranks, tmp_path):
    ranks(1).run(other_optimizer, str(tmp_path))
