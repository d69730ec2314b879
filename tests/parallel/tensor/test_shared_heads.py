"""Key-value heads that several tensor ranks share: trained, clipped and saved as by one process."""

import pytest
import torch

from tests.each import each
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.save import save
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.layout.mark import collect
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.tensor.attention import ParallelAttention
from torchdistpackage.parallel.tensor.init import initialize
from torchdistpackage.topology.mesh import Mesh

S, B, DIM, HEADS = 12, 2, 16, 8
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def attention(groups: int, alone: bool, sequence_parallel: bool = False) -> ParallelAttention:
    group = tpc.groups.of([tpc.rank]) if alone else tpc.get_group("tensor")
    how = {"causal": True, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    layer = ParallelAttention(DIM, HEADS, kv_heads=groups, group=group, **how)
    mesh, rank = (Mesh(()), 0) if alone else (tpc.topology.dense, tpc.rank)
    initialize(layer, collect(layer), mesh, rank, 5)
    return layer


def batch(index: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(index)
    return torch.randn(S, B, DIM, dtype=torch.float64, generator=draw)


def step(layer, optimizer, batches, rows: slice, finish) -> torch.Tensor:
    for x in batches:
        (layer(x[rows]) * torch.arange(S)[rows, None, None]).square().sum().backward()
    finish()
    norm = clip_grad_norm_(optimizer if finish is nothing else layer.parameters(), 3.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def nothing() -> None:
    """ZeRO finishes by itself."""


def train(world, groups: int, how: str, sequence_parallel: bool, folder: str) -> None:
    """Two clipped steps equal those of one process, then a checkpoint for other degrees."""
    tpc.setup_process_groups(list(world))
    data, tensor = tpc.get_group("data"), tpc.get_group("tensor")
    layer, plain = attention(groups, False, sequence_parallel), attention(groups, True)
    adam = torch.optim.Adam(layer.parameters(), 1e-2)
    wrapped, finish, params = layer, nothing, layer
    if how == "ddp":
        wrapped = NaiveDDP(layer)
        finish = wrapped.reduce_gradients
    else:
        adam = ZeroOptimizer(adam, layer, stage=int(how))
    own = torch.optim.Adam(plain.parameters(), 1e-2)
    rows = slice(None)
    if sequence_parallel:
        rows = slice(S // tensor.size() * tensor.rank(), S // tensor.size() * (tensor.rank() + 1))
    for _ in range(2):
        norm = step(wrapped, adam, [batch(data.rank())], rows, finish)
        for index in range(data.size()):
            (plain(batch(index)) * torch.arange(S)[:, None, None]).square().sum().backward()
        for p in plain.parameters():
            p.grad /= data.size()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 3.0)
        own.step()
        own.zero_grad()
        torch.testing.assert_close(norm, expected, **CLOSE)
    if how != "ddp":
        adam.finish()
    full = layer.to_full()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(full[name], p.detach(), **CLOSE)
    place = {"topology": tpc.topology, "rank": tpc.rank}
    save(folder, step=1, tokens=0, params=params, optimizer=adam, **place)
    tpc.destroy()
    tpc.setup_process_groups([("data", data.size() * tensor.size()), ("tensor", 1)])
    other = attention(groups, False)
    for p in other.parameters():
        p.data.fill_(torch.nan)
    load(f"{folder}/step_000001", params=other, topology=tpc.topology, rank=tpc.rank)
    for name, p in other.named_parameters():
        assert torch.equal(p, full[name]), name


CASES = [(how, sequence) for how in ("ddp", "1", "2", "3") for sequence in (False, True)]
TELLING = [("ddp", False), ("1", True), ("3", False)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "groups", "chosen"),
    [
        pytest.param((("data", 2), ("tensor", 2)), 1, TELLING, id="telling"),
        ((("data", 2), ("tensor", 2)), 1, CASES),
        ((("data", 1), ("tensor", 3)), 1, CASES),
        ((("tensor", 2), ("data", 2)), 1, CASES),
        ((("data", 1), ("tensor", 4)), 2, CASES),
    ],
    ids=str,
)
def test_shared_heads_train_and_save_as_one_process(ranks, world, groups, chosen, tmp_path):
    cases = [
        (world, groups, how, sequence, str(tmp_path / f"{how}{sequence}"))
        for how, sequence in chosen
    ]
    ranks(Mesh(world).size).run(each, train, cases)


def clip_over_its_own_group(groups: int) -> None:
    """tpc says that these ranks are replicas; the layer knows better."""
    tpc.setup_process_groups([("data", 4)])
    group = tpc.groups.of(range(4))
    layer, plain = (
        ParallelAttention(DIM, HEADS, kv_heads=groups, group=g, dtype=torch.float64)
        for g in (group, tpc.groups.of([tpc.rank]))
    )
    layer.from_full(plain.to_full() if tpc.rank == 0 else plain)
    plain.from_full(layer.to_full())
    for net in (layer, plain):
        net(batch(0)).square().sum().backward()
    norm = clip_grad_norm_(layer.parameters(), 1.0, group=group)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    for name, full in layer.to_full().items():
        torch.testing.assert_close(full, plain.get_parameter(name).detach(), **CLOSE)


def test_a_layer_alone_sums_and_counts_what_ranks_share(ranks):
    ranks(4).run(each, clip_over_its_own_group, [(1,), (2,)])
