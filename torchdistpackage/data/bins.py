"""Packing of uncut documents into samples of one length: best fit, the longest first.

Each document goes into the sample with the least room that is enough for it, else into a new one
(best-fit decreasing; Ding et al., Fewer Truncations Improve Language Modeling, 2024). The number of
samples depends on the lengths alone, so every epoch has the same number.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class WholeOrder(NamedTuple):
    """An order of documents, and the positions in their tokens where samples begin and stop."""

    documents: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


def pack_whole(
    documents: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    seq_len: int,
    *,
    alone: bool = False,
) -> WholeOrder:
    """Return samples of up to `seq_len` + 1 tokens; the last of these serves as a target only.

    lengths: tokens of each of `documents`. Documents of equal length keep their order. A document
    longer than a sample fills as many samples as it can; each of these begins with the last token
    of the sample before. Its rest is packed like a document.

    alone: no sample has two documents; one without a token to predict is left out.
    """
    if alone:
        kept = lengths > 1
        documents, lengths = documents[kept], lengths[kept]
    room = seq_len + 1
    # a long document first fills samples by itself; they come before its rest
    num_full = np.maximum(-(-(lengths - room) // seq_len), 0)
    rests = lengths - num_full * seq_len
    bins = [[i] for i in range(len(rests))]
    if not alone:
        bins = best_fit(rests, room, first=np.flatnonzero(num_full))
    order = np.asarray([i for each in bins for i in each], np.int64)
    ends = np.cumsum(lengths[order])
    last = np.cumsum([len(each) for each in bins]) - 1
    bin_stops = ends[last]
    bin_begins = np.concatenate([[0], bin_stops[:-1]])
    counts = num_full[[each[0] for each in bins]] + 1
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(bin_begins, counts) + inside * seq_len
    stops = np.minimum(begins + room, np.repeat(bin_stops, counts))
    return WholeOrder(documents[order], begins, stops)


def best_fit(
    lengths: npt.NDArray[np.int64], room: int, first: Sequence[int] | npt.NDArray[np.int64]
) -> list[list[int]]:
    """Return the item numbers of each bin of size `room`. first: items that must begin a bin."""
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of bins_by_room, ascending

    def put(index: int, free: int) -> None:
        if free and free not in bins_by_room:
            insort(rooms, free)
        if free:
            bins_by_room.setdefault(free, []).append(index)

    begins = {int(item) for item in first}
    for item in sorted(begins):
        bins.append([item])
        put(len(bins) - 1, room - int(lengths[item]))
    for item in np.argsort(-lengths, kind="stable").tolist():
        if item in begins:
            continue
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            bins.append([item])
            put(len(bins) - 1, room - length)
            continue
        index = bins_by_room[rooms[at]].pop()
        free = rooms[at] - length
        if not bins_by_room[rooms[at]]:
            del bins_by_room[rooms.pop(at)]
        bins[index].append(item)
        put(index, free)
    return bins
