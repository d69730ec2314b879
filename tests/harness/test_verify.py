"""Groups that work pass, and each way not to work is named, on every rank alike and in time."""

import contextlib
import io
import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.harness.failing import fails
from tests.tells import tells
from torchdistpackage.comm import p2p, primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LaunchError
from torchdistpackage.harness import comm_checks as checks
from torchdistpackage.harness.calls import compare
from torchdistpackage.harness.comm_test import test_comm

HOST = socket.gethostname()


def passes(config: tuple[tuple[str, int], ...], moe_ep_size: int | None, pairs: bool):
    tpc.setup_process_groups(list(config))
    if moe_ep_size is not None:
        tpc.build_moe_groups(moe_ep_size=moe_ep_size)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tested = test_comm(pairs=pairs)
    rows = [(row.name, row.num_groups, row.size) for row in tested.rows]
    return out.getvalue().splitlines(), rows, tested.time_s


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("config", "moe_ep_size", "said", "rows"),
    [
        ((("data", 1),), None, "one rank, nothing to test", []),
        (
            (("pipe", 3),),
            None,
            "pipe, model, global 3, all pairs 2",
            [("pipe, model, global", 1, 3), ("all pairs", 3, 2)],
        ),
        (
            (("tensor", 2), ("data", 2)),
            None,
            "tensor, model 2, data 2, global 4, all pairs 2",
            [("tensor, model", 2, 2), ("data", 2, 2), ("global", 1, 4), ("all pairs", 6, 2)],
        ),
        (
            (("data", 4), ("pipe", 2)),
            2,
            "data 4, pipe, model 2, moe_dp 2, moe_ep 2, global 8, all pairs 2",
            [
                ("data", 2, 4),
                ("pipe, model", 4, 2),
                ("moe_dp", 4, 2),
                ("moe_ep", 4, 2),
                ("global", 1, 8),
                ("all pairs", 28, 2),
            ],
        ),
    ],
    ids=str,
)
def test_groups_that_work_pass_with_one_line(ranks, config, moe_ep_size, said, rows):
    world_size = 1
    for _, size in config:
        world_size *= size
    found = ranks(world_size).run(passes, config, moe_ep_size, True)
    assert found[0][0] == [f"test_comm passed: {said}"]
    assert [lines for lines, *_ in found[1:]] == [[]] * (world_size - 1)
    assert [seen for _, seen, _ in found] == [rows] * world_size


def test_eight_ranks_are_done_within_two_seconds(ranks):
    config = (("data", 2), ("pipe", 2), ("tensor", 2))
    for _ in range(5):  # others may be using the machine
        took_s = max(time_s for *_, time_s in ranks(8).run(passes, config, None, False))
        if took_s < 2:
            return
    pytest.fail(f"the last of five took {took_s:.2f} s")


def exchange_groups(patch: pytest.MonkeyPatch) -> None:
    """data and tensor handles are exchanged: each is a good group, of the wrong ranks."""
    right, other = tpc.get_group, {"data": "tensor", "tensor": "data"}
    patch.setattr(tpc, "get_group", lambda mode: right(other.get(mode, mode)))


def test_groups_of_the_wrong_ranks_are_named_on_every_rank(ranks):
    texts = ranks(4).run(fails, (("data", 2), ("tensor", 2)), exchange_groups)
    assert len(set(texts)) == 1
    assert (
        f"the data group of ranks [0, 2]: rank 0 on {HOST} holds that of ranks [0, 1]" in texts[0]
    )
    assert f"the tensor group of ranks [2, 3]: rank 2 on {HOST} holds that of ranks" in texts[0]
    assert texts[0].endswith(
        "give all ranks the same CONFIG or --axes, so that they set up the same groups"
    )


def another_topology() -> str:
    """The same lists of ranks under other names, which only the names can tell."""
    axes = [("data", 2), ("tensor", 2)]
    tpc.setup_process_groups(axes if dist.get_rank() else [("tensor", 2), ("data", 2)])
    with pytest.raises(CommError) as caught:
        test_comm()
    return str(caught.value)


def test_a_rank_with_another_topology_is_named(ranks):
    texts = ranks(4).run(another_topology)
    assert len(set(texts)) == 1
    assert f"rank 0 on {HOST}: tensor=2 x data=2" in texts[0]
    assert f"ranks 1, 2, 3 on {HOST}: data=2 x tensor=2" in texts[0]


def damage(name: str, broken: int, patch: pytest.MonkeyPatch) -> None:
    """On one rank a function does what it should, and then changes one element."""
    if dist.get_rank() != broken:
        return
    where = p2p.Post if name == "send" else primitives
    right = getattr(where, name)

    def send(self, tensors, target):
        wrong = tensors[0].clone()
        wrong[7] = 99
        right(self, [wrong], target)

    def objects(value, group):
        return right(value, group)[::-1]

    def collective(x, group, *rest):
        out = right(x, group, *rest).clone()
        out.view(-1)[:1] = 99
        return out

    others = {"send": send, "gather_objects": objects}
    patch.setattr(where, name, others.get(name, collective))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "broken", "text"),
    [
        ("all_reduce", 2, "all_reduce of float32 over the pipe group of ranks [0, 2]:"),
        ("all_gather", 0, "all_gather of uneven int64 over the tensor group of ranks [0, 1]:"),
        ("reduce_scatter", 3, "reduce_scatter of float32 over the tensor group of ranks [2, 3]:"),
        ("all_to_all", 1, "all_to_all of uneven uint8 over the pipe group of ranks [1, 3]:"),
        ("broadcast", 3, "broadcast from every rank over the tensor group of ranks [2, 3] from"),
    ],
)
def test_one_wrong_element_is_found_by_all(ranks, name, broken, text):
    texts = ranks(4).run(fails, (("pipe", 2), ("tensor", 2)), partial(damage, name, broken))
    assert len(set(texts)) == 1
    assert text in texts[0]
    assert f"rank {broken} on {HOST} got 99 at element 0, expected" in texts[0]


