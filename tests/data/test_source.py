"""Every layout sees the same samples, and training never sees validation text."""

import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdistpackage.data import corpus
from torchdistpackage.data.source import (
    DataSource,
    TokenDataset,
    check_fingerprints,
    fingerprint,
)
from torchdistpackage.errors import DataError

GLOBAL = 8


def counting(train: int = 1000, val: int = 300, seq_len: int = 16, num_val: int = 256):
    """Return a data set in which every token is its own position."""
    ids = np.arange(max(train, val), dtype=np.uint16)
    return TokenDataset(ids[:train], ids[:val], len(ids), seq_len, num_val=num_val)


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("num_data", [1, 2, 4])
def test_every_number_of_data_ranks_sees_the_same_global_batch(split, rounds, num_data):
    data = counting()
    whole = data.batch(split, 7, 0, 0, 1, GLOBAL)
    per_rank = GLOBAL // num_data // rounds
    parts = [
        data.batch(split, 7, 0, d, num_data, per_rank, first=r * num_data * per_rank)
        for r in range(rounds)
        for d in range(num_data)
    ]
    for side in (0, 1):
        assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


def test_batches_differ_between_steps_and_seeds_and_repeat_otherwise():
    data = counting()
    first = data.batch("train", 1, 5, 0, 1, GLOBAL)[0]
    assert torch.equal(first, data.batch("train", 1, 5, 0, 1, GLOBAL)[0])
    assert not torch.equal(first, data.batch("train", 1, 6, 0, 1, GLOBAL)[0])
    assert not torch.equal(first, data.batch("train", 2, 5, 0, 1, GLOBAL)[0])


@given(
    num_tokens=st.integers(2, 60),
    seq_len=st.integers(1, 59),
    split=st.sampled_from(["train", "val"]),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 10**9),
    num_val=st.integers(1, 50),
)
def test_windows_lie_inside_and_targets_are_the_next_tokens(
    num_tokens, seq_len, split, seed, step, num_val
):
    if num_tokens <= seq_len:
        with pytest.raises(DataError, match=f"{num_tokens} tokens"):
            counting(num_tokens, num_tokens, seq_len)
        return
    data = counting(num_tokens, num_tokens, seq_len, num_val=num_val)
    ids, targets = data.batch(split, seed, step, 1, 2, 5)
    assert ids.shape == targets.shape == (5, seq_len)
    assert ids.dtype == targets.dtype == torch.int64
    assert torch.equal(ids + 1, targets)  # true only of windows that are not cut or wrapped
    assert ids.min() >= 0
    assert targets.max() < num_tokens


def test_every_training_window_can_be_drawn():
    data = counting(train=20, seq_len=16)
    starts = {int(s) for step in range(20) for s in data.batch("train", 0, step, 0, 1, 8)[0][:, 0]}
    assert starts == {0, 1, 2, 3}


def test_validation_windows_are_even_over_the_whole_split_and_wrap():
    data = counting(val=301, seq_len=20, num_val=5)
    starts = data.batch("val", 0, 0, 0, 1, 6)[0][:, 0]
    assert starts.tolist() == [0, 70, 140, 210, 280, 0]
    later = data.batch("val", 99, 1, 0, 1, 3)[0][:, 0]
    assert later.tolist() == [210, 280, 0]


def test_a_token_dataset_is_a_data_source():
    assert isinstance(counting(), DataSource)


def test_ids_outside_the_vocabulary_are_refused_with_their_place():
    ids = np.zeros(100, np.uint16)
    ids[70] = 300
    with pytest.raises(DataError, match=r"train .* id 300 at position 70, .* 256; .* 301"):
        TokenDataset(ids, ids[:50], 256, 8)


def test_a_global_rank_in_the_place_of_the_data_index_is_refused():
    with pytest.raises(DataError, match="data index 2 of 2"):
        counting().batch("train", 0, 0, 2, 2, 4)


def test_a_short_validation_split_is_refused_when_used():
    data = counting(val=3)
    with pytest.raises(DataError, match=r"val split has 3 tokens.*raise data.val_fraction"):
        data.batch("val", 0, 0, 0, 1, 1)


# Sources


def as_bytes(ids: corpus.Ids) -> bytes:
    return np.asarray(ids).tobytes()


def test_the_standard_library_is_split_by_whole_files():
    both = corpus.python_stdlib(0.05)
    assert both.train.dtype == both.val.dtype == np.uint8
    assert len(both.train) > 5_000_000
    assert 0.01 < len(both.val) / len(both.train) < 0.15
    train, val = as_bytes(both.train), as_bytes(both.val)
    source = Path(hashlib.__file__).read_bytes()
    assert (source in train) != (source in val)
    assert b"class FutureWarningTests" not in train + val  # no tests
    again = corpus.python_stdlib(0.05)
    assert np.array_equal(again.val, both.val)


