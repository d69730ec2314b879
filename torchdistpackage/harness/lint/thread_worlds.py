"""torch.distributed with a world for each thread that is a rank, and the process' own for others.

One rule: everything that is put in here is taken out again, whatever happened inside.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchdistpackage.errors import CommError

_one_at_a_time = threading.Lock()


class _RankWorld:
    """What torch keeps about the groups of one rank."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict = {}
        self.pg_names: dict = {}
        self.pg_group_ranks: dict = {}
        self.pg_backend_config: dict = {}
        self.group_count = 0
        self.tags_to_pg: dict = {}
        self.pg_to_tag: dict = {}
        self.pg_coalesce_state: dict = {}
        self.comms: list = []

    # what torch works out from the above
    pg_config_info = distributed_c10d._World.pg_config_info


class _Worlds:
    """Stands where torch keeps its world: every thread sees its own."""

    def __init__(self, own: object):
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "_local", threading.local())

    def enter(self) -> None:
        """This thread is a rank from now on."""
        self._local.world = _RankWorld()

    def _mine(self) -> object:
        return getattr(self._local, "world", self._own)

    def __getattr__(self, name: str) -> object:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._mine(), name, value)


@contextmanager
def worlds() -> Iterator[_Worlds]:
    """Inside, threads that `enter` have a world of their own.

    Raises:
        CommError: another thread is inside.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise CommError("a lint is running in this process; begin the next one when it has ended")
    own, hook = distributed_c10d._world, sys.excepthook
    method = distributed_c10d._default_pg_init_method
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    found = _Worlds(own)
    try:
        distributed_c10d._world = found  # type: ignore[assignment]
        isolate(True)
        yield found
    finally:
        isolate(False)
        distributed_c10d._world = own
        distributed_c10d._default_pg_init_method = method
        sys.excepthook = hook
        rank = own.default_pg.rank() if own.default_pg is not None else -1
        torch._C._distributed_c10d._set_global_rank(rank)
        _one_at_a_time.release()


@contextmanager
def settings_kept() -> Iterator[None]:
    """What a step commonly sets for all of its process is afterwards as it was.

    Ranks share it meanwhile, as they share the process.
    """
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags
        torch.set_float32_matmul_precision(precision)
