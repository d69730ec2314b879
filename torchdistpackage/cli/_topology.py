"""The output of `tdp plan --topology`: the groups that cross switches, and an order of nodes."""

from collections.abc import Sequence
from pathlib import Path

import typer

from torchdistpackage.cli._common import wrap
from torchdistpackage.config.slurm import header
from torchdistpackage.environment.slurm_env import expand
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import atomic_write
from torchdistpackage.launch.slurm.switches import read_switches
from torchdistpackage.plan.node_order import best_order, crossed_axes, host_lines
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.text import size_text, text_table

_SHOWN = 64
"""Most nodes that are printed."""


def topology_text(
    plan: Plan, ranks_per_node: int | None, source: str, nodelist: str | None, hostfile: Path | None
) -> str:
    """Return what the groups of a run cross on its nodes, and the order of nodes that crosses
    least; write that order to `hostfile`.

    nodelist: as Slurm writes it; None: the one of launch.slurm, else the first nodes of the source.

    Raises:
        ConfigError: the source names no tree, or the nodes do not fit the ranks or the tree.
        LaunchError: Slurm does not answer, or the list is wrong.
    """
    if ranks_per_node is None:
        raise typer.BadParameter(
            "the file has no launch.slurm; add --ranks-per-node K", param_hint="--topology"
        )
    tree = read_switches(source)
    number = -(-plan.world_size // ranks_per_node)
    listed = nodelist or header(plan.config.launch.slurm).get("nodelist")
    nodes = tree.nodes()[:number] if listed is None else expand(listed)
    if listed is None and len(nodes) < number:
        raise ConfigError(
            f"{source} has {len(nodes)} nodes, but {plan.world_size} ranks, {ranks_per_node} on a "
            f"node, fill {number}; use fewer ranks, or more of them on a node"
        )
    best = best_order(plan, ranks_per_node, nodes, tree.paths)
    crossed = crossed_axes(plan, ranks_per_node, nodes, tree.paths)
    crossed_by_best = crossed_axes(plan, ranks_per_node, best.nodes, tree.paths)
    # a level at which all nodes are below one switch divides nothing
    levels = [
        level
        for level in range(tree.num_levels)
        if len({tree.paths[node][level] for node in nodes}) > 1
    ]
    parts: list[str] = []
    for level in levels:
        names = dict.fromkeys(tree.paths[node][level] for node in nodes)
        parts.append(f"level {level + 1} {', '.join(list(names)[:8])}" + ", ..." * (len(names) > 8))
    above = "; ".join(parts) if levels else "all below one switch"
    lines = [wrap(f"switches of {number} nodes ({source}): {above}")]
    if levels and crossed:
        rows: list[Sequence[object]] = [
            (
                "axis",
                "ranks",
                "groups",
                "bytes",
                *(f"cross level {level + 1}" for level in levels),
                *(f"best order, level {level + 1}" for level in levels),
            )
        ]
        for axis, other in zip(crossed, crossed_by_best, strict=True):
            num_bytes = "" if axis.num_bytes is None else size_text(axis.num_bytes)
            crossing = [x.num_crossing[level] for x in (axis, other) for level in levels]
            rows.append((axis.axis, axis.num_ranks, axis.num_groups, num_bytes, *crossing))
        lines.append(text_table(rows, num_left=1))
    exact = (
        "no order has less traffic between switches"
        if best.is_exact
        else ("the best of the orders that were tried")
    )
    if best.nodes == tuple(nodes):
        lines.append(wrap(f"order of nodes: as given; {exact}"))
    else:
        less = 1 - best.cost / best.given_cost
        lines.append(wrap(f"order of nodes, {less:.0%} fewer bytes between switches; {exact}:"))
        more = f", and {number - _SHOWN} more (--hostfile writes all)" if number > _SHOWN else ""
        lines.append(wrap(", ".join(best.nodes[:_SHOWN]) + more))
    if hostfile is not None:
        try:
            atomic_write(hostfile, host_lines(best.nodes, plan.world_size, ranks_per_node))
        except OSError as error:
            raise ConfigError(
                f"--hostfile {hostfile} cannot be written: {error.strerror}; name a file in a "
                f"folder that exists and that you can write to"
            ) from error
        lines.append(f"wrote {hostfile}, for srun --distribution=arbitrary")
    return "\n".join(lines)