@settings(max_examples=30, deadline=None)
@given(num_files=st.integers(2, 30), fraction=st.sampled_from([0.01, 0.1, 0.5]))
def test_no_validation_file_is_a_copy_of_training_text(tmp_path_factory, num_files, fraction):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "below").mkdir()
    (folder / ".hidden").write_text("hidden")
    texts = [f"<text number {i // 2}>" for i in range(num_files)]  # each twice
    for i, content in enumerate(texts):
        (folder / ("below" if i % 3 else ".") / f"{i}.txt").write_text(content)
    both = corpus.text(folder, fraction)
    train, val = as_bytes(both.train).decode(), as_bytes(both.val).decode()
    for content in set(texts):
        assert (train + val).count(content) == 1
    assert len(train + val) == sum(map(len, set(texts)))
    assert train


def test_the_split_of_a_folder_does_not_depend_on_other_files(tmp_path):
    for i in range(50):
        (tmp_path / f"{i}.txt").write_text(f"<{i}>")
    before = as_bytes(corpus.text(tmp_path, 0.3).val).decode()
    (tmp_path / "another.txt").write_text("<another>")
    after = as_bytes(corpus.text(tmp_path, 0.3).val).decode()
    assert after.replace("<another>", "") == before
    assert before


@pytest.mark.parametrize(
    ("most", "large"), [(corpus.MOST_MAPPED, corpus.LARGE_BYTES), (5, 200), (0, 0)]
)
def test_a_folder_is_its_files_in_order_and_trains_as_one_array_would(
    tmp_path, monkeypatch, most, large
):
    """Check windows that lie within a file, or cross one border or several."""
    monkeypatch.setattr(corpus, "MOST_MAPPED", most)
    monkeypatch.setattr(corpus, "LARGE_BYTES", large)
    draw = np.random.default_rng(0)
    texts = {f"{i:02}.txt": draw.integers(1, 256, size, "uint8") for i, size in enumerate(SIZES)}
    texts["50.txt"] = texts["03.txt"]  # of equal ones the first counts
    for name, text in texts.items():
        text.tofile(tmp_path / name)
    both = corpus.text(tmp_path, 0.3)
    train, val = np.asarray(both.train), np.asarray(both.val)
    found = [train.tobytes(), val.tobytes()]
    for side in found:
        inside = [t for name, t in texts.items() if t.tobytes() in side and name != "50.txt"]
        assert side == b"".join(text.tobytes() for text in inside)
    assert sum(map(len, found)) == sum(SIZES)
    assert (both.train[0], both.train[-1]) == (train[0], train[-1])
    data, plain = (
        TokenDataset(*sides, 256, 60) for sides in ((both.train, both.val), (train, val))
    )
    for split in ("train", "val"):
        for ours, one in zip(*(d.batch(split, 3, 1, 0, 1, 50) for d in (data, plain)), strict=True):
            assert torch.equal(ours, one)
    assert corpus.entropies(both.train, both.val) == corpus.entropies(train, val)


SIZES = (200, 17, 300, 40, 0, 900, 35, 64, 25, 500, 21)


def test_a_folder_is_mapped_and_not_loaded(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i + 65]) * 2**23)

    def used() -> tuple[int, int]:
        """Return the private memory of this process in MiB, and its open files."""
        status = Path("/proc/self/status").read_text()
        anonymous = next(x for x in status.splitlines() if x.startswith("RssAnon"))
        return int(anonymous.split()[1]) // 1024, len(list(Path("/proc/self/fd").iterdir()))

    before = used()
    both = corpus.text(tmp_path, 0.3)
    both.train[5 : 2**20].sum()
    after = used()
    assert len(both.train) + len(both.val) == 4 * 2**23
    assert after[0] - before[0] < 8
    assert after[1] == before[1]


def test_a_single_text_file_is_cut_near_its_end(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 101)))
    for where in (path, tmp_path):
        both = corpus.text(where, 0.1)
        assert as_bytes(both.train) == bytes(range(1, 91))
        assert as_bytes(both.val) == bytes(range(91, 101))


@pytest.mark.parametrize("dtype", corpus.TOKEN_DTYPES)
def test_token_files_give_their_ids(tmp_path, dtype):
    ids = np.arange(200).astype(dtype)
    ids.tofile(tmp_path / "ids.bin")
    both = corpus.tokens(tmp_path / "ids.bin", dtype, 0.25)
    assert both.train.dtype == ids.dtype
    assert np.array_equal(both.train, ids[:150])
    assert np.array_equal(both.val, ids[150:])
    batch, _ = TokenDataset(both.train, both.val, 200, 149).batch("train", 0, 0, 0, 1, 2)
    assert torch.equal(batch[0], torch.arange(149))


