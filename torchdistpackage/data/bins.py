"""Documents put whole into samples of one length: best fit, the longest first.

Each document goes into the sample with the least room that is enough for it, else into a new one
(best-fit decreasing; Ding et al., Fewer Truncations Improve Language Modeling, 2024). How many
samples that makes depends on the lengths alone, and so is equal in every epoch.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class WholeOrder(NamedTuple):
    """Which documents come one after another, and where in their tokens samples begin and stop."""

    documents: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


def pack_whole(
    documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], seq_len: int
) -> WholeOrder:
    """Samples of up to `seq_len` + 1 tokens, the last of which is a target alone.

    lengths: of `documents`. Of equal lengths the first document comes first. One that is longer
    than a sample fills as many as it can, each of which begins with the last token of the one
    before, and its rest is packed like a document.
    """
    room = seq_len + 1
    # whole samples of a long document stand before its rest
    before = np.maximum(-(-(lengths - room) // seq_len), 0)
    rests = lengths - before * seq_len
    bins = best_fit(rests, room, first=np.flatnonzero(before))
    order = np.asarray([i for each in bins for i in each], np.int64)
    ends = np.cumsum(lengths[order])
    last = np.cumsum([len(each) for each in bins]) - 1
    bin_stops = ends[last]
    bin_begins = np.concatenate([[0], bin_stops[:-1]])
    counts = before[[each[0] for each in bins]] + 1
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.repeat(bin_begins, counts) + inside * seq_len
    stops = np.minimum(begins + room, np.repeat(bin_stops, counts))
    return WholeOrder(documents[order], begins, stops)


def best_fit(
    lengths: npt.NDArray[np.int64], room: int, first: Sequence[int] | npt.NDArray[np.int64]
) -> list[list[int]]:
    """Numbers of items by bin, of `room` each. first: items that have to begin a bin."""
    bins: list[list[int]] = []
    of_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # in ascending order, those of which there are bins

    def put(index: int, left: int) -> None:
        if left and left not in of_room:
            insort(rooms, left)
        if left:
            of_room.setdefault(left, []).append(index)

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
        index = of_room[rooms[at]].pop()
        left = rooms[at] - length
        if not of_room[rooms[at]]:
            del of_room[rooms.pop(at)]
        bins[index].append(item)
        put(index, left)
    return bins
