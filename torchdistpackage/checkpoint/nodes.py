"""Which ranks share a node, and which node keeps a copy for which.

A node is a folder: ranks that see each other's files under one path are on one, whatever hosts are
called.
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
    """The ranks of each node, by the first: those that see each other's files in their `root`.

    name: what messages call it, alike on all ranks.

    Raises:
        CheckpointError: on all ranks, if one cannot write there, or hosts share it.
    """
    ranks = primitives.ranks_of(group)
    nonce = str(primitives.broadcast_object(secrets.token_hex(8), group))
    mine = root / f".tdp-{nonce}-{ranks[group.rank()]}"
    doing = f"looking for nodes by {name}"
    try:
        with fail_together(group, doing):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            mine.touch(mode=0o600)

        def look() -> tuple[str, tuple[int, ...]]:
            found = [int(x.name.rpartition("-")[2]) for x in root.glob(f".tdp-{nonce}-*")]
            return socket.gethostname(), tuple(sorted(found))

        seen = cast(list[tuple[str, tuple[int, ...]]], outcomes_of(look, group, doing))
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
    hosts = {rank: host for rank, (host, _) in zip(ranks, seen, strict=True)}
    for host, node in seen:
        if others := sorted({hosts[rank] for rank in node} - {host}):
            raise CheckpointError(
                f"{name} on {host} is that on {', '.join(others[:4])} too; "
                f"name a folder that each node has for itself, such as one in /dev/shm"
            )
    return tuple(sorted({node for _, node in seen}))


def neighbours(nodes: Sequence[Sequence[int]], rank: int) -> tuple[int | None, tuple[int, ...]]:
    """Who keeps a copy of the file of `rank`, and whose files `rank` keeps.

    A node keeps those of the next one, shared out among its ranks; a single node keeps none.
    """
    if len(nodes) == 1:
        return None, ()
    at = next(i for i, node in enumerate(nodes) if rank in node)
    node, before, following = nodes[at], nodes[at - 1], nodes[(at + 1) % len(nodes)]
    index = node.index(rank)
    kept = tuple(x for i, x in enumerate(following) if i % len(node) == index)
    return before[index % len(before)], kept
