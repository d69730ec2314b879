"""How groups are made, by their members alone, connected, and ended when all of them have them."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.comm.blocking import NAME, Log, blocking_world
from tests.parallel.pipeline.whole_model import DIM
from torchdistpackage.comm import creation, groups
from torchdistpackage.comm.backends import Transport
from torchdistpackage.comm.groups import Groups, connect, on_cpu
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError
from torchdistpackage.harness.bench.request import Request
from torchdistpackage.harness.measure import measure
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import build

LATE_S = 0.3


def ended_at_once(comes_back: bool) -> None:
    """Rank 1 is still on its way out of making the group when rank 0 ends it."""
    made = Groups(dist.get_rank())
    store, plain = dist.distributed_c10d._get_default_store(), dist.new_group

    def slowly(*args, **kwargs):
        group = plain(*args, **kwargs)
        time.sleep(LATE_S)
        store.set("rank 1 has it", "")
        if not comes_back:
            raise ValueError("rank 1 fails")
        return group

    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", slowly)
            if not comes_back:
                with pytest.raises(ValueError, match="rank 1 fails"):
                    made.of([0, 1], use="short")
                return
            made.of([0, 1], use="short")
    else:
        made.of([0, 1], use="short")
        began = time.monotonic()
        made.destroy()
        assert store.check(["rank 1 has it"])
        assert time.monotonic() - began < 10
    made.destroy()


@pytest.mark.own_transport("gloo breaks a group that one end has left")
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_group_does_not_end_while_a_member_is_still_making_it(ranks, comes_back):
    ranks(2).run(ended_at_once, comes_back)


# -- by their members alone ------------------------------------------------------------------

GPU = torch.device("cuda", 0)


def not_split_off(path: str) -> None:
    """While the default group is bound, as `device_id=` leaves it, and in two threads at once.

    A TCPStore answers one thread after the other, and these two wait in it for what the two of the
    other rank write; a FileStore answers both.
    """
    backend, _ = distributed_c10d._world.pg_map[dist.group.WORLD]
    distributed_c10d._world.pg_map[dist.group.WORLD] = backend, dist.FileStore(path, 2)
    asked: list[object] = []
    plain = distributed_c10d._get_split_source
    world, made = dist.group.WORLD, Groups(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            distributed_c10d,
            "_get_split_source",
            lambda pg, *more: (asked.append(pg), plain(pg, *more))[1],
        )
        world.bound_device_id = GPU
        try:
            group = made.of([0, 1], use="first")
            assert world.bound_device_id == GPU and group.bound_device_id is None
            others = [
                threading.Thread(target=made.of, args=([0, 1],), kwargs={"use": f"thread {i}"})
                for i in range(2)
            ]
            for thread in others:
                thread.start()
            for thread in others:
                thread.join()
            assert world.bound_device_id == GPU and len(made._made) == 3
            assert not asked
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            assert asked, "what torch does by itself"
            dist.destroy_process_group(alone)
        finally:
            world.bound_device_id = None
    made.destroy()


def test_a_group_is_never_split_off_from_everybody(ranks, tmp_path):
    ranks(2).run(not_split_off, str(tmp_path / "store"))


def the_device_it_is_asked_for(folder: str) -> None:
    """One that connects at once is given its device, others are not."""
    given: list[tuple[str | None, object]] = []
    with blocking_world(folder), pytest.MonkeyPatch.context() as patch:
        noted = dist.new_group

        def without_device(*args, device_id, **kwargs):
            given.append((kwargs["backend"], device_id))
            assert dist.group.WORLD.bound_device_id is None
            return noted(*args, device_id=None, **kwargs)

        patch.setattr(dist, "new_group", without_device)
        on_gpu = Transport(NAME, queued=True, device_type="cuda")
        patch.setattr(creation, "transport_of", lambda _: on_gpu)
        patch.setattr(dist.group.WORLD, "bound_device_id", GPU)
        made = Groups(dist.get_rank())
        first = made.of([0, 1], use="eager")
        on_cpu(first)
        made.of([0, 1], use="lazy", connects=False)
        made.of([dist.get_rank()])
        assert given == [(None, GPU), ("gloo", None), (None, None), (None, None)]
        made.destroy()


@pytest.mark.own_transport("brings a back end of its own")
def test_a_group_gets_its_device_where_it_connects_at_once(ranks, tmp_path):
    ranks(2).run(the_device_it_is_asked_for, str(tmp_path))


def called_otherwise() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(creation, "_name_of", lambda ranks: "another name")
        with pytest.raises(CommError, match="calls the group of ranks"):
            Groups(dist.get_rank()).of([dist.get_rank()])
        patch.setattr(creation, "_torch_naming", None)
        with pytest.raises(CommError, match=torch.__version__.partition("+")[0]):
            Groups(dist.get_rank()).of([dist.get_rank()], use="again")


def test_a_torch_that_names_groups_otherwise_is_refused(ranks):
    ranks(2).run(called_otherwise)


# -- connected when they are made ------------------------------------------------------------


def connects_in_order(folder: str) -> None:
    with blocking_world(folder) as log:
        tpc.setup_process_groups([("data", 2), ("pipe", 3), ("tensor", 1)])
        data, pipe = (tuple(tpc.get_ranks_in_group(mode)) for mode in ("data", "pipe"))
        alone = (dist.get_rank(),)
        assert log == [
            ("all_reduce", tuple(range(6))),
            *(("new_group", data), ("all_reduce", data)),
            *(("new_group", pipe), ("all_reduce", pipe), ("messages", pipe), ("companion", pipe)),
            ("new_group", alone),
        ]
        del log[:]
        tpc.prepare()
        connect(tpc.get_group("pipe"), neighbours=True)
        connect(tpc.get_group("data"))
        assert log == [], "once"
        tpc.setup_process_groups([("pipe", 3), ("tensor", 2)])
        tensor = tuple(tpc.get_ranks_in_group("tensor"))
        assert log[0][0] == "new_group", "the default group is connected"
        assert ("messages", tensor) not in log
        del log[:]
        tpc.setup_process_groups([("data", 1), ("pipe", 3), ("tensor", 2)])
        assert ("all_reduce", tuple(range(6))) not in log


@pytest.mark.own_transport("brings a back end of its own")
def test_groups_connect_in_the_order_in_which_they_are_made(ranks, tmp_path):
    ranks(6).run(connects_in_order, str(tmp_path))


def connects_later(folder: str) -> None:
    """Lists of one rank, and the ranks of a model where they are no axis, connect when used."""
    with blocking_world(folder) as log:
        tpc.setup_process_groups([("data", 2), ("pipe", 2), ("tensor", 2)])
        model, alone = tuple(tpc.get_ranks_in_group("model")), (dist.get_rank(),)
        assert ("new_group", model) in log and ("all_reduce", model) not in log
        tpc.groups.of(alone)
        on_cpu(tpc.groups.of(model, name="ON_THE_HOST", connects=False))
        assert log[-2:] == [("new_group", alone), ("companion", model)]
        assert not {("all_reduce", alone), ("all_reduce", model)} & {*log}


@pytest.mark.own_transport("brings a back end of its own")
def test_what_few_calls_use_is_not_connected(ranks, tmp_path):
    ranks(8).run(connects_later, str(tmp_path))


def first_messages_of(groups: Log, order: str, num_stages: int) -> None:
    """A run of a pipeline on a group of the user's own, none of whose ranks was connected."""
    x = torch.arange(4.0 * DIM).view(4, DIM)
    mine = dist.new_group(list(range(dist.get_world_size())))
    before = len(groups)
    schedule = build(order, mine.size(), 4)
    executor = Executor(schedule, mine, device=torch.device("cpu"))

    def forward(s: int, i: int, given):
        out = (x[i] if s == 0 else given) * 1.0
        out = out.requires_grad_() if s == 0 else out
        return out.sum() if s == num_stages - 1 else out

    executor.run(forward)
    everybody = tuple(range(dist.get_world_size()))
    used = [what for what, of in groups[before:] if of == everybody and what != "companion"]
    assert used[:2] == ["all_reduce", "messages"] and len(used) > 2


