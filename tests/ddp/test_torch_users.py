"""What users of torch's DDP rely on, one promise a test: accumulation, copies, parameters.

Each is held against the reference (reference.py) on ranks with data of their own.
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.against_reference import (
    DIM,
    both,
    descend,
    expect_equal,
    follow,
    part,
    squares,
)
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.reference import ReferenceDDP

SMALL_MIB = 0.0001
"""Room for one layer, so that there are several buckets."""


def layers(number: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(number))).double()


# -- accumulation --------------------------------------------------------------------------


def gradients_add_up() -> None:
    ddp, reference = both(layers)
    follow(ddp, reference, squares, num_micro=3, reduce_each=True)


def test_gradients_of_several_reduced_backwards_add_up(ranks):
    ranks(2).run(gradients_add_up)


def last_microbatch() -> None:
    ddp, reference = both(layers, num_grad_acc_iter=3, bucket_cap_mb=SMALL_MIB)
    follow(ddp, reference, squares, num_micro=3)
    events: list[str] = []
    ddp.reducer.on_launch = lambda b: events.append(f"bucket {b}")
    for name, parameter in ddp.module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    for micro in range(3):
        assert not any(event.startswith("bucket") for event in events), "only the last one sends"
        events.clear()
        squares(ddp, part(9, micro)).backward()
    assert events.index("bucket 0") < events.index("0.weight")


def test_num_grad_acc_iter_reduces_in_the_last_microbatch_while_it_runs(ranks):
    ranks(2).run(last_microbatch)


# -- wrappers ------------------------------------------------------------------------------


def two_wrappers() -> None:
    """One feeds the other; then each has a step without the other."""
    (first, first_truth), (second, second_truth) = both(layers), both(layers)
    for step in range(3):
        for net in (first, first_truth, second, second_truth):
            net.zero_grad()
        squares(second, torch.tanh(first(part(step)))).backward()
        squares(second_truth, torch.tanh(first_truth(part(step)))).backward()
        first_truth.average(), second_truth.average()
        expect_equal(first.module, first_truth.module)
        expect_equal(second.module, second_truth.module)
    follow(second, second_truth, squares)
    follow(first, first_truth, squares)


def test_two_wrappers_live_in_one_process_and_in_one_graph(ranks):
    ranks(2).run(two_wrappers)


def copies() -> None:
    ddp, reference = both(layers, bucket_cap_mb=SMALL_MIB)
    follow(ddp, reference, squares)
    other, other_truth = copy.deepcopy(ddp), ReferenceDDP(copy.deepcopy(reference.module))
    descend(other), descend(other_truth)
    follow(other, other_truth, squares, steps=range(3, 6))
    follow(ddp, reference, squares, steps=range(6, 9))
    expect_equal(other.module, other_truth.module)


def test_a_deepcopy_trains_on_its_own(ranks):
    ranks(2).run(copies)


def pickles() -> None:
    ddp, reference = both(layers, bucket_cap_mb=SMALL_MIB, num_grad_acc_iter=2)
    follow(ddp, reference, squares, num_micro=2)
    back = pickle.loads(pickle.dumps(ddp))  # noqa: S301
    follow(back, reference, squares, steps=range(3, 6), num_micro=2)


def test_an_unpickled_wrapper_goes_on_over_the_default_group(ranks):
    ranks(2).run(pickles)


# -- which parameters ------------------------------------------------------------------------


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused() -> None:
    ddp, reference = both(lambda: Spare().double())
    follow(ddp, reference, squares)
    assert ddp.module.unused.weight.grad is None


def test_unused_parameters_stay_without_gradient(ranks):
    ranks(2).run(unused)


def used_by_one_rank() -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        spare = net.module.unused(x).sum() if dist.get_rank() == 1 else 0
        return squares(net, x) + spare

    ddp, reference = both(lambda: Spare().double(), bucket_cap_mb=SMALL_MIB)
    follow(ddp, reference, loss)
    assert ddp.module.unused.weight.grad is not None


def test_parameters_that_one_rank_uses_count_zero_on_the_others(ranks):
    ranks(3).run(used_by_one_rank)


def one_layer_three_times() -> nn.Module:
    layer = nn.Linear(DIM, DIM)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(DIM, DIM), layer).double()


def shared() -> None:
    follow(*both(one_layer_three_times, bucket_cap_mb=SMALL_MIB), squares)


def test_a_module_in_several_places_is_reduced_once(ranks):
    ranks(2).run(shared)


class Tied(nn.Module):
    def __init__(self, sparse: bool = False):
        super().__init__()
        self.embed = nn.Embedding(10, DIM, sparse=sparse)
        self.head = nn.Linear(DIM, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.abs().mul(2).long().clamp(max=9)))


def tied() -> None:
    ddp, reference = both(lambda: Tied().double())
    follow(ddp, reference, squares)
    assert ddp.module.head.weight is ddp.module.embed.weight
    assert set(ddp.state_dict()) == {"embed.weight", "head.weight"}


def test_tied_weights_stay_one_and_are_reduced_once(ranks):
    ranks(2).run(tied)


def frozen() -> None:
    ddp, reference = both(layers)
    for net in (ddp.module, reference.module):
        net[1].requires_grad_(False)
    follow(ddp, reference, squares)
    for net in (ddp.module, reference.module):
        net.zero_grad()
        net[0].requires_grad_(False)
        net[1].requires_grad_(True)
    follow(ddp, reference, squares, steps=range(3, 6))


def test_parameters_may_be_frozen_and_freed_at_any_time(ranks):
    ranks(2).run(frozen)


def late() -> None:
    """Each rank adds a layer with values of its own; all go on with the first rank's."""
    ddp, reference = both(layers, bucket_cap_mb=SMALL_MIB)
    follow(ddp, reference, squares)
    torch.manual_seed(dist.get_rank())
    ddp.module.append(nn.Linear(DIM, DIM).double())
    torch.manual_seed(0)
    reference.module.append(nn.Linear(DIM, DIM).double())
    follow(ddp, reference, squares, steps=range(3, 6))


