"""What is worked out on paper: the order of gradients, when a step ends, the best sizes."""

from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.ddp.bucket_plan import MIB, BucketEntry, bucket_sizes, plan_buckets
from torchdistpackage.ddp.bucket_tuning import arrival_order, choose_plan, end_s
from torchdistpackage.predict.links import LinkModel

times = st.dictionaries(st.integers(0, 9), st.floats(0, 1), max_size=10)
SIZES_BYTES = bucket_sizes(queued=False).candidates_bytes

GBIT = LinkModel(bytes_per_s=119e6, latency_s=0.0007)


@given(times, st.sets(st.integers(0, 9)))
def test_gradients_go_as_they_came_and_those_that_hold_up_others_last(ready_s, late):
    order = arrival_order(range(10), ready_s, late)
    assert sorted(order) == list(range(10))
    prompt = [i for i in order if i in ready_s and i not in late]
    assert order[: len(prompt)] == tuple(prompt)
    assert [ready_s[i] for i in prompt] == sorted(ready_s[i] for i in prompt)
    assert {*order[len(order) - (10 - len(ready_s)) :]} >= {*range(10)} - {*ready_s}


def mlp(num_layers: int = 8, layer_s: float = 0.015) -> tuple[list[BucketEntry], dict[int, float]]:
    """Layers of 4 MiB, the last of which has its gradient first."""
    entries = [BucketEntry(i, MIB, 4, "f4") for i in range(num_layers)]
    return entries, {i: layer_s * (num_layers - i) for i in range(num_layers)}


def test_a_step_ends_when_the_wire_has_carried_everything_from_the_first_bucket_on():
    entries, ready_s = mlp()
    buckets = plan_buckets(entries, 4 * MIB)
    wire_s = sum(GBIT.latency_s + b.num_elements * 4 / GBIT.bytes_per_s for b in buckets)
    assert abs(end_s(buckets, entries, ready_s, GBIT) - (0.015 + wire_s)) < 1e-9


def test_on_a_wire_that_waits_for_gradients_a_step_ends_one_bucket_after_the_last():
    entries, ready_s = mlp()
    fast = LinkModel(bytes_per_s=1e12, latency_s=0.0)
    assert (
        abs(end_s(plan_buckets(entries, 4 * MIB), entries, ready_s, fast) - max(ready_s.values()))
        < 1e-4
    )


@given(
    st.lists(st.tuples(st.integers(1, 2 * MIB), st.floats(0, 0.01)), min_size=1, max_size=12),
    st.floats(1e7, 1e10),
    st.floats(0, 0.002),
)
def test_what_is_chosen_is_about_as_good_as_any_other(layers, bytes_per_s, call_s):
    entries = [BucketEntry(i, n, 4, "f4") for i, (n, _) in enumerate(layers)]
    ready_s = {i: sum(s for _, s in layers[i:]) for i in range(len(layers))}
    link, order = LinkModel(call_s, bytes_per_s), arrival_order(range(len(layers)), ready_s, ())
    best = choose_plan(entries, ready_s, order, link, SIZES_BYTES)

    def took_s(cap: int, first: int) -> float:
        buckets = plan_buckets(entries, cap, order=order, first_bytes=first)
        return end_s(buckets, entries, ready_s, link) - min(ready_s.values())

    assert best.first_bytes is not None and best.order == order
    mine = took_s(best.cap_bytes, best.first_bytes)
    for cap in SIZES_BYTES[::2]:
        assert mine <= 1.006 * min(took_s(cap, first) for first in SIZES_BYTES if first <= cap)


def test_a_slow_wire_begins_with_a_small_bucket_and_goes_on_with_large_ones():
    entries = [BucketEntry(i, MIB // 16, 4, "f4") for i in range(160)]
    ready_s = {i: 0.001 * (160 - i) for i in range(160)}
    order = arrival_order(range(160), ready_s, ())
    slow = choose_plan(
        entries, ready_s, order, LinkModel(bytes_per_s=20e6, latency_s=0.002), SIZES_BYTES
    )
    assert slow.first_bytes is not None
    assert slow.first_bytes <= 5 * MIB and slow.cap_bytes >= 8 * MIB
    fast = choose_plan(
        entries, ready_s, order, LinkModel(bytes_per_s=1e9, latency_s=0.0001), SIZES_BYTES
    )
    assert fast.cap_bytes < slow.cap_bytes


def test_the_first_bucket_has_a_cap_of_its_own():
    entries = [BucketEntry(i, 1000, 4, i % 2) for i in range(12)]
    buckets = plan_buckets(entries, 20_000, order=range(12), first_bytes=8_192)
    expected = [(0, 2), (1, 3, 5, 7), (4, 6, 8, 10), (9, 11)]
    assert [b.members for b in buckets] == expected


def test_a_bias_travels_with_its_matrix():
    """As a backward of matrices of 4 MiB gives them, each bias before its weight."""
    sizes = [MIB, 1024] * 8
    entries = [BucketEntry(i, n, 4, "f4") for i, n in enumerate(sizes)]
    ready_s = {i: 0.0075 * (16 - i) for i in range(16)}
    order = arrival_order(range(16), ready_s, ())
    best = choose_plan(entries, ready_s, order, GBIT, SIZES_BYTES)
    buckets = plan_buckets(entries, best.cap_bytes, order=order, first_bytes=best.first_bytes)
    assert [b.members for b in buckets] == [(i + 1, i) for i in range(14, -1, -2)]


def share_of_bandwidth(bucket_bytes: int, num_ranks: int) -> float:
    """What a ring that takes 8 us a hop gets of 45 GB/s."""
    slice_s = bucket_bytes / num_ranks / 45e9
    return slice_s / (slice_s + 8e-6)


def test_buckets_grow_with_the_ranks_that_sum_them():
    """A fixed 32 MiB has a twelfth of the bandwidth over 1,024 ranks."""
    for num_ranks in (8, 64, 256, 512, 1024):
        size = bucket_sizes(queued=True, num_ranks=num_ranks).default_bytes
        assert share_of_bandwidth(size, num_ranks) > 0.55
        assert size in bucket_sizes(queued=True, num_ranks=num_ranks).candidates_bytes
    assert bucket_sizes(queued=True, num_ranks=32) == bucket_sizes(queued=True)
    assert bucket_sizes(queued=False, num_ranks=1024) == bucket_sizes(queued=False)
