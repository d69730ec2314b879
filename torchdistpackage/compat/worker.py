"""tplib's `Worker`: a function in several processes of this machine, as ranks of one world.

The ranks meet at a file and end together, so there is no port to collide on and nothing is left
behind. A function that they can find by its name is found there; any other, typed in a notebook or
defined inside another, travels by value. One rule: pickles of either kind travel over the private
channels of `run_local` alone.
"""

from collections.abc import Callable
from typing import cast

from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.entrypoint import PackedCall, StopLoading, main_is_loading
from torchdistpackage.launch.workers import run_local, show_line

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
        call. A function that another process could not find by its name, or arguments that have
        such ones in them, are sent by value, with the globals that they use.

        Raises:
            LaunchError: `func` or an argument cannot be pickled, or no process can be started.
            RankError: a rank raised or died; the text ends with its traceback. All are gone then.
        """
        if main_is_loading():
            # a script without a guard, in a rank: it is here to be read, not to start more
            raise StopLoading
        call = PackedCall.of(func, *args, **kwargs)
        results = run_local(
            _as_rank,
            (call, self.backend),
            num_procs=self.world_size,
            preload=_PRELOAD,
            on_line=show_line,
        )
        return [call.unpack_result(cast(bytes, result)) for result in results]


def _as_rank(call: PackedCall, backend: str) -> bytes:
    """In each process."""
    function = call.load()
    rank, *_ = setup_distributed(backend)
    result = call.pack_result(function(rank))
    tpc.destroy()
    leave()
    return result
