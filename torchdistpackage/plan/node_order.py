"""The order of nodes whose groups of ranks cross the fewest switches. No torch.

Ranks fill nodes in order, so an order of the nodes says which group is below which switch. It costs
the bytes of a step between the ranks of a group, which are a ring, or along pipe as their stages
follow each other, once for each level of switches that lies between the two. Only the switch of a
node counts, so an order is a label for each place. All orders of few labels are tried, by a search
that leaves out what is no better than the best found. Of many, places are sorted along the axes in
every order of the axes, and two nodes of the best are exchanged as long as that helps.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.estimate import link_bytes, pipe_messages
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.traffic import busiest, uncounted
from torchdistpackage.topology.mesh import Mesh, Ranks

AXES = ("data", "pipe", "context", "tensor", "expert")
"""Examined groups, by their names in Topology."""
MAX_TRIED = 100_000
"""Number of labels tried in a search of all orders before it is given up."""
MAX_PLACES = 64
"""Largest number of nodes for which all orders are tried."""
MAX_EXCHANGED = 200_000
"""Pairs of places whose exchange is priced if not all orders are tried."""

Path = tuple[str, ...]
"""The switches above a node, lowest first."""


@dataclass(frozen=True, slots=True)
class CrossedAxis:
    """The groups along an axis. num_crossing: for each level of switches, lowest first, the number
    of groups that span several. num_bytes: of a step between two neighbours; None: not counted."""

    axis: str
    num_ranks: int
    num_groups: int
    num_crossing: tuple[int, ...]
    num_bytes: float | None


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """An order of nodes, in which ranks fill them. cost, given_cost: of this order and of the given
    one. is_exact: no order costs less.
    """

    nodes: tuple[str, ...]
    cost: float
    given_cost: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _Axis:
    """links: bytes of a step between two of a group's ranks, by their indices."""

    name: str
    mesh: Mesh
    links: Mapping[tuple[int, int], float]
    num_bytes: float | None

    def groups(self) -> Iterator[Ranks]:
        return self.mesh.groups((self.name,))


