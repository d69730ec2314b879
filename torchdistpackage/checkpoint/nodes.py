"""Functions that find which ranks share a node, and which node keeps copies for which.

Ranks share a node if they see each other's files under one path, whatever their hosts are called.
"""

import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from torchdistpackage.checkpoint.save import fail_together, outcomes_of
from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CheckpointError


def nodes_of(root: Path, name: str, group: Group) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node: those that see each other's files in `root`.

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

        views = cast(list[tuple[str, tuple[int, ...]]], outcomes_of(look, group, doing))
    finally:
        with suppress(OSError):
            own_file.unlink(missing_ok=True)
    hosts = {rank: host for rank, (host, _) in zip(ranks, views, strict=True)}
    for host, node in views:
        if others := sorted({hosts[rank] for rank in node} - {host}):
            raise CheckpointError(
                f"{name} on {host} is that on {', '.join(others[:4])} too; "
                f"name a folder that each node has for itself, such as one in /dev/shm"
            )
    return tuple(sorted({node for _, node in views}))


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
