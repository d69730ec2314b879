"""The default group, with every rank in it: one clear word for all where it is not there."""

import torch.distributed as dist

from torchdistpackage.errors import LaunchError

Group = dist.ProcessGroup


def is_joined() -> bool:
    """Whether this process is one of the ranks of a default group."""
    return dist.is_available() and dist.is_initialized()


def world(how: str = "setup_distributed()") -> Group:
    """The default group.

    how: what the caller's users call to make one.

    Raises:
        LaunchError: there is none.
    """
    if not is_joined():
        raise LaunchError(f"torch.distributed is not initialised; call {how} first")
    return dist.group.WORLD  # type: ignore[return-value]
