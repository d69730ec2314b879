"""Communication hooks keep what they promise: how exact, how many bytes, nothing forgotten."""

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.comm import backends, primitives
from torchdistpackage.comm.backends import Transport
from torchdistpackage.ddp.bucket_comm import BucketMember, bind
from torchdistpackage.ddp.comm_hooks import PowerSGD, bf16_compress, fp16_compress
from torchdistpackage.ddp.naive_ddp import NaiveDDP

SHAPES = {"wide": (12, 30), "tall": (40, 8), "conv": (10, 6, 3, 3), "bias": (12,), "scalar": ()}
NUM_MARKS = len(SHAPES)
PARAMETERS: dict[tuple[str, tuple[int, ...]], Tensor] = {}


def members_of(shapes: dict[str, tuple[int, ...]]) -> tuple[list[BucketMember], int]:
    """Members with a gap after each, as alignment leaves it."""
    members, offset = [], 0
    for name, shape in shapes.items():
        like = PARAMETERS.setdefault((name, shape), torch.empty(shape))
        members.append(BucketMember(name, like.shape, like.stride(), offset, like))
        offset += like.numel() + 3
    return members, offset - 3 + len(members)


def gradient(rank: int, step: int, num_elements: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    flat = torch.randn(num_elements, generator=draw, dtype=torch.float64)
    flat[-NUM_MARKS:] = 1.0
    flat[-1] = 0.0  # nobody used the last
    flat[-2] = float(rank == 0)
    return flat.to(dtype)


def the_sum(step: int, num_elements: int) -> Tensor:
    return sum(gradient(r, step, num_elements) for r in range(dist.get_world_size()))


def values(flat: Tensor, members: Sequence[BucketMember]) -> list[Tensor]:
    return [flat.as_strided(m.shape, m.stride, m.offset) for m in members]


def halves(which: str) -> None:
    hook, digits = {"bf16": (bf16_compress, 8), "fp16": (fp16_compress, 11)}[which]
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = gradient(rank, 0, 500, torch.float32)
    hook(flat, dist.group.WORLD, primitives.SUM).wait()
    largest = sum(gradient(r, 0, 500).abs() for r in range(size))
    assert ((flat - the_sum(0, 500)).abs() <= size * 2.0**-digits * largest).all()
    assert (flat != the_sum(0, 500).float()).any(), "it must have been rounded"
    assert flat[-1] == 0 and flat[-2] > 0
    for dtype in (torch.complex64, torch.bfloat16):
        exact = torch.full((4,), 1.0, dtype=dtype)
        hook(exact, dist.group.WORLD, primitives.SUM).wait()
        assert torch.equal(exact, torch.full((4,), float(size), dtype=dtype))


@pytest.mark.parametrize("which", ["bf16", "fp16"])
def test_halves_are_as_near_as_their_digits(ranks, which):
    ranks(3).run(halves, which)


def large_numbers() -> None:
    """A mean of 6e4 over three ranks arrives, though their sum has no fp16."""
    net = nn.Linear(8, 1, bias=False)
    ddp = NaiveDDP(net, comm_hook=fp16_compress)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((1, 8), 6e4)).sum().backward()
        torch.testing.assert_close(net.weight.grad, torch.full((1, 8), 6e4), rtol=1e-3, atol=0)


def test_an_fp16_mean_overflows_only_where_it_has_no_fp16_itself(ranks):
    ranks(3).run(large_numbers)


def full_rank() -> None:
    """With as many columns as a matrix has, the product is the whole sum, and nothing is lost."""
    members, num_elements = members_of({"square": (2, 60), **SHAPES})
    start = bind(PowerSGD(2), members[:1], num_elements)
    for step in range(2):
        flat = gradient(dist.get_rank(), step, num_elements)
        start(flat, dist.group.WORLD, primitives.SUM).wait()
        mine, truth = values(flat, members)[0], values(the_sum(step, num_elements), members)[0]
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12)


def test_enough_columns_give_the_exact_sum(ranks):
    ranks(3).run(full_rank)


