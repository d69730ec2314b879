"""Which groups stay inside a node, and what to change when a busy one does not.

Ranks fill nodes in order, so whether a group crosses a node follows from its first and
last rank. Tensor, context and expert groups exchange activations in every layer: those are the
ones worth a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchdistpackage.topology.mesh import Mesh

BUSY = ("tensor", "context")
"""Axes that talk inside every layer, most talkative first."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """How many of the groups along `axis` have members on more than one node."""

    axis: str
    num_groups: int
    num_crossing: int


def crossings(mesh: Mesh, ranks_per_node: int) -> tuple[Crossing, ...]:
    """One `Crossing` for each axis longer than 1, in mesh order."""
    result: list[Crossing] = []
    for name, size in mesh.axes:
        if size > 1:
            spans = [
                {ranks[0] // ranks_per_node, ranks[-1] // ranks_per_node}
                for ranks in mesh.groups((name,))
            ]
            result.append(Crossing(name, len(spans), sum(len(span) > 1 for span in spans)))
    return tuple(result)


def advice(mesh: Mesh, ranks_per_node: int) -> tuple[str, ...]:
    """Warnings about busy groups that cross nodes, each with what to change."""
    warnings: list[str] = []
    for crossing in crossings(mesh, ranks_per_node):
        if crossing.axis not in BUSY or not crossing.num_crossing:
            continue
        size = mesh.axis_size(crossing.axis)
        text = (
            f"{crossing.num_crossing} of {crossing.num_groups} {crossing.axis} groups of {size} "
            f"ranks cross a node of {ranks_per_node} ranks"
        )
        if size > ranks_per_node:
            fix = f"use {crossing.axis} {_largest_divisor(ranks_per_node, size)} or less"
        else:
            fix = f"put it last: parallel.order {list(best_order(mesh.names))}"
        warnings.append(f"{text}; {fix}")
    return tuple(warnings)


def best_order(names: Sequence[str]) -> tuple[str, ...]:
    """The same axes with the talkative ones innermost."""
    rank = {axis: -i for i, axis in enumerate(BUSY)}
    quiet = [name for name in names if name not in rank]
    return (*quiet, *sorted((n for n in names if n in rank), key=lambda n: rank[n]))


def _largest_divisor(limit: int, of: int) -> int:
    return max(n for n in range(1, limit + 1) if of % n == 0)
