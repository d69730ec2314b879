"""Who holds which positions, what a rectangle shows, and the bytes that follow. No ranks."""

import itertools

import pytest
import torch

from tests.tells import facts_pattern, tells
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.exchanges import a2a_problem, check_comm_type
from torchdistpackage.parallel.context import choice
from torchdistpackage.parallel.context.choice import AttentionSize, choose, traffic
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.module import context_parallel
from torchdistpackage.parallel.context.order import SequenceOrder, joined, order_of
from torchdistpackage.parallel.context.visibility import (
    Documents,
    Seen,
    Task,
    Visibility,
    needed,
    tasks_of,
    tiled,
)


def test_zigzag_gives_the_chunks_i_and_2n_minus_1_minus_i():
    assert SequenceOrder(8, 2).parts == ((range(2), range(6, 8)), (range(2, 6),))
    assert SequenceOrder(9, 2).lengths == (5, 4)
    assert SequenceOrder(7, 3, "contiguous").parts == ((range(3),), (range(3, 5),), (range(5, 7),))
    assert SequenceOrder(5, 1).parts == ((range(5),),)
    with pytest.raises(LayoutError, match=facts_pattern("5 positions", "6 chunks", "3")):
        SequenceOrder(5, 3)
    with pytest.raises(LayoutError, match=facts_pattern("rank 4 5", "rank 6 3")):
        order_of((5, 3), "zigzag", (4, 6))


def test_under_a_causal_mask_all_ranks_score_equally_many_pairs():
    for size in (2, 3, 8):
        parts = SequenceOrder(8 * size, size).parts
        pairs = [sum(q + 1 for each in part for q in each) for part in parts]
        assert max(pairs) - min(pairs) <= 4


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_visible_score_is_in_one_task(size):
    """By the definition, score by score."""
    seq_len, place = 21, torch.arange(21)
    ids = torch.stack([(place > 5).long() + (place > 14).long(), (place == 3).long()])
    for causal, window, docs, order in itertools.product(
        (False, True), (None, 1, 6), (False, True), ("zigzag", "contiguous")
    ):
        what = Visibility(causal, window, Documents(ids) if docs else None)
        seen = torch.zeros(2, seq_len, seq_len, dtype=torch.int64)
        parts = [tiled(p, what, 4) for p in SequenceOrder(seq_len, size, order).parts]
        for mine, theirs in itertools.product(parts, repeat=2):
            came = theirs if mine is theirs else needed(mine, theirs, what)
            rows, columns = (
                torch.cat([place[r.start : r.stop] for r in x] or [place[:0]]) for x in (mine, came)
            )
            for task in tasks_of(mine, came, what):
                r, c = rows[task.rows], columns[task.columns]
                shown = torch.ones(2, len(r), len(c), dtype=torch.int64)
                if task.seen is Seen.CAUSAL:
                    assert torch.equal(r, c)
                    shown = shown.tril()
                elif task.seen is Seen.SOME:
                    shown[:] = (what.mask(task, torch.float64, place.device) == 0)[:, 0]
                seen[:, r[:, None], c] += shown
        distance = place[:, None] - place
        wanted = torch.ones(2, seq_len, seq_len, dtype=torch.bool)
        wanted &= (distance >= 0) if causal else True
        wanted &= (distance.abs() < window) if window else True
        wanted &= (ids[:, :, None] == ids[:, None]) if docs else True
        assert torch.equal(seen, wanted.long()), (causal, window, docs, order)


def test_a_part_with_itself_is_one_triangle():
    what, parts = Visibility(is_causal=True), SequenceOrder(16, 2).parts
    whole = slice(0, 8)
    assert tasks_of(parts[0], parts[0], what) == (Task(whole, whole, Seen.CAUSAL),)
    # of the peer's chunks the last of mine sees both
    assert tasks_of(parts[0], parts[1], what) == (Task(slice(4, 8), whole, Seen.ALL),)


def test_bytes_are_those_of_the_formulas():
    full = AttentionSize(1 << 12, 8, 2, 64, itemsize=2, is_causal=False)
    kv = 2 * 2 * 64 * 2
    for size in (2, 4, 8):
        part = (1 << 12) // size
        assert traffic(full, size, "all_gather").total == 3 * kv * part * (size - 1)
        assert traffic(full, size, "p2p").forward == kv * part * (size - 1)
        each = 2 * 8 * 64 * 2 + kv * (1 if size <= 2 else size // 2)
        assert traffic(full, size, "a2a", a2a_size=size).forward == part * each * (size - 1) // size
    causal = traffic(AttentionSize(1 << 12, 8, 2, 64), 4, "p2p")
    assert causal.forward == kv * (1 << 10) * 3, "the last rank's first chunk is seen by all"
    windowed = traffic(AttentionSize(1 << 12, 8, 2, 64, window=8), 8, "p2p", order="contiguous")
    assert windowed.forward == kv * (1 << 9), "to the next rank alone"


def test_the_choice_follows_heads_and_links():
    long = AttentionSize(1 << 17, 32, 8, 128)
    assert choose(long, 8, ranks_per_node=1).comm_type == "p2p"
    short = AttentionSize(1 << 12, 32, 32, 128)
    assert choose(short, 8).comm_type == "a2a"
    odd = AttentionSize(1 << 12, 7, 7, 128)
    assert choose(odd, 8).comm_type in ("p2p", "all_gather")
    assert "8 ranks on nodes of 4" in choose(short, 8, ranks_per_node=4).reason
    assert choice.default_a2a_size(8, 32, 8, 4) == 4
    assert a2a_problem(8, 2, 4) is None
    assert tells(a2a_problem(9, 3, 2), "p2p", "all_gather", "1, 3", "9 ranks")


def test_blocks_that_do_not_fill_the_group_are_refused_with_those_that_do():
    choice.check_a2a_size(4, 1)
    with pytest.raises(LayoutError, match=facts_pattern("a2a_size=3", "4 context ranks", "1, 2")):
        choice.check_a2a_size(4, 3)


def test_ranges_that_touch_are_one():
    assert joined((range(4, 6), range(2), range(2, 4))) == (range(6),)


def test_a_misspelt_exchange_is_refused_where_it_is_given():
    with pytest.raises(LayoutError, match=r"comm_type='a2a_p2p'; use one of p2p, all_gather"):
        check_comm_type("a2a_p2p")
    with pytest.raises(LayoutError, match="comm_type='ring'"):
        context_parallel(torch.nn.Linear(1, 1), comm_type="ring")
    with pytest.raises(LayoutError, match="comm_type='ring'"):
        ContextSequence(None, "ring")  # type: ignore[arg-type]
