"""A search for the place of each node of a graph: arithmetic only, no processes.

A step is every node's forward in the order of the program, then every backward in reverse. A place
computes one node at a time, in that order, as the ranks of a placed program do; an input from
another place arrives a message later. The search tries all placements of a small graph. For larger
graphs it starts from placements of list scheduling and cuts of the order, and improves them node by
node.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchdistpackage.errors import PlacementError
from torchdistpackage.predict.links import LinkModel

GIB = 1 << 30
_EXHAUSTIVE = 5000
"""Number of placements up to which all are tried; 8 nodes on equal places have at most 4140."""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node and its measurements.

    reads: numbers of the earlier nodes whose outputs it reads. weight_bytes: size of its parameters
    and their training state. saved_bytes: size of the tensors it saves for its backward.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int
    weight_bytes: int
    saved_bytes: int
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlaceLink(LinkModel):
    """The link between two places; checks its numbers, as users give them."""

    latency_s: float = 1e-4
    bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise PlacementError(
                f"a link of latency_s={self.latency_s} and bytes_per_s={self.bytes_per_s}; give a "
                "latency of 0 or more, and more than 0 bytes a second"
            )


def step_seconds(nodes: Sequence[PlacedNode], places: Sequence[int], link: PlaceLink) -> float:
    """Return the seconds of a step with node i on place `places[i]`."""
    clock = dict.fromkeys(places, 0.0)
    ends: list[float] = []
    arrivals: dict[tuple[int, int], float] = {}

    def arrives(i: int, at: int) -> float:
        if places[i] == at:
            return ends[i]
        if (i, at) not in arrivals:
            arrivals[i, at] = ends[i] + link.seconds(nodes[i].output_bytes)
        return arrivals[i, at]

    for i, node in enumerate(nodes):
        at = places[i]
        start = max([clock[at], *(arrives(j, at) for j in node.reads)])
        clock[at] = start + node.forward_s
        ends.append(clock[at])
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for j in dict.fromkeys(node.reads):
            readers[j].append(i)
    back = [0.0] * len(nodes)
    for i in reversed(range(len(nodes))):
        at = places[i]
        num_bytes = nodes[i].output_bytes
        ready = [
            back[k] if places[k] == at else back[k] + link.seconds(num_bytes) for k in readers[i]
        ]
        clock[at] = back[i] = max([clock[at], *ready]) + nodes[i].backward_s
    return max(clock.values(), default=0.0)


def bytes_of(nodes: Sequence[PlacedNode], places: Sequence[int], num_places: int) -> list[int]:
    """Return the bytes on each place at the end of the forward, with copies of its inputs."""
    num_bytes = [0] * num_places
    for i, node in enumerate(nodes):
        num_bytes[places[i]] += node.weight_bytes + node.saved_bytes + node.output_bytes
        for j in dict.fromkeys(node.reads):
            if places[j] != places[i]:
                num_bytes[places[i]] += nodes[j].output_bytes
    return num_bytes


def search(
    nodes: Sequence[PlacedNode],
    memory_bytes: Sequence[int],
    link: PlaceLink,
    *,
    exhaustive: bool = True,
    seed: int = 0,
) -> tuple[int, ...]:
    """Return the place of each node for a short step that fits into memory.

    memory_bytes: of each place. exhaustive: try every placement if there are few.

    Raises:
        PlacementError: the search found no placement that fits; it names the closest.
    """
    searcher = _Search(nodes, tuple(memory_bytes), link)
    count = 0
    if exhaustive:
        limit = _EXHAUSTIVE + 1
        all_placements = list(itertools.islice(placements(len(nodes), searcher.memory), limit))
        count = len(all_placements)
        if count < limit:
            return searcher.checked(min(all_placements, key=searcher.value, default=()))
    best: tuple[int, ...] | None = None
    for start in (*searcher.cuts(), *searcher.greedy(), *searcher.shuffled(seed, 12)):
        candidate = searcher.improved(start)
        if best is None or searcher.value(candidate) < searcher.value(best):
            best = candidate
    return searcher.checked(best or ())


def placements(num: int, memory: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every placement of `num` nodes, once for those that differ by swapping equal places."""
    kinds = [memory[: i + 1].count(size) - 1 for i, size in enumerate(memory)]

    def go(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == num:
            yield chosen
            return
        used = set(chosen)
        for index, size in enumerate(memory):
            # the first of the equal places that are still empty stands for all of them
            equal_before = [p for p in range(index) if memory[p] == size]
            if index in used or kinds[index] == 0 or all(p in used for p in equal_before):
                yield from go((*chosen, index))

    return go(())


class _Search:
    def __init__(self, nodes: Sequence[PlacedNode], memory: tuple[int, ...], link: PlaceLink):
        self.nodes = nodes
        self.memory = memory
        self.link = link

    def value(self, places: tuple[int, ...]) -> tuple[int, float]:
        """Return (bytes over the limits, seconds); smaller is better."""
        num_bytes = bytes_of(self.nodes, places, len(self.memory))
        over = sum(max(0, h - limit) for h, limit in zip(num_bytes, self.memory, strict=True))
        return over, step_seconds(self.nodes, places, self.link)

    def checked(self, places: tuple[int, ...]) -> tuple[int, ...]:
        if self.value(places)[0] == 0:
            return places
        num_bytes = bytes_of(self.nodes, places, len(self.memory))
        parts = ", ".join(
            f"place {i} would hold {h / GIB:.3g} of {limit / GIB:.3g} GiB"
            for i, (h, limit) in enumerate(zip(num_bytes, self.memory, strict=True))
        )
        largest = max(self.nodes, key=lambda n: n.weight_bytes + n.saved_bytes + n.output_bytes)
        raise PlacementError(
            f"{len(self.nodes)} nodes do not fit into memory: at best {parts}; the largest node is "
            f"{largest.name}: allow more memory, or more places, or a smaller example"
        )

    def cuts(self) -> Iterator[tuple[int, ...]]:
        """Yield the program's order, cut into 1, 2, ... places with equal shares of the time."""
        total = sum(n.forward_s + n.backward_s for n in self.nodes) or 1.0
        for num in range(1, len(self.memory) + 1):
            places = list[int]()
            passed = 0.0
            for node in self.nodes:
                middle = passed + (node.forward_s + node.backward_s) / 2
                places.append(min(num - 1, int(num * middle / total)))
                passed += node.forward_s + node.backward_s
            yield tuple(places)

    def greedy(self) -> Iterator[tuple[int, ...]]:
        """Yield the placement that puts each node where the step so far is shortest."""
        places: tuple[int, ...] = ()
        for i in range(len(self.nodes)):
            options = [(*places, p) for p in range(len(self.memory))]
            part = _Search(self.nodes[: i + 1], self.memory, self.link)
            places = min(options, key=part.value)
        yield places

    def shuffled(self, seed: int, num: int) -> Iterator[tuple[int, ...]]:
        """Yield random placements."""
        draw = random.Random(seed)
        for _ in range(num):
            yield tuple(draw.randrange(len(self.memory)) for _ in self.nodes)

    def improved(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """Move a node, or two, as long as that helps."""
        best = self.value(places)
        while True:
            neighbour = min(self.near(places), key=self.value, default=places)
            if self.value(neighbour) >= best:
                return places
            places = neighbour
            best = self.value(neighbour)

    def near(self, places: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        num = len(places)
        for i in range(num):
            for p in range(len(self.memory)):
                if p != places[i]:
                    yield (*places[:i], p, *places[i + 1 :])
        # pairs only for small graphs: their number grows with the square of the nodes
        for i, j in itertools.combinations(range(num), 2) if num <= 24 else ():
            for p, q in itertools.product(range(len(self.memory)), repeat=2):
                changed = list(places)
                changed[i], changed[j] = p, q
                yield tuple(changed)
