"""Packing of uncut documents: none that fits is cut, each token occurs once, little is padded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_chat import chat, chats
from tests.data.test_packing import IGNORED, dataset, samples
from tests.data.texts import sentences
from torchdistpackage.data.bins import pack_whole


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 20))
def test_documents_that_fit_are_whole_and_no_token_is_lost(lengths, seq_len):
    order = pack_whole(np.arange(len(lengths)), np.asarray(lengths), seq_len)
    assert sorted(order.documents.tolist()) == list(range(len(lengths)))
    ends = np.cumsum([lengths[i] for i in order.documents])
    spans = {i: (int(e) - lengths[i], int(e)) for i, e in zip(order.documents, ends, strict=True)}
    covered = np.zeros(int(ends[-1]), int)
    for begin, stop in zip(order.begins, order.stops, strict=True):
        assert 0 < stop - begin <= seq_len + 1
        covered[begin:stop] += 1
    assert covered.min() == 1
    # two samples share a token only inside a long document: its last target, and next input
    shared = np.flatnonzero(covered > 1)
    assert covered.max() <= 2 and all(
        any(a < at < b and b - a > seq_len + 1 for a, b in spans.values()) for at in shared
    )
    for a, b in spans.values():
        if b - a <= seq_len + 1:
            held = [x for x, y in zip(order.begins, order.stops, strict=True) if x <= a and b <= y]
            assert len(held) == 1, "in one sample, whole"


def test_little_room_is_left_and_epochs_have_as_many_samples():
    draw = np.random.default_rng(0)
    lengths = draw.integers(10, 400, 3000)
    orders = [pack_whole(x, lengths[x], 512) for x in map(draw.permutation, [3000] * 3)]
    assert len({len(order.begins) for order in orders}) == 1
    assert len(orders[0].begins) <= 1.02 * lengths.sum() / 513


@pytest.mark.parametrize("masks", [False, True])
def test_no_chat_is_cut_and_all_replies_count_in_every_epoch(tmp_path, masks):
    texts = [" ".join(text.split()[:5]) for text in sentences(40)]
    source = chats(tmp_path, [chat(text, text) for text in texts])
    data = dataset(source, tmp_path, seq_len=120, packing="auto", document_masks=masks)
    text, part = data.text, data.split.parts["train"]
    want = sorted(text.tokens[text.starts[i] : text.ends[i]].tolist() for i in part.documents)
    number, seen = data.num_samples["train"], []
    for epoch in range(2):
        found, counted = [], 0
        for ids, targets, *positions in samples(data, "train", number, epoch * number):
            counted += int((targets != IGNORED).sum())
            tokens = ids.tolist()
            while tokens and tokens[0]:  # 0 is <pad>, of which no chat has any
                known = [x for x in want if x[:-1] == tokens[: len(x) - 1] or x == tokens[: len(x)]]
                assert known, "a sample is whole chats, one after another"
                longest = max(known, key=len)
                if positions:
                    at = len(ids) - len(tokens)
                    assert positions[0][at] == 0
                found.append(longest)
                tokens = tokens[len(longest) :]
        assert sorted(found) == want
        assert counted == sum(
            int(text.counted[text.starts[i] : text.ends[i]].sum()) for i in part.documents
        )
        seen.append(found)
    assert seen[0] != seen[1], "shuffled anew"
