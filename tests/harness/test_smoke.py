"""The smoke test passes on real groups of any layout, and finds what is wrong in broken ones."""

import logging

import pytest
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LaunchError
from torchdistpackage.harness import smoke
from torchdistpackage.harness.smoke import test_comm


def smoke_passes(config: tuple[tuple[str, int], ...], moe_ep_size: int | None) -> list[str]:
    tpc.setup_process_groups(list(config))
    if moe_ep_size is not None:
        tpc.build_moe_groups(moe_ep_size=moe_ep_size)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger(smoke.__name__)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        test_comm()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return lines


@pytest.mark.parametrize(
    ("config", "moe_ep_size", "said"),
    [
        ((("data", 1),), None, "one rank"),
        ((("pipe", 2),), None, "pipe 2, model 2, global 2"),
        ((("pipe", 4),), None, "pipe 4, model 4, global 4"),
        ((("tensor", 2), ("data", 2)), None, "tensor 2, data 2, model 2, global 4"),
        (
            (("data", 2), ("pipe", 2), ("tensor", 2)),
            2,
            "data 2, pipe 2, tensor 2, model 4, global 8, moe_ep 2",
        ),
    ],
    ids=str,
)
def test_groups_that_work_pass_with_one_line(ranks, config, moe_ep_size, said):
    world_size = 1
    for _, size in config:
        world_size *= size
    lines, *others = ranks(world_size).run(smoke_passes, config, moe_ep_size)
    assert lines == [f"all groups deliver what was sent ({lines[0].partition('(')[2]}"]
    assert said in lines[0]
    assert others == [[]] * (world_size - 1)


def exchanged_groups() -> str:
    """data and tensor handles are exchanged: each is a good group, of the wrong ranks."""
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    keys = [tuple(tpc.get_ranks_in_group(mode)) for mode in ("data", "tensor")]
    made = tpc.groups._made
    made[keys[0]], made[keys[1]] = made[keys[1]], made[keys[0]]
    with pytest.raises(CommError) as caught:
        test_comm()
    return str(caught.value)


def test_groups_of_the_wrong_ranks_are_named_on_every_rank(ranks):
    texts = ranks(4).run(exchanged_groups)
    assert len(set(texts)) == 1
    assert "the data group of ranks [0, 2]: rank 0 holds that of ranks [0, 1]" in texts[0]
    assert "the tensor group of ranks [2, 3]: rank 2 holds that of ranks [0, 2]" in texts[0]
    assert "see whether all ranks set up the same groups" in texts[0]


def one_rank_receives_something_else(broken: int, what: str) -> str:
    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == broken:
            patch.setattr(*damaged(what))
        with pytest.raises(CommError) as caught:
            test_comm()
    return str(caught.value)


def damaged(what: str):
    """Something that does what it should, and then changes one element."""
    if what == "send":
        sent = Post.send

        def send(self, tensors, target):
            wrong = tensors[0].clone()
            wrong[7] = -1
            sent(self, [wrong], target)

        return Post, "send", send
    right = getattr(primitives, what)

    def collective(x, group, *rest):
        out = right(x, group, *rest).clone()
        out[7] = -1
        return out

    return primitives, what, collective


@pytest.mark.parametrize(
    ("what", "broken", "text"),
    [
        ("all_reduce", 2, "all_reduce over the pipe group of ranks [0, 2]: rank 2 got -1 at elem"),
        ("broadcast", 3, "broadcast over the tensor group of ranks [2, 3]: rank 3 got -1 at elem"),
        ("all_gather", 0, "all_gather over the tensor group of ranks [0, 1]: rank 0 got -1 at"),
        ("send", 1, "message from rank 1 in the pipe group of ranks [1, 3]: rank 3 got -1 at elem"),
    ],
)
def test_one_wrong_element_is_found_by_all(ranks, what, broken, text):
    texts = ranks(4).run(one_rank_receives_something_else, broken, what)
    assert len(set(texts)) == 1
    assert text in texts[0]
    assert "(1 of " in texts[0]


def test_it_needs_tpc():
    with pytest.raises(LaunchError, match=r"call tpc\.setup_process_groups"):
        test_comm()


def test_pytest_leaves_it_alone():
    """Its name stands in this module too, and without ranks it would fail."""
    assert test_comm.__test__ is False
