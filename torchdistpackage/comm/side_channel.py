"""Messages between ranks from a thread beside the training steps, over separate gloo groups.

The flight recorder does not record these calls: it records what the host does and waits for, and
the host does not wait for these. When a rank is gone, its connections close, so its peers' messages
fail.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import deprioritize, transport_of
from torchdistpackage.comm.creation import create, end, world
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError


class SideChannel:
    """Messages of host memory within groups of ranks, which create and end them together.

    within: ranks of the groups that this rank is in, in the order in which all of their ranks make
        them; a message goes over the first that has its peer. gloo connects each rank of a group
        with every other.
    use: a name of its own that says what for. One thread of each rank may use it at a time.

    Raises:
        CommError: the others did not come.
    """

    def __init__(self, within: Sequence[Sequence[int]], use: str):
        backend = transport_of(world()).host_backend
        self._groups = [
            (tuple(ranks), create(tuple(ranks), use, backend=backend, name=use)) for ranks in within
        ]
        deprioritize()

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send and receive these contiguous tensors, each with the global rank at the other end.

        Raises:
            CommError: a peer is gone, or did not come in time.
        """
        try:
            # receives first: on gloo their notices queue behind what is sent
            works: list[dist.Work] = []
            for x, peer in receives:
                group, at = self._to(peer)
                works.append(group.recv([x], at, 0))
            for x, peer in sends:
                group, at = self._to(peer)
                works.append(group.send([x], at, 0))
            for work in works:
                # all are started before the first wait, or two ranks could wait for each other
                work.wait()
        except RuntimeError as error:
            peers = sorted({peer for _, peer in (*sends, *receives)})
            raise CommError(
                f"an exchange with ranks {peers} failed: {error}; look at the logs of these "
                "ranks, one of which has probably ended"
            ) from error

    def close(self) -> None:
        """End the groups."""
        for _, group in self._groups:
            end(group)

    def _to(self, peer: int) -> tuple[Group, int]:
        """Return the group that contains this global rank, and the rank's index in it."""
        return next((g, ranks.index(peer)) for ranks, g in self._groups if peer in ranks)
