"""Objects that go by the store where the ranks met, as those of devices' ranks do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.tells import tells
from torchdistpackage.comm import primitives, stored_objects
from torchdistpackage.comm.backends import GLOO, Transport, register_transport
from torchdistpackage.comm.creation import create, end
from torchdistpackage.comm.primitives import ForEach
from torchdistpackage.errors import CommError


@contextmanager
def by_store(group: Any) -> Iterator[stored_objects.StoredObjects]:
    """Inside, objects of gloo groups go by the store, as on NCCL."""
    register_transport(Transport("gloo", direct=True, by_store=True))
    try:
        objects = stored_objects.stored_objects(group)
        assert objects is not None
        yield objects
    finally:
        register_transport(GLOO)


def exchanged() -> list[object]:
    rank, group = dist.get_rank(), create((0, 1, 2), "objects")
    said: list[object] = []
    with by_store(group) as objects:
        for number in range(4):
            said.append(primitives.reduce_objects(10**rank * number, sum, group))  # type: ignore[arg-type]
            keys = stored_objects.default_store().num_keys()
            said.append(primitives.broadcast_object(rank, group, 2))
        said.append(primitives.gather_objects({"rank": rank}, group))
        said.append(primitives.reduce_objects(rank, lambda x: ForEach([i * i for i in x]), group))
        said.append(primitives.collect_objects(rank, group))
        big = primitives.reduce_objects(bytes(3) * rank, lambda x: b"a" * (9 << 20), group)
        said.append(len(big))  # type: ignore[arg-type]
        try:
            primitives.reduce_objects(rank, lambda x: 1 / 0, group)
        except CommError as error:
            said.append(str(error))
        except ZeroDivisionError:
            said.append("as it was raised")
        primitives.reduce_objects(rank, len, group)
        kept = len(objects._written)
    primitives.barrier(group)
    end(group)
    return [said, keys, kept]


@pytest.mark.own_transport("sets the transport itself")
def test_ranks_get_one_answer_by_the_store_and_leave_no_keys(ranks):
    for rank, (said, _, kept) in enumerate(ranks(3).run(exchanged)):
        assert said[:8] == [0, 2, 111, 2, 222, 2, 333, 2]
        assert said[8] == [{"rank": i} for i in range(3)]
        assert said[9] == rank**2
        assert said[10] == ([0, 1, 2] if rank == 0 else None)
        assert said[11] == 9 << 20
        assert said[12] == ("rank 0: division by zero" if rank else "as it was raised")
        assert kept == (1 if rank == 0 else 0), "the answer stays until the others have read it"


def refused() -> tuple[str, str]:
    """Someone else writes to the store; then rank 1 does not come."""
    group = create((0, 1), "refused")
    with by_store(group) as objects:
        if dist.get_rank() == 1:
            objects._store.set("1/1", (1).to_bytes(4, "big") + bytes(32) + b"cos\nsystem\n.")  # type: ignore[arg-type]
            primitives.barrier(group)
            primitives.barrier(group)
            end(group)
            return "", ""
        primitives.barrier(group)
        with pytest.raises(CommError) as forged:
            objects.reduce(0, list)
        objects.limit = timedelta(seconds=0.3)
        with pytest.raises(CommError) as absent:
            objects.reduce(0, list)
        primitives.barrier(group)
    end(group)
    return str(forged.value), str(absent.value)


@pytest.mark.own_transport("sets the transport itself")
def test_what_another_wrote_is_not_unpickled_and_who_does_not_come_is_named(ranks):
    (forged, absent), _ = ranks(2).run(refused)
    assert "comes from no rank of this group" in forged
    assert tells(absent, "within 0.3", "1 ranks", "(1)")
