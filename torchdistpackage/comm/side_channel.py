"""Messages between ranks from a thread beside the training steps, over a gloo group of its own.

The flight recorder notes no call of these: it says what the host does and waits for, and the host
does not wait for these. When a rank is gone, its connections close, so its peers' messages fail.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import deprioritize, transport_of
from torchdistpackage.comm.creation import create, end, ranks_of
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError


class SideChannel:
    """Messages of host memory between the ranks of `group`, which create and end it together.

    use: a name of its own that says what for. One thread of each rank may use it at a time.

    Raises:
        CommError: the others did not come.
    """

    def __init__(self, group: Group, use: str):
        self._ranks = ranks_of(group)
        backend = transport_of(group).host_backend
        self._group = create(self._ranks, use, backend=backend, name=use)
        deprioritize()

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send and fill these contiguous tensors, each with the global rank at the other end.

        Raises:
            CommError: a peer is gone, or did not come in time.
        """
        try:
            # receives first: on gloo their notices queue behind what is sent
            works: list[dist.Work] = [
                self._group.recv([x], self._ranks.index(peer), 0) for x, peer in receives
            ]
            works += [self._group.send([x], self._ranks.index(peer), 0) for x, peer in sends]
            for work in works:
                work.wait()
        except RuntimeError as error:
            peers = sorted({peer for _, peer in (*sends, *receives)})
            raise CommError(f"an exchange with ranks {peers} failed: {error}") from error

    def close(self) -> None:
        """End the group."""
        end(self._group)
