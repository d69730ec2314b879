"""tplib's `Worker`: a function in several processes of this machine, as ranks of one world.

The ranks meet at a file and end together, so there is no port to collide on and nothing is left
behind. A function that they can find by its name is found there; any other, typed in a notebook or
defined inside another, travels by value. One rule: pickles of either kind travel over the private
channels of `run_local` alone.
"""

import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import cloudpickle

from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.entrypoint import EntryPoint, StopLoading, main_is_loading
from torchdistpackage.launch.ipc import pack, unpack
from torchdistpackage.launch.rank import pack_arguments
from torchdistpackage.launch.workers import run_local

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
        reference, packed = _packed(func, args, kwargs)
        results = run_local(
            _as_rank,
            (reference, self.backend, packed),
            num_procs=self.world_size,
            preload=_PRELOAD,
            on_line=_show,
        )
        aliases = reference.aliases if reference else None
        return [unpack(cast(bytes, result), aliases) for result in results]


def _show(rank: int, line: str) -> None:
    """Rank 0 has this process's output, and the others get it line by line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


def _packed(
    func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[EntryPoint | None, bytes]:
    """The function by name and its arguments, or None and all of them by value."""
    try:
        reference = EntryPoint.of(func)
        if _is_found(func, reference):
            return reference, pack_arguments(*args, **kwargs)
    except (LaunchError, pickle.PicklingError, AttributeError, TypeError):
        pass  # pickle has all three for what has no name to be found by
    try:
        return None, cloudpickle.dumps((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{func!r} cannot be run in another process: {error}; make what cannot be sent inside "
            f"of the function"
        ) from error


def _is_found(func: Callable[..., object], reference: EntryPoint) -> bool:
    """Whether the file of a script has it: a session that began with a script goes on by hand."""
    code = getattr(inspect.unwrap(func), "__code__", None)
    if code is None or not reference.is_main or reference.file is None:
        return True
    return Path(code.co_filename).resolve() == Path(reference.file)


def _as_rank(reference: EntryPoint | None, backend: str, packed: bytes) -> bytes:
    """In each process. Packed here, as only the caller knows a script's classes by their names."""
    if reference is None:
        function, args, kwargs = cast(Call, unpack(packed))
    else:
        function = reference.resolve()
        args, kwargs = cast(tuple[tuple[object, ...], dict[str, object]], unpack(packed))
    rank, *_ = setup_distributed(backend)
    value = function(rank, *args, **kwargs)
    result = pack(value) if reference else cloudpickle.dumps(value)
    tpc.destroy()
    leave()
    return result
