"""The plan of buckets is a tiling, respects the cap, and knows nothing of the rank. No torch."""

from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.ddp.bucket_plan import ALIGN_BYTES, SLIGHT, BucketEntry, plan_buckets

entries = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from([("f4", 4), ("f2", 2), ("f8", 8)])), max_size=30
).map(lambda rows: [BucketEntry(i, n, size, key) for i, (n, (key, size)) in enumerate(rows)])


@given(entries, st.integers(64, 4096))
def test_every_entry_has_one_place_and_places_do_not_overlap(rows: list[BucketEntry], cap: int):
    buckets = plan_buckets(rows, cap)
    assert sorted(i for b in buckets for i in b.members) == [e.index for e in rows]
    for bucket in buckets:
        end = 0
        for i, offset in zip(bucket.members, bucket.offsets, strict=True):
            assert rows[i].key == bucket.key
            assert offset >= end and offset * rows[i].element_bytes % ALIGN_BYTES == 0
            end = offset + rows[i].num_elements
        assert end <= bucket.used_flags
        assert bucket.num_elements == bucket.used_flags + len(bucket.members)
        size = rows[bucket.members[0]].element_bytes
        is_slight = bucket.offsets[-1] * size <= cap * SLIGHT
        assert is_slight or bucket.used_flags * size <= cap


@given(entries, st.integers(64, 4096))
def test_buckets_leave_in_the_order_in_which_a_backward_completes_them(
    rows: list[BucketEntry], cap: int
):
    buckets = plan_buckets(rows, cap)
    completed = [min(b.members) for b in buckets]
    assert completed == sorted(completed, reverse=True)
    assert all(list(b.members) == sorted(b.members, reverse=True) for b in buckets)
