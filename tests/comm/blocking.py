"""A back end on the CPU that connects as one on devices does, for the ranks of a test.

The first call on a group blocks until all of its ranks have made one, and the first message of two
ranks until both have. It carries calls by gloo. Who waits for more than `LIMIT_S` fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchdistpackage.comm import backends
from torchdistpackage.comm.backends import Transport
from torchdistpackage.comm.runtime import leave
from torchdistpackage.comm.tpc import tpc

NAME = "blocking"
LIMIT_S = 6.0
Log = list[tuple[str, tuple[int, ...]]]
"""(call, ranks of its group), in order: "new_group", "companion" (on gloo), "all_reduce" or
"messages"."""


@contextlib.contextmanager
def blocking_world(folder: str) -> Iterator[Log]:
    """Inside, the default group and all that are made have this back end."""
    rank, size, log = dist.get_rank(), dist.get_world_size(), Log()
    leave()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends._transports, NAME, Transport(NAME, queued=True))
        store = dist.FileStore(f"{folder}/blocking", size)
        dist.init_process_group(NAME, store=store, rank=rank, world_size=size)
        for name in ("all_reduce", "batch_isend_irecv", "new_group"):
            patch.setattr(dist, name, _Noted(log, name, getattr(dist, name)))
        yield log
        tpc.destroy()
    leave()


def _create(store: dist.Store, rank: int, size: int, limit: timedelta) -> dist.ProcessGroup:
    return dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=limit)


class _Noted:
    """A call of torch.distributed that is written down and blocks as said above."""

    def __init__(self, log: Log, name: str, function):
        self._log, self._name, self._function = log, name, function

    def __call__(self, *args, **kwargs):
        if self._name == "new_group":
            group = self._function(*args, **kwargs)
            what = "new_group" if kwargs.get("backend") is None else "companion"
            self._log.append((what, tuple(args[0])))
            return group
        messages = self._name == "batch_isend_irecv"
        group = args[0][0].group if messages else kwargs["group"]
        if dist.get_backend(group) == NAME:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._log.append(("messages" if messages else "all_reduce", ranks))
            mine, name = dist.get_rank(), f"first call/{group.group_name}"
            _meet([f"{name}/{mine}"], [f"{name}/{other}" for other in ranks])
            if messages:
                peers = {op.peer for op in args[0]}
                _meet(
                    [f"{name}/{mine} to {peer}" for peer in peers],
                    [f"{name}/{peer} to {mine}" for peer in peers],
                )
        return self._function(*args, **kwargs)


def _meet(mine: list[str], theirs: list[str]) -> None:
    store = dist.distributed_c10d._get_default_store()
    for key in mine:
        store.set(key, "")
    store.wait(theirs, timedelta(seconds=LIMIT_S))