def test_objects_in_the_wrong_order_are_found(ranks):
    text, *others = ranks(3).run(fails, (("data", 3),), partial(damage, "gather_objects", 1))
    assert others == [text, text]
    named = f"gather_objects over the data group of ranks [0, 1, 2]: rank 1 on {HOST} got 2 at"
    assert named in text


def test_neighbours_are_all_stages_round_the_pipe(ranks):
    """The last of three sends nonsense: to the first one, its next, as to the one before it."""
    text, *others = ranks(3).run(fails, (("pipe", 3),), partial(damage, "send", 2))
    assert others == [text, text]
    over = "over the pipe group of ranks [0, 1, 2] from rank 2: rank"
    for message, receiver in (
        ("message to the next stage", 0),
        ("message to the previous stage", 1),
        ("messages both ways", 0),
        ("large messages both ways", 1),
    ):
        assert f"{message} {over} {receiver} on {HOST} got 99 at element 7, expected" in text


def damage_pair(patch: pytest.MonkeyPatch) -> None:
    """Rank 2 sends nonsense to rank 1 alone, which no pipeline would notice."""
    right = checks.rank_pattern

    def written_by(rank, number, like, first=0):
        wrong = dist.get_rank() == 1 and rank == 2 and like[0] == torch.int64
        return right(rank, number, like, first) + wrong

    patch.setattr(checks, "rank_pattern", written_by)


def test_all_pairs_talk_on_request(ranks):
    config = (("data", 3),)
    [text, *others] = ranks(3).run(fails, config, damage_pair, pairs=True)
    assert others == [text, text]
    assert tells(text, "ranks [1, 2]", "rank 2", "rank 1")
    assert "pair of ranks [0, 1]" not in text


def in_groups_of_one() -> list[str]:
    tpc.setup_process_groups([("data", 2)])
    seat = checks.GroupMember(tpc.groups.of([dist.get_rank()]), (dist.get_rank(),), dist.get_rank())
    found = [(c.name, *pair) for c in checks.collectives() for pair in c.run(seat)]
    return [name for name, got, expected, _ in found if compare(got, expected)]


def test_a_group_of_one_gives_each_rank_its_own(ranks):
    assert ranks(2).run(in_groups_of_one) == [[], []]


def limits() -> list[float]:
    """Seconds that gloo allows before, within and after a test."""
    tpc.setup_process_groups([("data", 2)])
    backend = dist.group.WORLD._get_backend(primitives.device_of(dist.group.WORLD))
    seen = [backend.options._timeout.total_seconds()]
    right = primitives.barrier

    def barrier(group):
        seen.append(backend.options._timeout.total_seconds())
        right(group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "barrier", barrier)
        test_comm(timeout_s=9.0)
    return [*seen, backend.options._timeout.total_seconds()]


def test_the_limits_of_the_groups_are_as_before(ranks):
    """Within, what is stuck ends by itself, so that the process can end."""
    for before, within, after in ranks(2).run(limits):
        assert within == 9.0
        assert before == after != 9.0


def nonsense_limit() -> None:
    tpc.setup_process_groups([("data", 1)])
    with pytest.raises(CommError, match="timeout_s is 0; give the ranks some seconds"):
        test_comm(timeout_s=0)


def test_a_limit_of_nothing_is_refused(ranks):
    ranks(1).run(nonsense_limit)


def without_tpc(damaged: bool) -> tuple[object, list[str]]:
    """What is tested where the ranks have joined and no more; tpc is as before."""
    with pytest.MonkeyPatch.context() as patch:
        if damaged:
            damage("send", 2, patch)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                rows = [(row.name, row.num_groups, row.size) for row in test_comm().rows]
            except CommError as error:
                rows = str(error)
    assert not tpc.is_set
    return rows, out.getvalue().splitlines()


def test_without_tpc_the_default_group_is_tested_and_messages_with_rank_0(ranks):
    rows = [("global", 1, 4), ("pairs with rank 0", 3, 2)]
    passed = "test_comm passed: global 4, pairs with rank 0 2"
    assert ranks(4).run(without_tpc, False) == [(rows, [passed]), *[(rows, [])] * 3]
    assert ranks(1).run(without_tpc, False) == [
        ([], ["test_comm passed: one rank, nothing to test"])
    ]
    found = ranks(3).run(without_tpc, True)
    assert len({text for text, _ in found}) == 1 and all(said == [] for _, said in found)
    assert tells(found[0][0], "ranks [0, 2]", "rank 2", "rank 0")


def some_without_tpc() -> str:
    if dist.get_rank():
        tpc.setup_process_groups([("data", 2)])
    with pytest.raises(CommError) as caught:
        test_comm()
    return str(caught.value)


def test_ranks_with_and_without_tpc_are_told_apart(ranks):
    first, second = ranks(2).run(some_without_tpc)
    assert first == second and "pairs with rank 0" in first


def test_it_needs_ranks_that_have_joined():
    with pytest.raises(LaunchError, match=r"call setup_distributed\(\) first"):
        test_comm()


def test_pytest_leaves_it_alone():
    """Its name stands in this module too, and without ranks it would fail."""
    assert test_comm.__test__ is False
