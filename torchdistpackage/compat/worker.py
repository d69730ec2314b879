"""tplib's `Worker`: a function in several processes of this machine, as ranks of one world.

One rule: it stands on the one starter of local processes. They meet at a file and live and die as
one, so there is no port to collide on and nothing is left behind.
"""

import sys
from collections.abc import Callable
from typing import cast

from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.local import run_local
from torchdistpackage.launch.rank import pack_arguments
from torchdistpackage.launch.reference import FarEnough, Reference, main_is_loading
from torchdistpackage.launch.wire import pack, unpack

# once, before the ranks are forked
_PRELOAD = ("torch", "torch.distributed", __name__)


class Worker:
    """Runs functions on `world_size` new ranks.

    init_method: taken for the sake of its default and not needed: the ranks meet at a file.
    backend: "nccl", the default, means nccl where each rank has a GPU and gloo elsewhere.

    Raises:
        LaunchError: `world_size` is below 1.
    """

    def __init__(
        self,
        world_size: int,
        init_method: str = "tcp://localhost:23456",
        backend: str = "nccl",
    ):
        if world_size < 1:
            raise LaunchError(f"world_size is {world_size}, but a run has at least 1 process")
        self.world_size, self.init_method, self.backend = world_size, init_method, backend

    def run(self, func: Callable[..., object], *args: object, **kwargs: object) -> list[object]:
        """Call `func(rank, *args, **kwargs)` on each rank; what they returned, by rank.

        The default group is joined before and left afterwards. What ranks print comes out here. In
        a script without `if __name__ == "__main__":` each rank runs what stands above the first
        call.

        Raises:
            LaunchError: another process could not find `func`, as it is a lambda, a function inside
                another or bound to an object; or no process can be started.
            RankError: a rank raised or died; the text ends with its traceback. All are gone then.
        """
        if main_is_loading():
            # a script without a guard, in a rank: it is here to be read, not to start more
            raise FarEnough
        reference = Reference.of(func)
        packed = pack_arguments(*args, **kwargs)
        results = run_local(
            _as_rank,
            (reference, self.backend, packed),
            num_procs=self.world_size,
            preload=_PRELOAD,
            on_line=_show,
        )
        return [unpack(cast(bytes, result), reference.aliases) for result in results]


def _show(rank: int, line: str) -> None:
    """Rank 0 has this process's output, and the others get it line by line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _as_rank(reference: Reference, backend: str, packed: bytes) -> bytes:
    """In each process. Packed here, as only the caller knows a script's classes by their names."""
    function = reference.resolve()
    args, kwargs = cast(tuple[tuple[object, ...], dict[str, object]], unpack(packed))
    rank, *_ = setup_distributed(backend)
    result = pack(function(rank, *args, **kwargs))
    tpc.destroy()
    leave()
    return result