def crossed_axes(
    plan: Plan, ranks_per_node: int, nodes: Sequence[str], paths: Mapping[str, Path]
) -> tuple[CrossedAxis, ...]:
    """Return the switches that each axis with several ranks crosses, with the nodes in this
    order.
    """
    above = [paths[node] for node in nodes]
    levels = range(len(above[0]))
    crossings: list[CrossedAxis] = []
    for axis in _axes(plan):
        crossing, num_groups = [0 for _ in levels], 0
        for ranks in axis.groups():
            num_groups += 1
            switches = {above[rank // ranks_per_node] for rank in ranks}
            for level in levels if len(switches) > 1 else ():
                crossing[level] += len({path[level] for path in switches}) > 1
        size = axis.mesh.axis_size(axis.name)
        crossings.append(CrossedAxis(axis.name, size, num_groups, tuple(crossing), axis.num_bytes))
    return tuple(crossings)


def best_order(
    plan: Plan, ranks_per_node: int, nodes: Sequence[str], paths: Mapping[str, Path]
) -> NodeOrder:
    """Return the cheapest order of these nodes; among equal ones, the given order.

    Nodes of one switch keep their order.

    Raises:
        ConfigError: the nodes are not as many as the ranks fill, one is there twice, or no switch
            has it.
    """
    number = math.ceil(plan.world_size / ranks_per_node)
    if len(nodes) != number:
        raise ConfigError(
            f"{plan.world_size} ranks, {ranks_per_node} on a node, fill {number} nodes, but "
            f"{len(nodes)} are named; name {number}"
        )
    if twice := [node for node, count in Counter(nodes).items() if count > 1]:
        raise ConfigError(f"node {twice[0]} is named twice; name it once")
    if absent := [node for node in nodes if node not in paths]:
        raise ConfigError(
            f"no switch has the nodes {', '.join(absent[:8])}; use names such as "
            f"{next(iter(paths))}"
        )
    links, start = NodeLinks.of(plan, ranks_per_node), [paths[node] for node in nodes]
    best, is_exact = links.all_tried(start, links.descended(links.sorted(start)))
    nodes_of_path: dict[Path, list[str]] = defaultdict(list)
    for node in nodes:
        nodes_of_path[paths[node]].append(node)
    order = tuple(nodes_of_path[path].pop(0) for path in best)
    return NodeOrder(order, links.cost(best), links.cost(start), is_exact)


def host_lines(nodes: Sequence[str], world_size: int, ranks_per_node: int) -> str:
    """Return the host of each rank, one per line, in srun's form of SLURM_HOSTFILE with
    --distribution=arbitrary."""
    return "".join(f"{nodes[rank // ranks_per_node]}\n" for rank in range(world_size))


def _axes(plan: Plan) -> list[_Axis]:
    """Return the axes with several ranks and the bytes of their links.

    If bytes are not counted, each message between stages and each link of a ring counts one."""
    is_counted, sent, message = uncounted(plan) is None, dict.fromkeys(AXES, 0.0), 1.0
    for call in busiest(plan)[1] if is_counted else ():
        for axis in call.axis.split("+"):  # an exchange along two axes loads the links of both
            if axis in sent:
                sent[axis] += link_bytes(call)
        if (call.axis, call.operation) == ("pipe", "send"):
            message = call.call_bytes
    axes: list[_Axis] = []
    for name in AXES:
        mesh, _ = plan.topology.named(name)
        size = mesh.axis_size(name)
        if size < 2:
            continue
        if name == "pipe":
            exchanged = pipe_messages(plan.schedule).items()
            links = {pair: message * number * plan.rounds for pair, number in exchanged}
        else:
            one = sent[name] if is_counted else 1.0
            links = {(index, (index + 1) % size): one for index in range(size)}
        axes.append(_Axis(name, mesh, links, max(links.values()) if is_counted else None))
    return axes


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """The bytes that nodes send each other in a step, by their position in an order.

    near: for each number the bytes to others, both ways together. coords: for each number the index
    of its first rank along the axes.
    """

    near: tuple[Mapping[int, float], ...]
    coords: tuple[Mapping[str, int], ...]

    @classmethod
    def of(cls, plan: Plan, ranks_per_node: int) -> "NodeLinks":
        number = math.ceil(plan.world_size / ranks_per_node)
        near: list[dict[int, float]] = [defaultdict(float) for _ in range(number)]
        for axis in _axes(plan):
            if not any(axis.links.values()):
                continue
            for ranks in axis.groups():
                for (one, other), num_bytes in axis.links.items():
                    a, b = ranks[one] // ranks_per_node, ranks[other] // ranks_per_node
                    if a != b:
                        near[a][b] += num_bytes
                        near[b][a] += num_bytes
        mesh = plan.topology.dense
        coords = [mesh.coord(index * ranks_per_node) for index in range(number)]
        return cls(tuple(near), tuple(coords))

    def cost(self, paths: Sequence[Path]) -> float:
        """Return the bytes between pairs of places, times the switch levels between them."""
        return sum(
            weight * _levels_between(paths[position], paths[other])
            for position, others in enumerate(self.near)
            for other, weight in others.items()
            if other > position
        )

    def sorted(self, start: Sequence[Path]) -> list[Path]:
        """Return the best of the given order and of orders that fill switch by switch, with places
        sorted along the axes."""
        numbers = Counter(start)
        switches = sorted(numbers, key=lambda path: path[::-1])
        upper = Counter(path[1:] for path in start)
        large_first = sorted(
            numbers, key=lambda path: (-upper[path[1:]], path[:0:-1], -numbers[path], path)
        )
        best, least = list(start), self.cost(start)
        names = [x for x in self.coords[0] if any(y[x] for y in self.coords)]
        for axes in itertools.permutations(names):
            places = sorted(
                range(len(start)), key=lambda position: [self.coords[position][x] for x in axes]
            )
            for order in (switches, large_first):
                labels = [path for path in order for _ in range(numbers[path])]
                paths: list[Path] = [()] * len(start)
                for position, path in zip(places, labels, strict=True):
                    paths[position] = path
                if (cost := self.cost(paths)) < least:
                    best, least = paths, cost
        return best

    def descended(self, start: Sequence[Path]) -> list[Path]:
        """Return the order after exchanges of two nodes, each of which reduced the cost."""
        paths, room = list(start), MAX_EXCHANGED
        improved = True
        while improved:
            improved = False
            for a, b in itertools.combinations(range(len(paths)), 2):
                if paths[a] == paths[b]:
                    continue
                room -= 1
                if room < 0:
                    return paths
                cost_before = self._around(paths, a, b)
                paths[a], paths[b] = paths[b], paths[a]
                if self._around(paths, a, b) < cost_before * (1 - 1e-12):
                    improved = True
                else:
                    paths[a], paths[b] = paths[b], paths[a]
        return paths

    def _around(self, paths: Sequence[Path], a: int, b: int) -> float:
        """Return the cost of the pairs with these two places; their own pair counts twice, which no
        exchange changes."""
        return sum(
            weight * _levels_between(paths[position], paths[other])
            for position in (a, b)
            for other, weight in self.near[position].items()
        )

    def all_tried(self, order: Sequence[Path], start: list[Path]) -> tuple[list[Path], bool]:
        """Return the cheapest of all orders, and whether all were tried within MAX_TRIED; if not,
        the cheaper of the two."""
        first, second = self.cost(order), self.cost(start)
        best = list(order) if first <= second else start
        least = min(first, second)
        if least == 0 or len(order) > MAX_PLACES:
            return best, least == 0
        remaining, paths, room = Counter(order), list(order), MAX_TRIED
        kinds = sorted(remaining, key=lambda path: path[::-1])

        def label(position: int, cost: float) -> None:
            nonlocal best, least, room
            if position == len(order):
                best, least = list(paths), cost
                return
            fresh: set[tuple[int, Path]] = set()
            for path in kinds:
                room -= 1
                if not remaining[path] or room < 0:
                    continue
                # of two switches side by side that nothing is below yet one stands for both
                kind = remaining[path], path[1:]
                if path not in paths[:position]:
                    if kind in fresh:
                        continue
                    fresh.add(kind)
                more = cost + sum(
                    weight * _levels_between(path, paths[other])
                    for other, weight in self.near[position].items()
                    if other < position
                )
                if more >= least * (1 - 1e-12):
                    continue
                paths[position] = path
                remaining[path] -= 1
                label(position + 1, more)
                remaining[path] += 1

        label(0, 0.0)
        return best, room >= 0


def _levels_between(one: Path, other: Path) -> int:
    """Return at how many levels two nodes are below different switches."""
    return 0 if one == other else sum(a != b for a, b in zip(one, other, strict=True))
