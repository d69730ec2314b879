"""Offload as on a device, with copies that run when somebody waits: same bits, what overlaps."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn, optim

from tests.ddp.zero.late_streams import Changed, LateStreams
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero import offload as offload_module
from torchdistpackage.ddp.zero import optimizer as optimizer_module
from torchdistpackage.ddp.zero.offload import AHEAD, PIECE_BYTES, Arena, Offload, cores_of_a_rank
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.shard_bounds import SLICE_BYTES
from torchdistpackage.optim.clip import clip_grad_norm_

STEPS, WIDTH, LAYERS = 4, 12, 6
MIXED = [(torch.float64, None), (torch.bfloat16, None), (torch.bfloat16, torch.bfloat16)]


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def wrapped(net: nn.Module, streams: LateStreams | None, **options: object) -> ZeroOptimizer:
    """streams: None keeps everything beside the parameters."""
    inner = optim.AdamW(net.parameters(), fused=True)
    options = {"bucket_cap_mb": 1e-4, "offload": streams is not None, **options}
    with pytest.MonkeyPatch.context() as p:
        p.setattr(optimizer_module, "Offload", partial(Offload, streams=streams))
        return ZeroOptimizer(inner, net, **options)


def backward(net: nn.Module, number: int) -> None:
    torch.manual_seed(number + 1000 * world().rank())
    dtype = next(net.parameters()).dtype
    net(torch.randn(3, WIDTH, dtype=dtype)).square().mean().backward()


def train(net: nn.Module, optimizer: ZeroOptimizer, clips: bool, num_backwards: int = 3) -> None:
    for step in range(STEPS):
        for part in range(num_backwards):
            backward(net, 10 * step + part)
        if clips:
            clip_grad_norm_(optimizer, 0.1, group=world())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:  # writes masters while they may still be on their way up
            optimizer.load_state_dict(optimizer.state_dict())


def same_numbers(options: dict, dtype: torch.dtype, clips: bool) -> None:
    found = []
    for streams in (LateStreams(), None):
        net = build(dtype)
        optimizer = wrapped(net, streams, **options)
        train(net, optimizer, clips)
        optimizer.finish()
        found.append((net.state_dict(), optimizer.state_dict()))
        if streams is not None:
            assert streams.host_waits_in_backward == 0, "also where sums add up"
            for stream in streams.made:  # what the host has not waited for must be as it was
                stream.record_event().synchronize()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def kinds():
    """Every kind of numbers in every stage, clipped and not; the small set has each once."""
    for at, stage, clips in itertools.product(range(len(MIXED)), (1, 2, 3), (False, True)):
        small = at == stage % len(MIXED) and clips == (stage == 2)
        yield pytest.param(*MIXED[at], stage, clips, marks=[] if small else pytest.mark.full)


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "master", "stage", "clips"), list(kinds()))
def test_late_copies_give_the_same_bits_and_no_backward_waits(pool, dtype, master, stage, clips):
    options = {"stage": stage, "master_dtype": master}
    pool(2).run(same_numbers, options, dtype, clips, transport="late")


def masters_go_up(stage: int) -> None:
    """With one sum a step nothing comes down behind what went up, so the host itself must wait."""
    streams, net = LateStreams(), build(torch.float64)
    train(net, wrapped(net, streams, stage=stage), clips=False, num_backwards=1)
    for stream in streams.made:
        stream.record_event().synchronize()


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_waits_for_masters_that_are_going_up(pool, stage):
    pool(2).run(masters_go_up, stage, transport="late")


def load_while_they_go_up() -> None:
    streams, net = LateStreams(), build(torch.float32)
    optimizer = wrapped(net, streams, wire_dtype=torch.bfloat16)
    saved = copy.deepcopy(optimizer.state_dict())
    assert "master" in saved["state"][0]
    backward(net, 0)
    optimizer.step()
    optimizer.load_state_dict(saved)
    for stream in streams.made:
        stream.record_event().synchronize()


def test_loading_a_state_waits_for_masters_that_are_going_up(pool):
    pool(2).run(load_while_they_go_up, transport="late")


@pytest.mark.full
def test_whole_parameters_too(pool):
    pool(2).run(same_numbers, {"stage": 3, "whole": True}, torch.float64, False, transport="late")


def in_one_step(stage: int) -> tuple[list[int], list[int]]:
    """Of each call of the optimizer in a steady step: copies begun each way by then."""
    streams, net = LateStreams(), build(torch.float32)
    optimizer = wrapped(net, streams, stage=stage)
    train(net, optimizer, clips=False, num_backwards=1)
    down, up = streams.made
    begun: list[tuple[int, int]] = []
    plain = optimizer.inner.step

    def step() -> None:
        begun.append((len(down.copies), len(up.copies)))
        plain()

    optimizer.inner.step = step
    before = len(down.copies), len(up.copies)
    backward(net, 0)
    optimizer.step()
    assert len(begun) == len(optimizer._buckets) > 2 * AHEAD
    assert len(down.copies) - before[0] == len(begun)
    return [d - before[0] for d, _ in begun], [u - before[1] for _, u in begun]


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_two_buckets_are_on_their_way_down_while_one_is_stepped(pool, stage):
    for down, _ in pool(2).run(in_one_step, stage, transport="late"):
        assert all(d >= min(at + 1 + AHEAD, len(down)) for at, d in enumerate(down))


def both_ways() -> tuple[LateStreams, Offload, torch.Tensor, torch.Tensor]:
    streams = LateStreams()
    offload = Offload(torch.device("cpu"), streams)
    device = torch.arange(64.0)
    return streams, offload, offload.allocate(device, device.dtype), device


def test_what_goes_up_does_not_wait_behind_what_comes_down():
    streams, offload, master, device = both_ways()
    total = offload.allocate(device, device.dtype)
    offload.offload(master, device)
    offload.wait(master)
    offload.offload(total, device * 2)
    offload.to_device(master, device)
    down, up = streams.made
    assert torch.equal(device, torch.arange(64.0)) and not down.copies[-1].is_done
    offload.wait(total)
    assert torch.equal(total, 2 * device)
    assert [len(x.copies) for x in (down, up)] == [2, 1]


def test_the_host_waits_before_it_writes_what_is_going_up():
    streams, offload, master, device = both_ways()
    offload.offload(master, device)
    offload.wait(master)
    offload.to_device(master, device)
    waits = streams.host_waits
    offload.wait(master)
    assert streams.host_waits == waits + 1
    master += 1
    streams.made[1].record_event().synchronize()

    offload.to_device(master, device)
    master += 1
    with pytest.raises(Changed):
        offload.wait(master)


def test_a_copy_down_follows_the_one_up_from_the_same_memory_and_is_read_before_it_is_reused():
    streams, offload, master, device = both_ways()
    offload.offload(master, device)
    here = offload.here(master)
    here += 1
    offload.offload(master, here)
    offload.free(master)
    here += 1
    offload.wait(master)
    assert torch.equal(master, torch.arange(64.0) + 1)

    offload.offload(master, here)
    here += 1
    with pytest.raises(Changed):
        offload.wait(master)
    assert streams.host_waits_in_backward == 0


def test_memory_is_pinned_in_few_pieces():
    streams, offload, *_ = both_ways()
    sizes = [3 * 2**10 + 5, 2**14 + 1, 7, 0, 2**12, *[2**11 + 3] * 100]
    kept = [offload.allocate(torch.empty(size), torch.float32) for size in sizes]
    assert [len(x) for x in kept] == sizes
    for number, x in enumerate(kept):
        x.fill_(number)
    for number, x in enumerate(kept):
        assert (x == number).all(), "each has memory of its own"
        assert x.storage_offset() * x.itemsize % SLICE_BYTES == 0
    rounded = sum(1 << (4 * size - 1).bit_length() for size in sizes if size)
    assert offload.bytes <= streams.num_bytes < min(2 * offload.bytes, rounded)


def test_a_piece_grows_with_what_there_is_up_to_a_limit():
    made: list[int] = []

    def memory(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    arena = Arena(memory)
    for _ in range(100):
        arena.take(PIECE_BYTES // 16 // 4 + 1, torch.float32)
    assert all(size & (size - 1) == 0 for size in made)
    assert max(made) == PIECE_BYTES and sum(made) == arena.num_bytes
    assert len(made) < 15


def threads_inside(streams: LateStreams | None) -> list[int]:
    net, seen = build(torch.float32), list[int]()
    optimizer = wrapped(net, streams)
    plain = optimizer.inner.step
    optimizer.inner.step = lambda: (seen.append(torch.get_num_threads()), plain())
    backward(net, 0)
    optimizer.step()
    return [*seen, torch.get_num_threads()]


def threads_of_a_step(cores: int) -> tuple[set[int], int, set[int]]:
    with pytest.MonkeyPatch.context() as p:
        p.setattr(offload_module, "cores_of_a_rank", lambda: cores)
        *inside, after = threads_inside(LateStreams())
        return {*inside}, after, {*threads_inside(None)}


def test_the_step_has_this_ranks_cores(ranks):
    assert ranks(1).run(threads_of_a_step, 3) == [({3}, 1, {1})]


@pytest.mark.parametrize(
    ("free", "ranks_here", "expected"), [(8, 4, 2), (8, 16, 1), (2, 4, 2), (4, 4, 2)]
)
def test_ranks_of_a_node_share_its_cores_also_where_several_are_bound_alike(
    monkeypatch, free, ranks_here, expected
):
    monkeypatch.setattr(offload_module.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(offload_module.os, "sched_getaffinity", lambda pid: set(range(free)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    assert cores_of_a_rank() == expected


def read_first_elsewhere(stage: int) -> list[bool]:
    """Of each gather that a second stream was the first to read: whether the first one waits."""
    streams, net = LateStreams(), build(torch.float32)
    optimizer = wrapped(net, None, stage=stage)
    side, ordered = streams.stream(), []
    backward(net, 0)
    for bucket in optimizer._buckets:
        bucket.parameters._streams = streams
    optimizer.step()
    for bucket in optimizer._buckets:
        pending = bucket.parameters._work

        class Noted:
            def wait(self, pending=pending):
                ordered.append(streams.current() is streams.computing)
                pending.wait()

        bucket.parameters._work = Noted()
    with streams.on(side):
        for p in net.parameters():
            p.sum()
    assert len(side.items) == len(ordered) == len(optimizer._buckets), "and it waits for that one"
    return ordered


def test_the_stream_that_steps_waits_too_whichever_reads_first(pool):
    for ordered in pool(2).run(read_first_elsewhere, 1, transport="late"):
        assert ordered and all(ordered)