def test_parameters_added_later_are_taken_in_at_the_next_forward(ranks):
    ranks(2).run(late)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, DIM, sparse=True)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x.abs().mul(10).long().clamp(max=49)))


def sparse() -> None:
    ddp, reference = both(lambda: Bags().double())
    follow(ddp, reference, squares)
    assert ddp.module.words.weight.grad.is_sparse, "as one process has it"
    optimizer = torch.optim.SparseAdam([ddp.module.words.weight])
    optimizer.step()


def test_sparse_gradients_are_averaged_and_stay_sparse(ranks):
    ranks(2).run(sparse)


def sparse_accumulated() -> None:
    """Also with a rank that looks up nothing, and over microbatches."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return squares(net, x) if dist.get_rank() else net(x[:0]).sum()

    follow(*both(lambda: Bags().double(), num_grad_acc_iter=2), loss, num_micro=2)
    follow(*both(lambda: Bags().double()), squares, num_micro=2, reduce_each=True)


@pytest.mark.full
def test_sparse_gradients_accumulate_and_may_be_empty(ranks):
    ranks(3).run(sparse_accumulated)


def ignored() -> None:
    net = layers()
    net._ddp_params_and_buffers_to_ignore = ["1.weight"]
    with torch.no_grad():
        net[1].weight.fill_(dist.get_rank())
    ddp = NaiveDDP(net)
    squares(ddp, part(0)).backward()
    assert bool((net[1].weight == dist.get_rank()).all())
    alone = copy.deepcopy(net)
    alone.zero_grad()
    squares(alone, part(0)).backward()
    assert torch.equal(net[1].weight.grad, alone[1].weight.grad)
    assert not torch.equal(net[0].weight.grad, alone[0].weight.grad)


def test_ignored_parameters_keep_values_and_gradients_of_their_own(ranks):
    ranks(2).run(ignored)
