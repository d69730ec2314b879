"""Draw ranks on their nodes, coloured by group, for `tdp plan --picture`."""

from collections.abc import Iterator, Sequence

from torchdistpackage.report.svg import box, colour_of, document, text
from torchdistpackage.topology.mesh import Mesh

_CELL, _GAP, _LEFT, _TOP = 30, 12, 12, 44
_A_LINE = 960
_MOST_RANKS = 512
"""Largest number of drawn ranks, from the first nodes: more groups could not be distinguished."""


def placement_svg(name: str, meshes: Sequence[tuple[str, Mesh]], ranks_per_node: int) -> str:
    """Return one panel for each axis with several ranks: a node is a frame, and a rank is a box in
    the colour of its group along that axis.

    meshes: axes to draw, each with the mesh that has it.
    """
    shown = [(axis, mesh) for axis, mesh in meshes if mesh.axis_size(axis) > 1]
    world = max((mesh.size for _, mesh in meshes), default=1)
    parts = [text(_LEFT, 20, f"{name}: {world} ranks, {ranks_per_node} on a node")]
    y = 28.0
    for axis, mesh in shown:
        panel, height = _panel(axis, mesh, ranks_per_node)
        parts += [f'<g data-axis="{axis}" transform="translate(0 {y:g})">', *panel, "</g>"]
        y += height
    if not shown:
        parts.append(text(_LEFT, y + 16, "every rank is alone"))
    return document(_A_LINE + 2 * _LEFT, y + 40, parts)


def _panel(axis: str, mesh: Mesh, per_node: int) -> tuple[list[str], float]:
    """Return the SVG elements of a panel, and its height."""
    number = {rank: index for index, group in enumerate(mesh.groups((axis,))) for rank in group}
    drawn = range(min(mesh.size, max(_MOST_RANKS // per_node, 1) * per_node))
    nodes = [range(a, min(a + per_node, drawn.stop)) for a in drawn[::per_node]]
    parts = [text(_LEFT, 20, _title(axis, mesh, per_node))]
    x, y = float(_LEFT), 28.0
    columns = min(per_node, (_A_LINE - 8) // _CELL)
    width = columns * _CELL + 8
    height = -(-per_node // columns) * _CELL + 22
    for index, ranks in enumerate(nodes):
        if x + width > _A_LINE + _LEFT and x > _LEFT:
            x, y = float(_LEFT), y + height + _GAP
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" '
            f'stroke="#888" data-node="{index}"/>'
        )
        parts.append(text(x + 4, y + 13, f"node {index}"))
        for at, rank in enumerate(ranks):
            row, column = divmod(at, columns)
            corner = x + 4 + column * _CELL, y + 18 + row * _CELL
            parts += _rank(corner, rank, number[rank], mesh)
        x += width + _GAP
    y += height
    if drawn.stop < mesh.size:
        y += 18
        parts.append(text(_LEFT, y, f"... and {mesh.size - drawn.stop} more ranks"))
    return parts, y + _GAP


def _rank(corner: tuple[float, float], rank: int, group: int, mesh: Mesh) -> Iterator[str]:
    where = " ".join(f"{axis} {index}" for axis, index in mesh.coord(rank).items())
    title = f"rank {rank}: {where}, group {group}"
    yield box(*corner, (_CELL, _CELL), colour_of(group), title, rank=rank, group=group)
    yield text(corner[0] + _CELL / 2, corner[1] + 19, str(rank), anchor="middle")


def _title(axis: str, mesh: Mesh, per_node: int) -> str:
    size, number = mesh.axis_size(axis), mesh.size // mesh.axis_size(axis)
    spread = max(len({rank // per_node for rank in group}) for group in mesh.groups((axis,)))
    where = "each inside a node" if spread == 1 else f"over {spread} nodes"
    return f"{axis}: {number} group{'s' * (number > 1)} of {size}, {where}"