def low_rank_sum() -> None:
    """All ranks project on the same columns, so what is low is the rank of the sum."""
    members, num_elements = members_of({"m": (20, 24)})
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [gradient(r, 0, 480).view(20, 24) for r in range(size)]
    truth = parts[0][:, :1] @ parts[1][:1]
    parts[-1] = truth - sum(parts[:-1])
    flat = torch.zeros(num_elements).double()
    flat[:480] = parts[rank].flatten()
    bind(PowerSGD(1), members, num_elements)(flat, dist.group.WORLD, primitives.SUM).wait()
    torch.testing.assert_close(flat[:480].view(20, 24), truth, rtol=0, atol=1e-12)


def test_a_sum_of_low_rank_arrives_exactly_though_no_part_is_of_low_rank(ranks):
    ranks(3).run(low_rank_sum)


def nothing_forgotten() -> None:
    """All outputs, and what the ranks keep, are together all gradients of all ranks.

    Half-way the members are packed in another order.
    """
    hook, shapes = PowerSGD(2), dict(SHAPES)
    sent = {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    truth = copy.deepcopy(sent)
    for step in range(6):
        if step % 3 == 0:
            shapes = dict(reversed(shapes.items()))
            members, num_elements = members_of(shapes)
            start = bind(hook, members, num_elements)
        flat = gradient(dist.get_rank(), step, num_elements)
        start(flat, dist.group.WORLD, primitives.SUM).wait()
        whole = the_sum(step, num_elements)
        assert torch.equal(flat[-NUM_MARKS:], whole[-NUM_MARKS:]), "the marks"
        for member, got, all_of_it in zip(
            members, values(flat, members), values(whole, members), strict=True
        ):
            sent[member.name] += got
            truth[member.name] += all_of_it
        for theirs in primitives.gather_objects(values(flat, members)):
            for mine, other in zip(values(flat, members), theirs, strict=True):
                assert torch.equal(mine, other), "all ranks must get the same"
    for member in members:
        matrix = hook._matrices.get(member.parameter)
        if matrix is not None:
            kept = primitives.all_reduce(matrix.lost.clone(), dist.group.WORLD)
            assert kept.abs().max() > 0.1, "something must have been lost on the way"
            sent[member.name] += kept.view(member.shape)
        torch.testing.assert_close(sent[member.name], truth[member.name], rtol=0, atol=1e-11)


def test_power_sgd_forgets_nothing_and_gives_all_ranks_the_same_bits(ranks):
    ranks(3).run(nothing_forgotten)


def warm_start() -> None:
    """With one gradient again and again, the power iteration finds its largest directions."""
    members, num_elements = members_of({"m": (20, 24)})
    start = bind(PowerSGD(3), members, num_elements)
    u, _, v = torch.linalg.svd(torch.randn(20, 24, generator=torch.Generator().manual_seed(1)))
    spectrum = torch.tensor([9.0, 8.0, 7.0, *[0.5] * 17])
    truth = ((u * spectrum) @ v[:20]).double()
    best = ((u[:, :3] * spectrum[:3]) @ v[:3]).double()
    distances = []
    for _ in range(8):
        flat = torch.zeros(num_elements).double()
        flat[: truth.numel()] = truth.flatten() / dist.get_world_size()
        matrix = start.args[0][0]
        matrix.lost = None if matrix.lost is None else torch.zeros(20, 24).double()
        start(flat, dist.group.WORLD, primitives.SUM).wait()
        distances.append((flat[: truth.numel()].view(20, 24) - best).norm().item())
    assert distances[-1] < 1e-3 * best.norm() and distances[-1] < 0.01 * distances[0]


def test_power_sgd_starts_where_the_last_step_ended(ranks):
    ranks(2).run(warm_start)


@contextmanager
def sizes_sent() -> Iterator[list[int]]:
    """Elements of each message that is begun inside."""
    sizes: list[int] = []
    reduce = primitives.start_all_reduce
    primitives.start_all_reduce = lambda x, *rest: (sizes.append(x.numel()), reduce(x, *rest))[1]
    try:
        yield sizes
    finally:
        primitives.start_all_reduce = reduce


def messages() -> None:
    """Of two buckets: both first factors before either wait, both second ones in the first."""
    members, num_elements = members_of({"a": (64, 64), "b": (64, 128), "bias": (64,)})
    hook, group = PowerSGD(2), dist.group.WORLD
    starts = [bind(hook, members, num_elements) for _ in range(2)]
    with sizes_sent() as sizes:
        begun = [start(torch.ones(num_elements), group, primitives.SUM) for start in starts]
        assert sizes == [2 * (64 + 64) + 64 + 3] * 2, "P of both matrices, the bias, the marks"
        begun[0].wait()
        assert sizes[2:] == [2 * (64 + 128)] * 2
        begun[1].wait()
        assert len(sizes) == 4


def test_power_sgd_sends_two_thin_matrices_and_what_is_small_as_it_is(ranks):
    ranks(2).run(messages)


def not_finite() -> None:
    members, num_elements = members_of({"m": (20, 24)})
    start = bind(PowerSGD(2), members, num_elements)
    for step in range(3):
        flat = gradient(dist.get_rank(), step, num_elements)
        if step == 1 and dist.get_rank() == 0:
            flat[5] = float("inf")
        start(flat, dist.group.WORLD, primitives.SUM).wait()
        assert flat[:480].isfinite().all() == (step != 1)


def test_one_step_that_is_not_finite_spoils_no_later_one(ranks):
    ranks(2).run(not_finite)


def exact_at_first() -> None:
    members, num_elements = members_of(SHAPES)
    start = bind(PowerSGD(1, num_exact_steps=2), members, num_elements)
    exact = []
    for step in range(3):
        flat = gradient(dist.get_rank(), step, num_elements)
        start(flat, dist.group.WORLD, primitives.SUM).wait()
        exact.append(torch.allclose(flat, the_sum(step, num_elements), rtol=0, atol=1e-12))
    assert exact == [True, True, False]


def test_the_first_steps_are_exact_on_request(ranks):
    ranks(2).run(exact_at_first)


def test_a_rank_below_one_is_refused():
    with pytest.raises(ValueError, match="rank is 0; use 1 or more columns"):
        PowerSGD(0)


def test_a_pickle_has_the_settings_and_not_what_was_kept():
    hook = PowerSGD(3, num_exact_steps=5, seed=2)
    members, num_elements = members_of(SHAPES)
    bind(hook, members, num_elements)
    back = pickle.loads(pickle.dumps(hook))  # noqa: S301
    assert vars(back).items() >= {"rank": 3, "num_exact_steps": 5, "seed": 2}.items()
    assert len(hook._matrices) > 0 and len(back._matrices) == 0


LAYERS = {f"{name}{i}": shape for i in range(3) for name, shape in (("a", (9, 12)), ("b", (20, 5)))}


def factored(queued: bool) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """(the bucket after each of two steps, shapes of what was made orthonormal)."""
    shapes: list[tuple[int, ...]] = []
    qr = torch.linalg.qr

    def note(x: Tensor):
        shapes.append(tuple(x.shape))
        return qr(x)

    members, num_elements = members_of(LAYERS)
    start, seen = bind(PowerSGD(rank=2), members, num_elements), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "qr", note)
        patch.setitem(backends._transports, "gloo", Transport("gloo", queued=queued, direct=True))
        for step in range(2):
            flat = gradient(dist.get_rank(), step, num_elements)
            start(flat, dist.group.WORLD).wait()
            seen.append(flat)
    return seen, shapes


def one_call_for_each_shape() -> None:
    batched, shapes = factored(True)
    one_by_one, singly = factored(False)
    assert sorted(shapes) == [(3, 9, 2)] * 2 + [(3, 20, 2)] * 2
    assert len(singly) == 2 * len(LAYERS)
    assert all(map(torch.equal, batched, one_by_one))


@pytest.mark.own_transport("sets the transport itself")
def test_matrices_of_one_shape_are_made_orthonormal_in_one_call_where_calls_are_launches(ranks):
    ranks(2).run(one_call_for_each_shape)
