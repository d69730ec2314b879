"""A sharded optimizer's state is the plain optimizer's, to the bit, and goes back into any size.

Gradients are the same at every size, so every comparison is exact.
"""

import copy
import io
from unittest import mock

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tests.ddp.allocated import Meter
from tests.ddp.zero.shared_out import ByHand, Model, assert_same, gradients
from tests.tells import facts_pattern
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.groups import Groups
from torchdistpackage.ddp.zero import state_gather
from torchdistpackage.errors import CheckpointError, CommError

CUT = {
    "ASGD": {"lr": 1e-2, "t0": 1},
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.25},
    "Adam": {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}
FROZEN = 2  # its number in the param groups of Model
small_batches = mock.patch.object(state_gather, "BATCH_BYTES", 128)
"""So small that items travel together, alone, and after a change of batch."""


def plain(name: str, steps: int, model: Model | None = None) -> tuple[Model, Optimizer]:
    model = model or Model()
    optimizer = getattr(optim, name)(model.groups(), **CUT.get(name, {}))
    return advance(model, optimizer, 0, steps)


def advance(model: Model, optimizer: Optimizer, first: int, last: int):
    for step in range(first, last):
        optimizer.zero_grad()
        gradients(model, step)
        optimizer.step()
    return model, optimizer


def sharded(name: str, model: Model, whole: bool = False) -> ByHand:
    inner = getattr(optim, name)(model.groups(), **CUT.get(name, {}))
    return ByHand(model, inner, world(), whole)


def comparable(model: Model) -> list:
    return [p.detach() for p in model.parameters()]


@small_batches
def is_the_plain_state(name: str, whole: bool) -> None:
    """Saved, equal to the bit; loaded into plain, and from plain at the start, it goes on alike."""
    model = Model()
    optimizer = sharded(name, model, whole)
    advance(model, optimizer, 0, 3)
    twin, reference = plain(name, 3)
    state, expected = optimizer.state_dict(), reference.state_dict()
    expected["state"].pop(FROZEN, None)  # Adagrad has one for it, which nobody reads
    assert_same(state, expected)
    assert_same(comparable(model), comparable(twin))

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert_same(read, expected)

    other = Model()
    other.load_state_dict(model.state_dict())
    another = sharded(name, other, not whole)
    another.load_state_dict(read)
    read.clear()
    advance(other, another, 3, 5)
    reference.load_state_dict(copy.deepcopy(expected))  # which may cast, as torch has it
    advance(twin, reference, 3, 5)
    assert_same(comparable(other), comparable(twin))
    assert_same(another.state_dict(), reference.state_dict())


SMALL_SET = ("ASGD", "Adagrad", "Adam")  # with numbers, with state from the start, with the most


