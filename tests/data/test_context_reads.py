"""Ranks that share sequences read their slices of the samples: the same tokens and no others."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.data.texts import json_lines, pairs, sentences
from tests.train import parity
from torchdistpackage import tpc
from torchdistpackage.data.blend import BlendedDataset, BlendPart
from torchdistpackage.data.corpus import ConcatView
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.source import SequenceSource, TokenDataset, check_fingerprints
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import DataError
from torchdistpackage.parallel.context.order import SequenceOrder
from torchdistpackage.train.evaluation import DocumentWindows, JoinedWindows, TokenWindows

SEQ_LEN = 23
"""A length that no number of chunks divides."""
PLACES = [("train", 1, 0), ("train", 5, 2), ("val", 0, 0), ("val", 3, 2)]


class Counted(ConcatView):
    """An array that counts the tokens that were read."""

    num = 0

    def __getitem__(self, where):
        found = super().__getitem__(where)
        self.num += np.size(found)
        return found


def num_of(read: list[Counted]) -> int:
    return sum(x.num for x in read)


def counted(ids: np.ndarray) -> Counted:
    return Counted([ids[:40], ids[40:]], ids.dtype)


def packed(tmp_path, kind: str, masks: bool) -> tuple[PackedDataset, Counted]:
    texts = sentences(24)
    if kind == "pairs":
        source = pairs(tmp_path, [(t[: len(t) // 3], t) for t in texts if len(t) < 60])
    else:
        source = json_lines(tmp_path, texts)
    text = tokenized(source, tmp_path / "cache")
    ids = counted(np.array(text.tokens))
    given = {"vocab": 300, "seq_len": SEQ_LEN, "global_batch": 4, "val_fraction": 0.3}
    return PackedDataset(replace(text, tokens=ids), document_masks=masks, **given), ids


def tokens() -> tuple[TokenDataset, Counted]:
    ids = counted(np.random.default_rng(3).integers(0, 300, 500, dtype=np.uint16))
    return TokenDataset(ids, ids, 300, SEQ_LEN, num_val=7, global_batch=4), ids


def a_source(tmp_path, name: str, masks: bool) -> tuple[SequenceSource, list[Counted]]:
    if name == "tokens":
        source, ids = tokens()
        return source, [ids]
    source, ids = packed(tmp_path, "texts" if name == "blend" else name, masks)
    if name != "blend":
        return source, [ids]
    other, more = tokens()
    parts = [BlendPart("a", 1.0, source, 9), BlendPart("b", 1.0, other, 9)]
    return BlendedDataset(parts, global_batch=4), [ids, more]


@pytest.mark.parametrize("kind", ["tokens", "texts", "texts, masks", "pairs, masks", "blend"])
def test_a_part_of_a_source_is_that_of_the_whole_and_reads_no_more(tmp_path, kind):
    name, _, masks = kind.partition(", ")
    source, read = a_source(tmp_path, name, bool(masks))
    assert isinstance(source, SequenceSource) and source.seq_len == SEQ_LEN
    last = -(-source.num_samples["train"] // 4) if isinstance(source, PackedDataset) else 9
    for split, step, first in [*PLACES, ("train", last, 0), ("train", last, 2)]:
        whole = source.batch(split, 9, step, 0, 1, 2, first=first)
        for size, order in ((2, "zigzag"), (4, "zigzag"), (3, "contiguous")):
            for part in SequenceOrder(SEQ_LEN, size, order).parts:
                before, places = num_of(read), [i for each in part for i in each]
                mine = source.part(part).batch(split, 9, step, 0, 1, 2, first=first)
                most = 2 * (len(places) + len(part))
                assert num_of(read) - before <= most, "and the target of each range"
                assert len(mine) == len(whole)
                for x, y in zip(mine[:2], whole[:2], strict=True):
                    assert torch.equal(x, y[:, places])
                assert masks == "" or torch.equal(mine[2], whole[2]), "of the whole sample"


def test_windows_of_an_evaluation_are_read_in_parts_too(tmp_path):
    _, ids = tokens()
    data, texts = packed(tmp_path, "texts", masks=True)
    of_ids, of_texts = TokenWindows(ids, 300, SEQ_LEN), DocumentWindows(data)
    joined = JoinedWindows([of_ids, TokenWindows(ids, 300, SEQ_LEN)])
    for windows, read in ((of_ids, ids), (joined, ids), (of_texts, texts)):
        for first in (0, windows.number - 3):  # the last one is short
            whole = windows.read(first, 3)
            for part in SequenceOrder(SEQ_LEN, 4).parts:
                before, places = read.num, [i for each in part for i in each]
                mine = windows.part(part).read(first, 3)
                assert read.num - before <= 3 * (len(places) + len(part))
                for x, y in zip(mine[:2], whole[:2], strict=True):
                    assert torch.equal(x, y[:, places])
                assert (mine[2] is None) == (whole[2] is None)
                assert mine[2] is None or torch.equal(mine[2], whole[2])


def test_an_id_outside_the_vocabulary_is_named_by_its_place_in_the_whole():
    ids = np.zeros(40, np.uint16)
    source = TokenDataset(ids, ids, 256, 20).part((range(10, 15),))
    ids[:] = 256
    ids[5:] = 300  # of all starts from 0 to 19 the first token of the range is one of these
    start = int(source._drawn(7, 1, np.arange(1))[0])
    with pytest.raises(DataError, match=f"token id 300 at position {start + 10}, outside"):
        source.batch("train", 7, 1, 0, 1, 1)


RUN = [
    "model.layers=1", "model.dim=8", "model.heads=2", "model.vocab=512", "data.seq_len=32",
    "data.name=tokens", "data.dtype=uint16", "data.global_batch=4", "train.steps=2",
    "optim.warmup_steps=0", "pipeline.microbatches=2", "precision.dtype=float64",
    "data.val_fraction=0.2",
]  # fmt: skip


def read_by_a_run(changes: list[str]) -> tuple[list[int], list[float | None]]:
    """Return the tokens that this rank reads in two steps and a validation, and their losses."""
    run, found = parity.trainer([*RUN, *changes]), [0]
    get = ConcatView.__getitem__

    def noted(self: ConcatView, where):
        found[-1] += np.size(got := get(self, where))
        return got

    with patch.object(ConcatView, "__getitem__", noted):
        # small batches are read several at once
        losses = [run.train_step(step).wait().loss for step in (1, 2)]
        found.append(0)
        losses.append(run.evaluate())
    run.close()
    return found, losses


@pytest.mark.parametrize("pipe", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_run_reads_the_parts_and_has_the_losses_of_one_process(ranks, tmp_path, pipe):
    path = tmp_path / "ids.bin"
    np.random.default_rng(5).integers(0, 512, 4000, dtype=np.uint16).tofile(path)
    where = [f"data.path={path}", "train.eval_batches=2"]
    ((whole, truth),) = ranks(1).run(read_by_a_run, where)
    assert whole == [8 * 33, 8 * 33]
    changes = [*where, "parallel.context=2", f"parallel.pipe={pipe}"]
    for found, losses in ranks(2 * pipe).run(read_by_a_run, changes):
        # rank 0 of the sequence has two ranges, each with a target behind it
        assert found[1] in (8 * 17, 8 * 18)
        assert found[0] == found[1] + 4 * 17, "the beginnings of samples are compared, once"
        assert losses == pytest.approx(truth, rel=1e-12)


def disagree(wrong: tuple[int, ...]) -> str | None:
    """Check fingerprints where ranks 0 and 2 read one slice, and ranks 1 and 3 the other."""
    tpc.setup_process_groups([("pipe", 2), ("context", 2)])
    value = 10 * (tpc.rank % 2) + (tpc.rank in wrong)
    try:
        check_fingerprints(value, tpc.get_group("model"), "model", part=tpc.rank % 2)
    except DataError as error:
        return str(error)
    return None


def test_ranks_that_read_one_part_must_read_the_same(ranks):
    assert ranks(4).run(disagree, ()) == [None] * 4
    for text in ranks(4).run(disagree, (3,)):
        assert text is not None and "but rank 3 has" in text and "rank 0 has" not in text
