"""Each look of the search finds its own kind of mistake, and nothing where ranks are right."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.equivalence.backward import backward_culprit
from torchdistpackage.equivalence.compare import (
    alone_difference,
    first_difference,
    stopped_difference,
)
from torchdistpackage.equivalence.record import (
    ModuleCalls,
    ParityRecord,
    ResumeGap,
    dropout_masks,
)

WEIGHT = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2)
GRAD = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
ROWS = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
RIGHT = ParityRecord(
    {},
    modules={"up": ModuleCalls([ROWS], [ROWS * 2])},
    losses=[1.0, 1.0],
    norms=[2.0, 2.0],
    rates=[0.1, 0.2],
    scale=0.25,
    targets=[torch.arange(6)],
    initial={"up.weight": WEIGHT},
    grads={"up.weight": GRAD},
    early={"up.weight": GRAD.square()},
    updated={"up.weight": WEIGHT - 0.1 * GRAD},
)
DATA = {"data": 2}


def changed(**values: object) -> list[ParityRecord]:
    return [RIGHT, replace(RIGHT, **values)]


def test_right_ranks_have_no_finding():
    assert first_difference(RIGHT, changed(), DATA) is None


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"targets": [torch.tensor([1, 2, 3, 4, 5, -100])]}, "labels"),
        ({"moved": ["up.weight"]}, "updated weights"),
        ({"rates": [0.1, 0.4]}, "learning rate"),
        ({"scale": 0.5}, "norm"),
        ({"updated": {"up.weight": 0.9 * WEIGHT - 0.1 * GRAD}}, "weight decay"),
    ],
    ids=["targets", "moved", "rates", "scale", "decay"],
)
def test_a_difference_is_told_by_its_kind(values, kind):
    finding = first_difference(RIGHT, [replace(RIGHT, **values)] * 2, DATA)
    assert finding is not None and finding.kind == kind and finding.axis == "data"


def test_a_gradient_of_the_last_round_alone_is_one_of_accumulation():
    last = {"up.weight": GRAD - RIGHT.early["up.weight"]}
    finding = first_difference(RIGHT, [replace(RIGHT, grads=last)] * 2, {"pipe": 2})
    assert finding is not None and (finding.module, finding.kind) == ("up", "accumulation")


def test_replicas_whose_gradients_differ_are_not_summed():
    grads = {"up.weight": GRAD + torch.eye(4, 2, dtype=torch.float64)}
    finding = first_difference(RIGHT, changed(grads=grads), DATA)
    assert finding is not None and finding.kind == "gradient not summed"


def test_a_loss_of_ranks_that_share_all_tokens_is_that_of_a_shard():
    wrong = [replace(RIGHT, losses=[1 + math.log(2), 1.0])] * 2
    kinds = [first_difference(RIGHT, wrong, {axis: 2}) for axis in ("tensor", "data", "pipe")]
    assert [x and x.kind for x in kinds] == ["loss of a shard", "uneven means", "other targets"]


def test_two_micro_batches_with_one_mask_are_a_finding_also_of_one_process():
    repeated = list[str]()
    net = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    x = torch.ones(4, 16, requires_grad=True)

    def step() -> None:
        for _ in range(2):
            y = net[1](checkpoint(net[0], x, use_reentrant=False))  # draws again in the backward
            y.sum().backward()
            torch.manual_seed(0)

    torch.manual_seed(0)
    masks = dropout_masks(net, step, repeated)
    assert masks.keys() == {"0", "1"} and repeated == ["0", "1"]
    torch.manual_seed(0)
    right = list[str]()
    dropout_masks(net, lambda: [net(x).sum().backward() for _ in range(2)], right)
    assert right == []
    finding = alone_difference(replace(RIGHT, repeated=["drop"]))
    assert finding is not None and (finding.module, finding.kind) == ("drop", "dropout alike")
    again = first_difference(RIGHT, changed(repeated=["drop"]), {"pipe": 2})
    assert again is not None and (again.rank, again.axis) == (1, "pipe")


def test_a_vector_added_to_all_rows_is_a_bias_of_every_rank():
    wrong = replace(RIGHT, modules={"up": ModuleCalls([ROWS], [ROWS * 2 + 1])})
    finding = first_difference(RIGHT, [wrong] * 2, {"tensor": 2})
    assert finding is not None and (finding.module, finding.kind) == ("up", "added on every rank")


def test_ranks_that_refuse_their_samples_are_a_finding_of_data():
    wrong = ParityRecord({}, error="DataError: ranks of one model must get one batch")
    finding = first_difference(RIGHT, [RIGHT, wrong], {"tensor": 2})
    assert finding is not None and finding.axis == "tensor"
    assert (finding.module, finding.stage, finding.kind) == ("data", "samples", "order of data")


@pytest.mark.parametrize(("ratio", "kind"), [(0.5, "gradient divided"), (0.7, "norm")])
def test_a_halved_update_of_what_nobody_clips_is_no_norm(ratio: float, kind: str):
    right = replace(RIGHT, scale=1.0)
    finding = first_difference(right, [replace(right, scale=ratio)] * 2, DATA)
    assert finding is not None and (finding.stage, finding.kind) == (
        ("update", kind) if ratio == 0.5 else ("norm", kind)
    )


def test_other_samples_on_one_rank_come_before_the_states_that_they_make():
    state = ResumeGap("state after a resume", "up.weight#exp_avg", "a step after stop 1", 0.5)
    samples = ResumeGap("data after a resume", "samples", "a step after stop 1", None)
    ranks = [replace(RIGHT, resume_gaps=[state]), replace(RIGHT, resume_gaps=[state, samples])]
    finding = stopped_difference(ranks, DATA)
    assert finding is not None
    assert (finding.module, finding.kind, finding.rank) == ("data", "data after a resume", 1)


def calls(x: torch.Tensor, y: torch.Tensor, *more: torch.Tensor) -> ModuleCalls:
    return ModuleCalls([x, *more], [y])


def test_a_wrong_mask_is_told_of_the_module_that_attends_with_it():
    mask = torch.ones(6, 6, dtype=torch.bool)
    right = {"block.attend": calls(ROWS, ROWS * 2, mask), "block": calls(ROWS, ROWS * 3, mask)}
    wrong = {
        "block.attend": calls(ROWS, ROWS.flip(1), ~mask),
        "block": calls(ROWS, ROWS.flip(1), ~mask),
    }
    rank = replace(RIGHT, modules=wrong)
    finding = first_difference(replace(RIGHT, modules=right), [rank] * 2, {"context": 2})
    assert finding is not None
    assert (finding.module, finding.kind) == ("block.attend", "mask or positions")


def test_what_a_cut_block_gets_wrong_is_told_before_later_blocks():
    names = ("block.up", "block.down", "block", "head")
    modules = {name: calls(ROWS, ROWS * 2) for name in names}
    first = {name: modules[name] for name in ("block.up", "block")}
    second = {name: calls(ROWS.flip(1), ROWS.flip(1)) for name in ("block.down", "block", "head")}
    ranks = [replace(RIGHT, modules=first), replace(RIGHT, modules=second)]
    finding = first_difference(replace(RIGHT, modules=modules), ranks, {"pipe": 2})
    assert finding is not None
    assert (finding.module, finding.kind) == ("block.down", "message changed")


def test_a_sum_that_is_divided_by_the_ranks_is_told_of_its_module():
    right = {"block.down": calls(ROWS, ROWS * 2), "block": calls(ROWS, ROWS * 3)}
    wrong = {"block.down": calls(ROWS, ROWS), "block": calls(ROWS, ROWS * 2)}
    rank = replace(RIGHT, modules=wrong)
    finding = first_difference(replace(RIGHT, modules=right), [rank] * 2, {"tensor": 2})
    assert finding is not None
    assert (finding.module, finding.factor) == ("block.down", "/ 2")


@pytest.mark.parametrize(("factor", "kind"), [(0.7, "norm"), (2.0, "gradient summed")])
def test_one_factor_of_all_gradients_is_a_clipping_unless_it_is_the_ranks(factor, kind):
    grads = {"up.weight": GRAD, "up.bias": GRAD[0] + 2}
    right = replace(RIGHT, grads=grads, early={})
    rank = replace(right, grads={name: factor * x for name, x in grads.items()})
    finding = first_difference(right, [rank] * 2, DATA)
    assert finding is not None and finding.kind == kind


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("wrong", [0.5, 2.0, 3.0])
def test_a_backward_that_is_wrong_by_a_number_of_ranks_is_found(scale: float, wrong: float):
    """A rank's loss may differ by such a factor too, as a mean of its part, but everywhere."""
    grads = [torch.randn(4, 3, dtype=torch.float64) for _ in range(4)]

    def record(factors: tuple[float, ...], rows: slice) -> ParityRecord:
        shown = [[grad[rows] * f] for grad, f in zip(grads, factors, strict=True)]
        names = ("first", "second", "third")
        calls = {n: ModuleCalls([], [], shown[i], shown[i + 1]) for i, n in enumerate(names)}
        return ParityRecord({}, modules=calls)

    right = record((scale,) * 4, slice(0, 2))
    planted = record((scale * wrong, scale * wrong, scale, scale), slice(2, 4))
    one = record((1.0,) * 4, slice(0, 4))
    found = backward_culprit(one, [right, planted], {"data": 2})
    assert found is not None and (found.module, found.rank) == ("second", 1)
    assert backward_culprit(one, [right, right], {"data": 2}) is None
