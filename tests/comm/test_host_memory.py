"""gloo sends host memory: a tensor elsewhere is refused by name, and nothing is sent.

`meta` is the other device here: it needs no GPU, and gloo would read its address as it would that
of a CUDA tensor.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives as p
from torchdistpackage.comm.p2p import Post, receive, send
from torchdistpackage.comm.tensor_channel import TensorChannel
from torchdistpackage.comm.tensor_meta import MessageSpec, describe
from torchdistpackage.comm.transport.sharded_flat import start_all_gather_v, start_reduce_scatter_v
from torchdistpackage.errors import CommError

Group = dist.ProcessGroup


def post(x: torch.Tensor, group: Group) -> None:
    post = Post(group)
    post.send([x], 1 - dist.get_rank())
    post.go()


CALLS: dict[str, Callable[[torch.Tensor, Group], object]] = {
    "all_gather": lambda x, g: p.all_gather(x, g),
    "all_gather of uneven parts": lambda x, g: p.all_gather(x, g, [4, 4], async_op=True),
    "reduce_scatter": lambda x, g: p.reduce_scatter(x, g),
    "all_to_all": lambda x, g: p.all_to_all(x, g),
    "sum": lambda x, g: start_reduce_scatter_v(x, (0, 2, 4), g),
    "gather": lambda x, g: start_all_gather_v(x, (0, 2, 4), g),
    "send": lambda x, g: send(x, g, 1 - dist.get_rank()),
    "receive": lambda x, g: receive(x, g, 1 - dist.get_rank()),
    "send of a post": post,
    "messages between stages": lambda x, g: TensorChannel(g, x.device, 5),
}


def refused(name: str) -> str:
    group = dist.group.WORLD
    with pytest.raises(CommError) as caught:
        CALLS[name](torch.empty(4, device="meta"), group)
    assert p.all_reduce(torch.ones(1), group).item() == 2, "the group still works"
    return str(caught.value)


@pytest.mark.own_transport("gloo's refusal of other devices")
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_in_host_memory_is_refused_by_name(ranks, name: str):
    for said in ranks(2).run(refused, name):
        assert said.startswith(name.partition(" of ")[0])
        assert "ranks (0, 1)" in said and "on meta" in said and "gloo" in said


HERE = torch.zeros(2)
ELSEWHERE = torch.zeros(2, device="meta")


@pytest.mark.parametrize(
    ("message", "member"),
    [
        ({"x": HERE, "mask": ELSEWHERE}, "'mask'"),
        ((HERE, None, ELSEWHERE), "2"),
        (ELSEWHERE, "0"),
    ],
)
def test_a_member_elsewhere_is_named_with_where_it_belongs(message, member: str):
    with pytest.raises(CommError, match=rf"member {member} .* on meta.*\.to\('cpu'\)"):
        describe(message, torch.device("cpu"))
    describe(message)


def test_a_member_in_host_memory_is_named_where_messages_go_from_device_to_device():
    """Lengths or a mask that were left on the CPU."""
    with pytest.raises(CommError, match=r"member 'lengths' .* on cpu.*\.to\('meta'\)"):
        describe({"x": ELSEWHERE, "lengths": HERE}, torch.device("meta"))


def test_a_member_that_changed_its_place_is_of_another_form():
    for place, message, moved in (("cpu", HERE, ELSEWHERE), ("meta", ELSEWHERE, HERE)):
        template = MessageSpec(describe((message, None)), torch.device(place))
        assert template.matches((message, None)) and not template.matches((moved, None))