@pytest.mark.parametrize(
    "name", [n if n in SMALL_SET else pytest.param(n, marks=pytest.mark.full) for n in CUT]
)
def test_pieces_join_to_the_plain_state_and_back(ranks, name: str):
    ranks(3).run(is_the_plain_state, name, False)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["AdamW", pytest.param("SGD", marks=pytest.mark.full)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_at_every_size(ranks, name: str, world_size: int):
    ranks(world_size).run(is_the_plain_state, name, False)


def in_several_groups() -> None:
    """Other ranks share the last param group, as they do experts."""
    rank, size = world().rank(), world().size()
    half = Groups(rank).of(range(rank % 2, size, 2))
    model, (twin, reference) = Model(), plain("AdamW", 3)
    optimizer = ByHand(model, optim.AdamW(model.groups(), **CUT["AdamW"]), world(), of_last=half)
    advance(model, optimizer, 0, 3)
    assert_same(comparable(model), comparable(twin))
    assert_same(optimizer.state_dict(), expected := reference.state_dict())
    there = optimizer.state_dict(to=1)["state"]
    members = {0: [], 1: [0, 1, 3], 2: [4, 5], 3: [4, 5]}[rank]  # rank 2 and 3 are second of theirs
    assert_same(there, {i: expected["state"][i] for i in members})


def test_parameters_may_be_shared_by_different_ranks(ranks):
    ranks(4).run(in_several_groups)


def matrices_owned_whole(name: str) -> None:
    class Matrices(Model):
        def groups(self) -> list[dict]:
            return [{"params": [self.columns, self.first]}]

    def build(model: Matrices) -> Optimizer:
        return getattr(optim, name)(model.groups(), lr=1e-2)

    model, twin = Matrices(), Matrices()
    optimizer, reference = ByHand(model, build(model), world(), whole=True), build(twin)
    advance(model, optimizer, 0, 3)
    advance(twin, reference, 0, 3)
    state = optimizer.state_dict()
    torch.testing.assert_close(state, reference.state_dict(), rtol=0, atol=0)
    assert sum(map(len, (s for s in optimizer.state.values()))) < 6 or world().size() == 1

    other = Matrices()
    other.load_state_dict(model.state_dict())
    another = ByHand(other, build(other), world(), whole=True)
    another.load_state_dict(reference.state_dict())
    advance(other, another, 3, 5)
    advance(twin, reference, 3, 5)
    assert_same(comparable(other), comparable(twin))


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_whole_parameters_keep_state_of_any_shape(ranks, name: str):
    ranks(2).run(matrices_owned_whole, name)


@small_batches
def on_one_rank_alone(to: int) -> None:
    model = Model()
    optimizer = sharded("AdamW", model)
    advance(model, optimizer, 0, 2)
    everywhere, there = optimizer.state_dict(), optimizer.state_dict(to=to, cpu=True)
    assert_same(there["param_groups"], everywhere["param_groups"])
    assert_same(there["state"], everywhere["state"] if world().rank() == to else {})


@pytest.mark.parametrize("to", [0, 2])
def test_one_rank_can_have_it_alone(ranks, to: int):
    ranks(3).run(on_one_rank_alone, to)


@small_batches
def bytes_needed() -> None:
    """Two matrices of 80 kB with one momentum each, a quarter of each here."""
    model = nn.ParameterList([torch.ones(100, 100, dtype=torch.float64) for _ in range(2)])
    optimizer = ByHand(model, optim.SGD(model, lr=1e-2, momentum=0.9), world())
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer.step()
    meter = Meter()
    state = meter.run(optimizer.state_dict, to=0)
    whole = 160_000
    if world().rank() == 0:
        assert meter.now == whole and meter.peak <= whole + 1000, (meter.now, meter.peak)
    else:
        assert meter.now == 0 and meter.peak <= whole / 2 / 4 + 1000, (meter.now, meter.peak)
    assert len(state["state"]) == 2 * (world().rank() == 0)


@pytest.mark.own_transport("measures memory, of which the late transport holds copies")
def test_who_gets_nothing_holds_one_piece_at_a_time(ranks):
    ranks(4).run(bytes_needed)


def save_shards() -> list[dict]:
    model = Model(torch.bfloat16)
    optimizer = sharded("Adam", model)
    advance(model, optimizer, 0, 3)
    shard = copy.deepcopy(optimizer.shard_state_dict())
    values = copy.deepcopy(model.state_dict())
    advance(model, optimizer, 3, 5)

    again = Model(torch.bfloat16)
    again.load_state_dict(values)
    other = sharded("Adam", again)
    other.load_shard_state_dict(shard)
    advance(again, other, 3, 5)
    assert_same(comparable(again), comparable(model))
    assert_same(other.state_dict(), optimizer.state_dict())
    return shard


def test_a_shard_goes_back_where_it_was_cut_the_same_way(ranks):
    shards = ranks(2).run(save_shards)
    held = sum(t.numel() for t in tensors(shards[0])) / sum(t.numel() for t in tensors(shards[1]))
    assert 0.8 < held < 1.4
    with pytest.raises(Exception, match="load a shard on the rank and at the size that saved it"):
        ranks(3).run(load_shard, shards[0])


def tensors(state: dict) -> list[torch.Tensor]:
    return [v for one in state["state"].values() for v in one.values() if v.dim()]


def load_shard(shard: dict) -> None:
    sharded("Adam", Model(torch.bfloat16)).load_shard_state_dict(shard)


def masters_travel() -> None:
    """With them training goes on to the bit; without, from the parameters as they are."""
    model = Model(torch.bfloat16)
    optimizer = sharded("AdamW", model)
    advance(model, optimizer, 0, 3)
    state = copy.deepcopy(optimizer.state_dict())
    values = copy.deepcopy(model.state_dict())
    assert state["state"][0]["master"].dtype == torch.float64
    assert torch.equal(state["state"][0]["master"].bfloat16(), values["last"])
    advance(model, optimizer, 3, 5)

    again = Model(torch.bfloat16)
    again.load_state_dict(values)
    other = sharded("AdamW", again)
    other.load_state_dict(state)
    advance(again, other, 3, 5)
    assert_same(other.state_dict(), optimizer.state_dict())

    for one in state["state"].values():
        del one["master"]
    again.load_state_dict(values)
    other.load_state_dict(state)
    expected = values["last"].double()
    assert torch.equal(other.state_dict()["state"][0]["master"], expected)


def test_masters_are_saved_and_loaded(ranks):
    ranks(2).run(masters_travel)


def refusals() -> None:
    model = Model()
    optimizer = sharded("AdamW", model)
    advance(model, optimizer, 0, 1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"param groups with \[7\] parameters, .* \[4, 3\]"):
        optimizer.load_state_dict(optim.AdamW(model.parameters()).state_dict())
    with pytest.raises(CheckpointError, match=r"this has \['first'\]"):
        optimizer.load_state_dict({"first": 1})
    wrong = copy.deepcopy(before)
    wrong["state"][1]["exp_avg"] = torch.zeros(7, 5)
    with pytest.raises(CheckpointError, match=facts_pattern("'exp_avg'", "shape (7, 5)")):
        optimizer.load_state_dict(wrong)
    # a refused state changes nothing
    assert_same(optimizer.state_dict(), before)
    if world().rank() == 1:
        for state in optimizer.state.values():
            state["extra"] = torch.zeros(())
    with pytest.raises(CheckpointError, match="different state for last"):
        optimizer.state_dict()
    with pytest.raises(CommError, match="to=2 is not an index in a group of 2"):
        sharded("AdamW", Model()).state_dict(to=2)
    primitives.barrier()


def test_a_state_of_something_else_is_refused_by_name(ranks):
    ranks(2).run(refusals)
