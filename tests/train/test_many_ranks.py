"""What a start and two saves ask of the store, as the number of ranks grows.

Ranks are processes that join, build a run and save it for real, on a stand-in for NCCL: its groups
move nothing, and answer as if all ranks had sent the same. So all that is counted here is ours.
"""

from __future__ import annotations

import json
import math
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.comm.starting import Start, by_hand
from torchdistpackage.checkpoint import piece_table
from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.checkpoint.save import file_name
from torchdistpackage.comm import creation, runtime, stored_objects
from torchdistpackage.comm.backends import Transport, register_transport
from torchdistpackage.comm.creation import ranks_of
from torchdistpackage.comm.runtime import find_free_port, join, leave
from torchdistpackage.config.load import loads
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.harness.pool import RankPool
from torchdistpackage.harness.watchdog import agree_on_start
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.thread_ranks.own_backend import Collective, OwnGroup, OwnWork, combined, copy
from torchdistpackage.train.build import build, make_loop
from torchdistpackage.train.train_state import TrainState, resume

NODE = 2
RUN = """
model: {layers: 1, dim: 16, heads: 2, vocab: 256}
data: {seq_len: 16, global_batch: 384}
parallel: {tensor: 2, zero: 1}
launch: {local: {procs: null}}
"""


@pytest.fixture
def start(pool: RankPool) -> Start:
    return Start(pool.server)


class Echo(OwnGroup):
    """A group whose other members sent what this one did."""

    def collective(self, call: Collective, is_async: bool) -> OwnWork:
        if call.op:
            for mine, x in zip(call.sends[self.rank()], call.writes, strict=True):
                copy(combined([mine] * self.size(), call.op), x)
        else:
            for i, x in enumerate(call.writes):
                mine = call.like[i % len(call.like)]
                if mine.numel() == x.numel():
                    copy(mine, x)
        return Done(call.writes)


class Done(OwnWork):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def make_echo(options: Any, _: object) -> Echo:
    return Echo(options.group_rank, options.group_size, options.group_id, "echo")


class Counting(dist.Store):
    """A store that counts requests, and the bytes of keys and values in both directions."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store, self.requests, self.bytes = store, 0, 0

    def _count(self, *texts: str | bytes) -> None:
        self.requests += 1
        self.bytes += sum(map(len, texts))

    def set(self, key, value):
        self._count(key, value)
        self.store.set(key, value)

    def get(self, key):
        value = self.store.get(key)
        self._count(key, value)
        return value

    def multi_get(self, keys):
        values = self.store.multi_get(keys)
        self._count(*keys, *values)
        return values

    def add(self, key, value):
        self._count(key)
        return self.store.add(key, value)

    def wait(self, keys, timeout=timedelta(seconds=60)):
        self._count(*keys)
        self.store.wait(keys, timeout)

    def check(self, keys):
        self._count(*keys)
        return self.store.check(keys)

    def delete_key(self, key):
        self._count(key)
        return self.store.delete_key(key)

    def has_extended_api(self):
        return True


class Bill(NamedTuple):
    requests: int
    bytes: int


def counted(folder: Path) -> tuple[list[Bill], int, int]:
    """Of this rank: what it has asked after joining, after building and after each of two saves;
    its descriptors, and the sizes of its groups in all."""
    dist.Backend.register_backend("echo", make_echo, extended_api=True, devices=["cpu"])
    register_transport(Transport("echo", queued=True, averages=True, by_store=True))
    stored_objects._own_connection = lambda: dist.distributed_c10d._get_default_store()
    stored_objects._shared_secret = lambda group: b"the devices bring it"
    creation._set_timeout = lambda *_: None
    stores: list[Counting] = []
    opened = runtime._open_store

    def open_counting(*args: Any) -> tuple[dist.Store, int | None]:
        store, port = opened(*args)
        stores.append(Counting(store))
        return stores[-1], port

    runtime._open_store = open_counting
    opened_files: list[str] = []
    open_file = piece_table.safe_open

    def noted(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened_files.append(path.name)
        return open_file(path, *args, **kwargs)

    piece_table.safe_open = noted
    bills: list[Bill] = []

    def note() -> None:
        bills.append(Bill(sum(x.requests for x in stores), sum(x.bytes for x in stores)))

    here = detect(os.environ)
    joined = join(here, backend="echo", init_timeout_s=200)
    note()
    trainer = build(make_plan(loads(RUN), here.world_size), here.rank, joined.device)
    state = resume(trainer, folder, "auto")
    agree_on_start(folder, rank=here.rank, world_size=here.world_size)
    loop = make_loop(trainer, state, folder)
    note()
    for step in (1, 2):
        loop.saver.save(TrainState(step=step))
        loop.saver.flush()
        note()
    assert opened_files == [file_name(here.rank)] * 2, "each reads the header of its own file"
    groups = {id(g): g for g in dist.distributed_c10d._world.pg_map}
    sizes = sum(len(ranks_of(g)) for g in groups.values())
    num_descriptors = len([*Path("/proc/self/fd").iterdir()])
    leave()
    return bills, num_descriptors, sizes


def counted_on(num_ranks: int, folder: Path) -> None:
    """Fork the ranks from this process, which has imported what they need."""
    port, children = find_free_port(), []
    for rank in range(num_ranks):
        if not (child := os.fork()):
            os.environ |= by_hand(rank, num_ranks, port)
            os.environ |= {"LOCAL_RANK": f"{rank % NODE}", "LOCAL_WORLD_SIZE": f"{NODE}"}
            try:
                (folder / f"{rank}.json").write_text(json.dumps(counted(folder)))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def bills_of(start: Start, num_ranks: int, folder: Path) -> list[tuple[list[Bill], int, int]]:
    folder.mkdir()
    start(counted_on, [{}], num_ranks, folder, limit_s=300)
    found = latest(folder / "checkpoints", checksums=True)
    assert found is not None and found.name == "step_000002"
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return [([Bill(*x) for x in bills], files, sizes) for bills, files, sizes in told]


@pytest.mark.parametrize(("few", "many"), [(4, 8), pytest.param(32, 64, marks=pytest.mark.full)])
def test_what_a_rank_asks_of_the_store_does_not_grow_with_the_ranks(start, tmp_path, few, many):
    at = {n: bills_of(start, n, tmp_path / f"{n}") for n in (few, many)}
    for phase in range(4):
        # the last of all to come says so, four times while they join; a number in a key may have a
        # digit more
        for name, slack in (("requests", 4), ("bytes", 400)):
            most = {
                n: max(getattr(bills[phase], name) for bills, _, _ in told[1:])
                for n, told in at.items()
            }
            assert most[many] <= most[few] + slack, (phase, name, most)
            keeper = {n: getattr(told[0][0][phase], name) for n, told in at.items()}
            growth = many * math.log(many) / (few * math.log(few))
            assert keeper[many] <= growth * keeper[few], (phase, name, keeper)
    for told in at.values():
        bills = told[0][0]
        headers, digests = (bills[i].bytes - bills[i - 1].bytes for i in (2, 3))
        assert digests < headers, "the second save sends the digests of the same headers"
        for _, num_descriptors, sizes in told:
            assert num_descriptors <= 64 + NODE + sizes
