"""Sequence- and tensor-parallel layers are right where nobody gives layouts: three steps of a plain
optimizer, of wrappers, clipping, averages and checkpoints are those of one process in float64."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.tensor.split_block import SplitBlock
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.save import save
from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.ema import ShardedEMA
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.mark import collect
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.pipeline.pipeline import Pipeline

DIM, DEPTH, BATCH, LENGTH = 8, 2, 8, 4
CLIP, DECAY = 0.05, 0.7
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
WORLDS = [(("tensor", 2),), (("data", 2), ("tensor", 2)), (("pipe", 2), ("tensor", 2))]


def batches() -> Iterator[Tensor]:
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        yield torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64, generator=draw)


class Transformer(nn.Module):
    """Blocks of split layers: x (B, S, D), whole and equal on all ranks of `group`, to the same."""

    def __init__(self, sequence_parallel: bool, group: Group):
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        blocks = (SplitBlock(sequence_parallel, group) for _ in range(DEPTH))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        if self.sequence_parallel:
            x = collectives.scatter(x.contiguous(), 0, self.group)
        for block in self.blocks:
            x = block(x)
        if self.sequence_parallel:
            x = collectives.gather(x, 0, self.group)
        return x.transpose(0, 1)


def serial() -> Transformer:
    """Return the same blocks over a group of this rank alone."""
    torch.manual_seed(0)
    net = Transformer(False, tpc.groups.of((tpc.rank,))).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def train_serial(clips: bool) -> tuple[Transformer, dict[str, Tensor], list[float]]:
    net = serial()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    averages = {name: p.detach().clone() for name, p in net.named_parameters()}
    norms: list[float] = []
    for x in batches():
        optimizer.zero_grad()
        loss_of(net, x).backward()
        if clips:
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        optimizer.step()
        for name, p in net.named_parameters():
            averages[name] = averages[name] * DECAY + p.detach() * (1 - DECAY)
    return net, averages, norms


def parallel(sequence: bool, group=None) -> Transformer:
    net = Transformer(sequence, tpc.get_group("tensor") if group is None else group).double()
    whole, mine = dict(serial().named_parameters()), dict(net.named_parameters())
    with torch.no_grad():
        for name, layout in collect(net).items():
            for at, local in blocks(layout, tpc.topology.dense, tpc.rank):
                mine[name][local] = whole[name][at]
    return net


def expect(net: nn.Module, whole: dict[str, Tensor], mine: dict[str, Tensor]) -> None:
    for name, layout in collect(net).items():
        wanted = whole[name]
        for at, local in blocks(layout, tpc.topology.dense, tpc.rank):
            where = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(mine[name][local], wanted[at], **CLOSE, msg=where)


def train_all(world, ways: Sequence[str], sequence: bool, folder: str) -> None:
    tpc.setup_process_groups(list(world))
    for way in ways:
        train(way, sequence, f"{folder}/{way}")


def train(way: str, sequence: bool, folder: str) -> None:
    truth, averages, norms = train_serial(clips=way != "accumulate")
    net = parallel(sequence)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    model: nn.Module = net
    if way == "naive":
        model = NaiveDDP(net)
    elif way.startswith("zero"):
        optimizer = ZeroOptimizer(optimizer, net, stage=int(way[-1]))
    if way == "zero3":
        optimizer.finish()
    ema = ShardedEMA(model)
    for step, x in enumerate(batches()):
        optimizer.zero_grad()
        mine = x.chunk(tpc.get_dp_size())[tpc.get_dp_rank()]
        for part in mine.chunk(2) if way == "accumulate" else (mine,):
            run = functools.partial(checkpoint, model, use_reentrant=False)
            out = run(part) if way == "accumulate" else model(part)
            (out.square().mean() / (2 if way == "accumulate" else 1)).backward()
        if way != "accumulate":
            norm = clip_grad_norm_(net.parameters(), CLIP)
            assert float(norm) == pytest.approx(norms[step], rel=1e-9)
        optimizer.step()
        if way == "zero3":
            optimizer.finish()
        ema.update(model, DECAY)
    mine = {name: p.detach() for name, p in net.named_parameters()}
    expect(net, dict(truth.named_parameters()), mine)
    held = ema.state_dict_cpu()
    if held:
        expect(net, averages, held)
    save(
        folder, step=3, tokens=0, params=model, topology=tpc.topology, rank=tpc.rank,
        optimizer=optimizer,
    )  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "ways", "sequence"),
    [
        (WORLDS[0], ("plain", "accumulate"), True),
        (WORLDS[1], ("naive", "zero1"), True),
        pytest.param(WORLDS[0], ("plain", "zero2"), False, marks=pytest.mark.full),
        pytest.param(WORLDS[0], ("zero2",), True, marks=pytest.mark.full),
        pytest.param(WORLDS[1], ("zero2", "zero3"), True, marks=pytest.mark.full),
        pytest.param(WORLDS[1], ("naive", "zero3"), False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_three_steps_are_those_of_one_process(ranks, tmp_path, world, ways, sequence):
    size = 2 if len(world) == 1 else 4
    ranks(size).run(train_all, world, ways, sequence, str(tmp_path))
    ranks(1).run(all_resumed, ways, str(tmp_path))


def all_resumed(ways: Sequence[str], folder: str) -> None:
    tpc.setup_process_groups([("data", 1)])
    for way in ways:
        resumed(f"{folder}/{way}", way)


def resumed(folder: str, way: str) -> None:
    """What was saved loads whole, under a topology of one rank, and goes on."""
    truth, _, _ = train_serial(clips=way != "accumulate")
    net = parallel(False, tpc.get_group("data"))
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    path = Path(folder) / "step_000003"
    load(path, params=net, topology=tpc.topology, rank=0, optimizer=optimizer, with_extras=False)
    expect(net, dict(truth.named_parameters()), dict(net.named_parameters()))
    assert len(optimizer.state) == len(list(net.parameters()))


def pipelined(ways: Sequence[str], sequence: bool) -> None:
    """A block on each stage, two microbatches."""
    tpc.setup_process_groups(list(WORLDS[2]))
    truth, _, norms = train_serial(clips=True)
    stage = tpc.get_group_rank("pipe")
    for way in ways:
        net = parallel(sequence)
        net.blocks = net.blocks[stage : stage + 1]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
        reducer, held = None, None
        if way == "naive":
            held = NaiveDDP(net)
            reducer = held.reducer
        elif way.startswith("zero"):
            optimizer = ZeroOptimizer(optimizer, net, stage=int(way[-1]))
            reducer = optimizer.reducer

        pipe = Pipeline(
            net, loss=lambda y: y.square().mean(), num_microbatches=2, reducer=reducer
        )  # fmt: skip
        for step, x in enumerate(batches()):
            optimizer.zero_grad()
            pipe.step(x)
            norm = clip_grad_norm_(net.parameters(), CLIP)
            assert float(norm) == pytest.approx(norms[step], rel=1e-9), way
            optimizer.step()
        whole = {n.replace(f"blocks.{stage}.", "blocks.0."): p for n, p in of_stage(truth, stage)}
        expect(net, whole, {name: p.detach() for name, p in net.named_parameters()})
        del held


def of_stage(truth: Transformer, stage: int) -> list[tuple[str, Tensor]]:
    return [(n, p) for n, p in truth.named_parameters() if n.startswith(f"blocks.{stage}.")]


@pytest.mark.full
@pytest.mark.late_in_full
@pytest.mark.parametrize(
    ("ways", "sequence"),
    [
        (("plain", "naive", "zero1"), True),
        pytest.param(("zero2",), True, marks=pytest.mark.full),
        pytest.param(("plain", "naive", "zero1"), False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_stages_of_a_pipeline_are_those_of_one_process(ranks, ways, sequence):
    ranks(4).run(pipelined, ways, sequence)
