"""Work that succeeds on all ranks or fails on all.

One rule: no rank goes on alone. A rank that raised would leave its peers waiting in the next
collective; here each says how it went before anybody goes on.
"""

import socket
from collections.abc import Generator
from contextlib import contextmanager

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CheckpointError


@contextmanager
def fail_together(group: Group, doing: str) -> Generator[None]:
    """Run the block on every rank of the group; it holds no collective itself.

    doing: what the block does, for the message: `writing the checkpoint of step 400`.

    Raises:
        CheckpointError: on every rank if the block raised on any; names the first of them.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    text = None if mine is None else f"on {socket.gethostname()}: {type(mine).__name__}: {mine}"
    outcomes = primitives.gather_objects(text, group)
    failed = [
        (rank, outcome)
        for rank, outcome in zip(primitives.ranks_of(group), outcomes, strict=True)
        if outcome is not None
    ]
    if failed:
        rank, outcome = failed[0]
        others = f" (and {len(failed) - 1} more failed)" if len(failed) > 1 else ""
        raise CheckpointError(f"{doing} failed on rank {rank} {outcome}{others}") from mine
