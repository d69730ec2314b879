"""Replicas are told apart by name and shape at wrap, and by one bit ever after."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.ddp.param_sync import (
    ReplicatedTensor,
    check_replicas,
    find_differences,
    verify_params_match,
)
from torchdistpackage.errors import CommError

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex128),
]


def replicas_of(module: nn.Module) -> list[ReplicatedTensor]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [ReplicatedTensor(name, x, dist.group.WORLD) for name, x in tensors]


def flip(x: Tensor, element: int, bit: int) -> None:
    view = x.detach().view(torch.uint8).view(-1)
    view[element * x.element_size() + bit // 8] ^= 1 << bit % 8


def some_bits(odd: int) -> None:
    """The lowest, one within and the highest bit of each dtype; sizes around a table's width."""
    group, replicas = dist.group.WORLD, []
    for dtype in DTYPES:
        for size in (1, 3, 4096, 4097, 9000):
            x = torch.arange(size).to(dtype)
            bits = {0} if dtype is torch.bool else {0, 3, 8 * x.element_size() - 1}
            for bit in bits:
                y = x.clone()
                if dist.get_rank() == odd:
                    flip(y, size * 2 // 3, bit)
                replicas.append(ReplicatedTensor(f"{dtype}, {size} elements, bit {bit}", y, group))
            replicas.append(ReplicatedTensor("the same", x, group))
            replicas.append(ReplicatedTensor("the same", torch.cat([x, x])[1 : 1 + size], group))
    found = find_differences(replicas)
    names = [r.name for r in replicas if r.name != "the same"]
    assert [(d.name, d.odd) for d in found] == [(name, (odd,)) for name in names]


def test_one_flipped_bit_is_found_on_its_rank(ranks):
    ranks(3).run(some_bits, 1)


def flipped_in_a_module() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(4, 4))
    net[0].to(memory_format=torch.channels_last)
    net[2].requires_grad_(False)
    check_replicas(replicas_of(net))
    if dist.get_rank() == 2:
        flip(net[1].running_var, 3, 30)
    with pytest.raises(CommError, match=r"1 tensors .* in bits: 1\.running_var on rank 2; go back"):
        check_replicas(replicas_of(net))
    if dist.get_rank() == 0:
        flip(net[2].bias, 0, 0)
    names = {str(d) for d in find_differences(replicas_of(net))}
    assert names == {"1.running_var on rank 2", "2.bias on rank 0"}


def test_the_error_names_tensor_and_rank_and_all_ranks_raise_it(ranks):
    ranks(4).run(flipped_in_a_module)


def cancelling_changes() -> None:
    """Two units in the last place, one up and one down: a plain sum of the bits stays the same."""
    x = torch.full((10000,), 5, dtype=torch.int32)
    places = [(0, 1), (0, 8192), (10, 14), (9000, 9998), (9, 8201)]
    for up, down in places:
        y = x.clone()
        if dist.get_rank() == 1:
            y[up] += 1
            y[down] -= 1
        with pytest.raises(CommError, match=r"x between ranks \(0, 1\), no majority"):
            check_replicas([ReplicatedTensor("x", y.view(torch.float32), dist.group.WORLD)])


def test_changes_that_cancel_in_a_sum_are_found_and_two_ranks_have_no_majority(ranks):
    ranks(2).run(cancelling_changes)


def swapped() -> None:
    a, b = torch.zeros(5), torch.ones(5)
    if dist.get_rank() == 1:
        a, b = b, a
    found = find_differences(
        [ReplicatedTensor("a", a, dist.group.WORLD), ReplicatedTensor("b", b, dist.group.WORLD)]
    )
    assert [d.name for d in found] == ["a", "b"]


def test_two_tensors_in_each_others_place_are_found(ranks):
    ranks(2).run(swapped)


def groups_of_their_own() -> None:
    """Experts: each parameter is compared with its own group only, in any order of groups."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shared, expert = torch.ones(3), torch.full((3,), float(rank % 2))
    alone = dist.new_group([rank], use_local_synchronization=True)
    replicas = [
        ReplicatedTensor("expert", expert, pairs[rank % 2]),
        ReplicatedTensor("shared", shared, dist.group.WORLD),
        ReplicatedTensor("own", torch.full((1,), float(rank)), alone),
    ]
    if rank == 2:
        replicas.reverse()
    verify_params_match(replicas)
    check_replicas(replicas)
    if rank == 3:
        flip(expert, 0, 5)
    found = find_differences(replicas)
    assert [str(d) for d in found] == (
        ["expert between ranks (1, 3), no majority"] if rank % 2 else []
    )


def test_each_tensor_is_compared_over_its_own_group(ranks):
    ranks(4).run(groups_of_their_own)


def unlike(which: str, text: str) -> None:
    odd = dist.get_rank() == 1
    width = 4 if odd and which == "shape" else 3
    net = nn.ModuleDict({"a": nn.Linear(2, width), "b": nn.Linear(2, 2)})
    if odd and which == "dtype":
        net["b"].bias.data = net["b"].bias.data.double()
    if odd and which == "extra":
        net["c"] = nn.Linear(2, 2)
    if odd and which == "order":
        net["a"] = net.pop("a")
    if odd and which == "buffer":
        net.register_buffer("seen", torch.zeros(2))
    with pytest.raises(CommError, match=text):
        verify_params_match(replicas_of(net))


@pytest.mark.parametrize(
    ("which", "text"),
    [
        (
            "shape",
            r"ranks 0 and 1 .*: a\.weight is \(3, 2\) float32 on rank 0 and \(4, 2\) float32",
        ),
        ("dtype", r"b\.bias is \(2,\) float32 on rank 0 and \(2,\) float64 on rank 1"),
        ("extra", r"c\.weight is absent on rank 0 and \(2, 2\) .* \(4 and 6 in all\); build the"),
        ("order", r"number 0 is a\.weight on rank 0 and b\.weight on rank 1; register them"),
        ("buffer", r"seen is absent on rank 0 and \(2,\) float32 on rank 1"),
    ],
)
def test_unlike_modules_are_refused_on_all_ranks_with_name_and_both_sides(ranks, which, text):
    ranks(3).run(unlike, which, text)
