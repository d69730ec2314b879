"""Functions that find which ranks share a node, and which node keeps copies for which other.

Ranks share a node if they see each other's files under one path; names of hosts do not matter.
"""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from torchdistpackage.checkpoint.save import agree_on, fail_together
from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import ForEach, Group
from torchdistpackage.errors import CheckpointError


class NodePlace(NamedTuple):
    """The ranks of a rank's node, and of the nodes beside it in a ring of all nodes.

    number: the number of this node. num_nodes: how many nodes there are. keeper: the rank on the
    node before that keeps a copy of this rank's file; None: there is one node. kept_for: ranks of
    the next node whose files this rank keeps.
    """

    number: int
    num_nodes: int
    node: tuple[int, ...]
    before: tuple[int, ...]
    following: tuple[int, ...]
    keeper: int | None
    kept_for: tuple[int, ...]


def place_in_nodes(root: Path, name: str, group: Group) -> NodePlace:
    """Find the node of this rank: the ranks that see each other's files in `root`.

    name: name of `root` in messages, the same on all ranks.

    Raises:
        CheckpointError: on all ranks, if a rank cannot write there, or several hosts share it.
    """
    ranks = primitives.ranks_of(group)
    nonce = str(primitives.broadcast_object(secrets.token_hex(8), group))
    own_file = root / f".tdp-{nonce}-{ranks[group.rank()]}"
    doing = f"looking for nodes by {name}"
    try:
        with fail_together(group, doing):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            own_file.touch(mode=0o600)

        def look() -> tuple[str, tuple[int, ...]]:
            seen_ranks = [int(x.name.rpartition("-")[2]) for x in root.glob(f".tdp-{nonce}-*")]
            return socket.gethostname(), tuple(sorted(seen_ranks))

        def places(seen: list[Any]) -> ForEach:
            nodes = _nodes(ranks, seen, name)
            return ForEach([place_of(nodes, rank) for rank in ranks])

        return cast(NodePlace, agree_on(look, group, doing, places))
    finally:
        with suppress(OSError):
            own_file.unlink(missing_ok=True)


def _nodes(
    ranks: Sequence[int], node_of_ranks: Sequence[tuple[str, tuple[int, ...]]], name: str
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, by its first. node_of_ranks: host and node of each rank."""
    hosts = {rank: host for rank, (host, _) in zip(ranks, node_of_ranks, strict=True)}
    for host, node in node_of_ranks:
        if others := sorted({hosts[rank] for rank in node} - {host}):
            raise CheckpointError(
                f"{name} is the same folder on {host} and on {', '.join(others[:4])}; name a "
                "folder that each node has for itself, such as one in /dev/shm"
            )
    return tuple(sorted({node for _, node in node_of_ranks}))


def place_of(nodes: Sequence[tuple[int, ...]], rank: int) -> NodePlace:
    """Return the place of `rank` among these nodes."""
    at = next(i for i, node in enumerate(nodes) if rank in node)
    previous, following = nodes[at - 1], nodes[(at + 1) % len(nodes)]
    return NodePlace(at, len(nodes), nodes[at], previous, following, *neighbours(nodes, rank))


def neighbours(nodes: Sequence[Sequence[int]], rank: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank that keeps a copy of this rank's file, and the ranks whose files it keeps.

    A node keeps the next node's files, divided among its ranks. A single node keeps none.
    """
    if len(nodes) == 1:
        return None, ()
    position = next(i for i, node in enumerate(nodes) if rank in node)
    node = nodes[position]
    previous, following = nodes[position - 1], nodes[(position + 1) % len(nodes)]
    index = node.index(rank)
    kept_for = tuple(x for i, x in enumerate(following) if i % len(node) == index)
    return previous[index % len(previous)], kept_for


def pairs_of(place: NodePlace) -> list[tuple[int, ...]]:
    """Return the ranks of this node and the next, and of this node and the one before.

    A group of all ranks would connect each rank with every other. The groups of even nodes with
    their next ones come first, so that creating them does not become a chain through all nodes.
    """
    next_pair, previous_pair = place.number, (place.number - 1) % place.num_nodes
    pairs = {
        next_pair: tuple(sorted({*place.node, *place.following})),
        previous_pair: tuple(sorted({*place.node, *place.before})),
    }
    last = place.num_nodes - 1

    def turn(pair: int) -> int:
        return 2 if pair == last and place.num_nodes % 2 else pair % 2

    return list(dict.fromkeys(pairs[pair] for pair in sorted(pairs, key=turn)))