@pytest.mark.parametrize(
    "content,dtype,words",
    [
        (b"", "uint16", "ids.bin is empty"),
        (b"abc", "uint16", "3 bytes"),
        (b"abcd", "int32", "uint8, uint16, uint32"),
        (None, "uint16", "No such file"),
    ],
)
def test_bad_token_files_are_refused(tmp_path, content, dtype, words):
    path = tmp_path / "ids.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        corpus.tokens(path, dtype, 0.1)
    assert str(path) in str(error.value)


def test_bad_text_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        corpus.text(tmp_path / "none.txt", 0.1)
    with pytest.raises(DataError, match="no files"):
        corpus.text(tmp_path, 0.1)
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(DataError, match=r"picture.png is not text: byte 4"):
        corpus.text(tmp_path, 0.1)


# Entropies


def test_entropies_are_those_of_the_tables_counted_one_by_one():
    train, val = b"the cat sat on the mat, the hat", b"a hat on that cat"
    vocab = 256
    single = [train.count(bytes([b])) for b in range(vocab)]
    unigram = -sum(math.log((single[b] + 1) / (len(train) + vocab)) for b in val) / len(val)
    pairs = list(itertools.pairwise(train))
    before = [sum(1 for a, _ in pairs if a == b) for b in range(vocab)]
    bigram = 0.0
    for a, b in itertools.pairwise(val):
        bigram -= math.log((pairs.count((a, b)) + 1) / (before[a] + vocab)) / (len(val) - 1)
    found = corpus.entropies(np.frombuffer(train, np.uint8), np.frombuffer(val, np.uint8))
    assert found == pytest.approx((unigram, bigram), rel=1e-12)


def test_counting_in_pieces_loses_no_pair(monkeypatch):
    ids = np.random.default_rng(0).integers(0, 9, 1000).astype(np.uint16)
    whole = corpus.entropies(ids, ids[:100], 9)
    monkeypatch.setattr(corpus, "_COUNT_AT_ONCE", 7)
    assert corpus.entropies(ids, ids[:100], 9) == whole


def test_entropies_of_noise_and_of_a_period_are_known():
    noise = np.random.default_rng(0).integers(0, 256, 4_000_000).astype(np.uint8)
    assert corpus.entropies(noise, noise[:100_000]) == pytest.approx([math.log(256)] * 2, rel=0.01)
    period = np.tile(np.arange(4, dtype=np.uint8), 100_000)
    unigram, bigram = corpus.entropies(period, period)
    assert unigram == pytest.approx(math.log(4), rel=1e-3)
    assert bigram == pytest.approx(0, abs=0.01)


def test_entropies_refuse_what_they_cannot_count():
    ids = np.arange(10, dtype=np.uint16)
    with pytest.raises(DataError, match="50000"):
        corpus.entropies(ids, ids, 50000)
    with pytest.raises(DataError, match="val 1"):
        corpus.entropies(ids, ids[:1])
    with pytest.raises(DataError, match=r"id 9 .* of 9"):
        corpus.entropies(ids, ids, 9)


# Fingerprints


def test_fingerprints_see_content_shape_and_dtype():
    x = torch.arange(12).view(3, 4)
    changed = x.clone()
    changed[1, 2] += 1
    tensors = [x, changed, x.view(4, 3), x.int(), x.bfloat16(), x.t(), x[:0], torch.tensor(1)]
    values = [fingerprint(t) for t in tensors]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous())


def check_batches(wrong: tuple[int, ...]) -> str | None:
    rank = dist.get_rank()
    data = counting()
    index = rank if rank in wrong else 0
    ids, _ = data.batch("train", 3, 1, index, dist.get_world_size(), 2)
    try:
        check_fingerprints(fingerprint(ids), dist.group.WORLD, "tensor")
    except DataError as error:
        return str(error)
    return None


def test_a_rank_with_another_batch_is_named_on_every_rank(ranks):
    assert ranks(1).run(check_batches, ()) == [None]
    assert ranks(4).run(check_batches, ()) == [None] * 4
    texts = ranks(4).run(check_batches, (2,))
    assert len(set(texts)) == 1
    assert "tensor group of ranks 0, 1, 2, 3" in texts[0]
    assert "but rank 2 has" in texts[0]
    assert "rank 1 has" not in texts[0]
