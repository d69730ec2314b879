"""What one rank of a group has arrives on the others as it was, or is refused on all of them."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.tells import facts_pattern
from torchdistpackage.comm import groups, objects, primitives
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LayoutError

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16),
)


def same(a: object, b: object) -> bool:
    """Equal in structure and types, tensors to the bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
            return False
        flat = [x.detach().resolve_conj().contiguous().reshape(-1) for x in (a, b)]
        return torch.equal(*(x.view(torch.uint8) for x in flat))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def everything(seed: int) -> dict:
    """Of each kind of value one, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    dtypes = {str(d): torch.randn(3, 2, generator=draw).to(d) for d in DTYPES}
    matrix = torch.randn(4, 3, generator=draw)
    return {
        **dtypes,
        "empty": torch.empty(0, 3, dtype=torch.int16),
        "scalar": torch.tensor(1.5 + seed),
        "transposed": matrix.t(),
        "expanded": matrix[:1].expand(5, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64, generator=draw).conj(),
        "parameter": nn.Parameter(matrix.clone()),
        "": {"a.b": {"c": matrix[1:3]}, "a": {"b.c": matrix[0]}, 7: {}, ("x", None): "plain"},
        "many": [matrix[0], (matrix[1], "two"), []],
        "slot": objects.TensorMetadata(torch.float32, (2,)),
        "none": None,
    }


def dict_arrives(source: int) -> None:
    tpc.setup_process_groups([("data", 4)])
    rank = dist.get_rank()
    if rank == 0:
        return
    group = tpc.groups.of([1, 2, 3])
    mine = everything(source) if rank == source else None
    got = objects.broadcast_tensor_dict(mine, group, source)
    assert same(got, everything(source))
    if rank == source:
        assert got is mine and got["parameter"].requires_grad and got["parameter"]._version == 0
    else:
        found = [x for x in tree_leaves(got) if isinstance(x, Tensor)]
        places = [x.untyped_storage().data_ptr() for x in found if x.numel()]
        assert len(set(places)) == len(places), "no two share memory"
        assert not any(x.requires_grad for x in found)
    assert objects.broadcast_tensor_dict({} if rank == 1 else {"x": 1}, group) == {}
    kept = OrderedDict(x=torch.ones(2)) if rank == 1 else None
    assert same(dict(objects.broadcast_tensor_dict(kept, group)), {"x": torch.ones(2)})


@pytest.mark.parametrize("source", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_dict_of_anything_arrives_whole(ranks, source):
    """In a group that neither is the world nor begins at rank 0, from any of its ranks."""
    ranks(4).run(dict_arrives, source)


class Unwilling:
    def __reduce__(self):
        raise ValueError("not to be sent")


def what_cannot_be_sent() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    knot: dict = {}
    knot["self"] = knot
    for given, why in (
        ({"x": {"y": torch.eye(2).to_sparse()}}, "sparse_coo tensor of shape"),
        ({"x": torch.empty(2, device="meta")}, "on meta cannot be sent"),
        ({"x": threading.Lock()}, "cannot pickle"),
        ({"x": Unwilling()}, "not to be sent"),
        ({"x": lambda: None}, "lambda"),
        (knot, "recursion"),
        ([1], "not a list"),
        (None, "not a NoneType"),
    ):
        with pytest.raises(CommError, match=f"rank 1 of ranks .*{why}"):
            objects.broadcast_tensor_dict(given if rank == 1 else {"x": 1}, group, 1)
    with pytest.raises(CommError, match=r"rank 0 of ranks .*cannot pickle"):
        objects.broadcast_object_list([threading.Lock()], group)
    assert objects.broadcast_object_list([rank], group) == [0], "all are still in step"


def test_what_cannot_be_sent_is_refused_on_every_rank(ranks):
    ranks(2).run(what_cannot_be_sent)


def lists_and_tensors() -> None:
    tpc.setup_process_groups([("tensor", 2), ("data", 2)])
    rank = dist.get_rank()
    source = tpc.get_ranks_in_group("tensor")[1]
    mine = [rank, {"deep": (rank,)}]
    got = objects.broadcast_object_list(mine, "tensor", source)
    assert got is mine and got == [source, {"deep": (source,)}]
    shorter: list = [] if rank != source else [1, 2, 3]
    assert objects.broadcast_object_list(shorter, "tensor", source) == [1, 2, 3]

    whole = torch.full((3, 4), float(rank))
    tensors = [whole.t()[1], torch.tensor(rank), torch.tensor([rank > 1]), torch.empty(0)]
    objects.broadcast_tensors(tensors, "tensor", source)
    assert whole[:, 1].tolist() == [source] * 3 and whole[:, 0].tolist() == [rank] * 3
    assert int(tensors[1]) == source and bool(tensors[2]) == (source > 1)
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    objects.broadcast_tensors([weight], "tensor", rank if rank == source else source)
    if rank == source:
        loss.backward()  # what autograd holds was read, not written
    for wrong in (4, -1, next(r for r in range(4) if r not in tpc.get_ranks_in_group("tensor"))):
        with pytest.raises(CommError, match=f"rank {wrong}, which is not in the group"):
            objects.broadcast_object_list([1], "tensor", wrong)
        with pytest.raises(CommError, match=f"rank {wrong}, which is not in the group"):
            objects.broadcast_tensors([torch.ones(1)], "tensor", wrong)


def test_objects_and_tensors_are_replaced_in_place(ranks):
    ranks(4).run(lists_and_tensors)


def parts_at_one_place() -> None:
    tpc.setup_process_groups([("data", 4)])
    rank = dist.get_rank()
    if rank == 0:
        return
    group = tpc.groups.of([1, 2, 3])
    for target in range(3):
        for dim, dtype in ((0, torch.float8_e4m3fn), (1, torch.complex64), (-1, torch.bool)):
            parts = [torch.arange(6).reshape(2, 3).add(r).to(dtype) for r in (1, 2, 3)]
            got = objects.gather_to(parts[rank - 1].t().contiguous().t(), dim, group, target)
            expected = torch.cat(parts, dim) if rank == target + 1 else None
            assert same(got, expected)
    assert objects.gather_to(torch.empty(0, 2), 0, group, 0) is None or rank == 1
    with pytest.raises(CommError, match=facts_pattern("position 3", "3 ranks")):
        objects.gather_to(torch.ones(1), 0, group, 3)
    with pytest.raises(LayoutError, match="no dim 1"):
        objects.gather_to(torch.ones(1), 1, group, 0)


def test_parts_are_joined_at_one_place_of_the_group(ranks):
    ranks(4).run(parts_at_one_place)


def in_one_batch() -> tuple[list[int], list[float] | None]:
    """The sizes of the batches in which rank 2 receives from four, where calls are queued."""
    group, batches = dist.group.WORLD, list[int]()
    plain = dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_group_for", lambda x, group: group)
        patch.setattr(dist, "batch_isend_irecv", lambda x: batches.append(len(x)) or plain(x))
        got = objects.gather_to(torch.full((1,), float(dist.get_rank())), 0, group, 2)
    return batches, None if got is None else got.tolist()


@pytest.mark.own_transport("asks for it")
def test_parts_come_in_one_batch_where_calls_are_queued(ranks):
    each = ranks(4).run(in_one_batch, transport="late")
    assert each[2] == ([3], [0.0, 1.0, 2.0, 3.0])
    assert all(got is None for i, (_, got) in enumerate(each) if i != 2)


def alone() -> None:
    group = dist.group.WORLD
    mine = {"x": torch.ones(2)}
    assert objects.broadcast_tensor_dict(mine, group) is mine
    assert objects.broadcast_object_list([1], group) == [1]
    assert objects.gather_to(torch.ones(2), 0, group, 0).tolist() == [1, 1]
    for call in (
        lambda: objects.broadcast_tensor_dict(None, group),
        lambda: objects.broadcast_tensor_dict({}, group, 1),
        lambda: objects.broadcast_tensors([torch.ones(1)], group, 1),
        lambda: objects.gather_to(torch.ones(2), 0, group, 1),
    ):
        with pytest.raises(CommError):
            call()


def test_a_group_of_one_gives_and_refuses_the_same(ranks):
    ranks(1).run(alone)


def beside_gpus() -> None:
    """The group says it is of GPUs, so what is in host memory must go over another one."""
    used: list[tuple[str, int]] = []
    patch = pytest.MonkeyPatch()
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    group = tpc_group = tpc.get_group("tensor")
    bare = dist.broadcast

    def seen(x, source, group=None, **kwargs):
        used.append(("broadcast", id(group)))
        return bare(x, source, group=group, **kwargs)

    with patch.context() as p:
        p.setattr(groups, "is_queued", lambda g: g is tpc_group)
        p.setattr(dist, "broadcast", seen)
        twin = groups.on_cpu(group)
        assert twin is not group and primitives.ranks_of(twin) == primitives.ranks_of(group)
        assert groups.on_cpu(group) is twin and groups.on_cpu(twin) is twin
        got = objects.broadcast_tensor_dict({"x": torch.arange(3)}, group)
        assert got["x"].tolist() == [0, 1, 2]
        assert used == [("broadcast", id(twin))]
        # pickled objects too, whose sizes torch would read from the device one by one
        members, before = primitives.ranks_of(group), state_of(twin).issued
        assert primitives.gather_objects(dist.get_rank(), group) == list(members)
        assert primitives.broadcast_object(dist.get_rank(), group, members[1]) == members[1]
        assert state_of(group).issued == 0 and state_of(twin).issued == before + 2
        tpc.destroy()  # and what was made for its groups
        assert group not in groups._on_cpu
        assert twin not in dist.distributed_c10d._world.pg_map


def test_what_is_in_host_memory_does_not_go_over_a_group_of_gpus(ranks):
    ranks(4).run(beside_gpus)