def pipeline_of_three(folder: str, order: str, num_stages: int) -> None:
    with blocking_world(folder) as log:
        first_messages_of(log, order, num_stages)


@pytest.mark.own_transport("brings a back end of its own")
@pytest.mark.parametrize(("order", "num_stages"), [("1f1b", 3), ("interleaved", 6)])
def test_a_pipeline_connects_before_its_first_message(ranks, tmp_path, order, num_stages):
    ranks(3).run(pipeline_of_three, str(tmp_path), order, num_stages)


def messages_of_a_pair(folder: str) -> None:
    """Two ranks of three, as a bench measures them, once the third has come to connect."""
    with blocking_world(folder):
        tpc.setup_process_groups([("data", 3)])
        if dist.get_rank() < 2:
            post, room = Post(tpc.get_group("data")), torch.zeros(1)
            post.receive([room], 1 - dist.get_rank())
            post.send([torch.full((1,), dist.get_rank() + 5.0)], 1 - dist.get_rank())
            post.go().wait()
            assert room.item() == 6.0 - dist.get_rank()


@pytest.mark.own_transport("brings a back end of its own")
def test_a_pair_of_three_may_talk_alone(ranks, tmp_path):
    ranks(3).run(messages_of_a_pair, str(tmp_path))


def bench_of_a_model(folder: str) -> None:
    """Which nobody connects before: its neighbours are measured pair by pair."""
    request = Request(("p2p_both",), (64,), over=("model",), iterations=1, warmup=0, isolated=1)
    with blocking_world(folder) as log:
        tpc.setup_process_groups([("pipe", 2), ("tensor", 2), ("data", 2)])
        model = tuple(tpc.get_ranks_in_group("model"))
        assert ("all_reduce", model) not in log
        assert {row.axis for row in measure(request).rows} == {"model"}
        assert ("all_reduce", model) in log


@pytest.mark.own_transport("brings a back end of its own")
def test_a_bench_connects_what_it_measures(ranks, tmp_path):
    ranks(8).run(bench_of_a_model, str(tmp_path))


def of_other_ranks(folder: str) -> None:
    with blocking_world(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda x, group: x)  # each rank by itself
        with pytest.raises(CommError, match=r"2 ranks .* is one over 1"):
            connect(dist.group.WORLD)


@pytest.mark.own_transport("brings a back end of its own")
def test_a_communicator_of_other_ranks_is_noticed(ranks, tmp_path):
    ranks(2).run(of_other_ranks, str(tmp_path))


class Ring:
    """Stands in for a group of 8 ranks whose messages leave by a queue, seen by rank 0."""

    def size(self) -> int:
        return 8

    def rank(self) -> int:
        return 0


def test_pairs_that_the_ring_has_connected_are_not_connected_again(monkeypatch):
    asked: list[list[int]] = []
    monkeypatch.setattr(groups, "is_queued", lambda group: True)
    monkeypatch.setattr(groups, "ranks_of", lambda group: range(10, 18))
    monkeypatch.setattr(groups, "_messages", lambda group, peers: asked.append(peers))
    ring = Ring()
    for _ in range(2):  # the second time all are there
        groups.connect_pairs(ring, [(0, 1), (1, 0), (0, 2), (7, 0), (3, 0), (4, 6)])  # type: ignore[arg-type]
    assert asked == [[12, 13]]
