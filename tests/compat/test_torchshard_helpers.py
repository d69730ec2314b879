"""torchshard's initial values, attributes, utilities, and the usage block of its README."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import start, whole
from torchdistpackage.comm import attendance
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LaunchError


def helpers() -> None:
    start(2)
    torch.manual_seed(5)
    for make, over in (
        (lambda: ts.nn.ParallelLinear(5, 7, dim=1), 0),
        (lambda: ts.nn.ParallelLinear(5, 7, dim=0), 1),
        (lambda: ts.nn.ParallelLinear(5, 7), None),
        (lambda: ts.nn.ParallelEmbedding(7, 5, dim=0), 0),
        (lambda: ts.nn.ParallelEmbedding(7, 5, dim=-1), 1),
    ):
        layer = make()
        for target in (layer.weight, layer.weight.data):  # users pass both
            torch.manual_seed(9 + dist.get_rank())
            ts.nn.init.shard_init_helper_(nn.init.xavier_normal_, target, gain=2.0)
            torch.manual_seed(9)  # of the first rank
            expected = nn.init.xavier_normal_(torch.empty(7, 5), gain=2.0)
            full = layer.weight if over is None else whole(layer.weight, over)
            assert torch.equal(full, expected)
    unmarked = torch.empty(3)
    ts.nn.init.shard_init_helper_(nn.init.constant_, unmarked, val=2.0)
    assert unmarked.tolist() == [2, 2, 2]

    mine = nn.Parameter(torch.randn(3, 4))
    ts.register_parallel_attribute(mine, -1, order_type=0)
    twin = copy.deepcopy(mine)
    assert ts.get_parallel_dim(twin) == -1 and isinstance(twin, nn.Parameter)
    holder = nn.Module()
    holder.w = mine
    assert ts.collect_state_dict(holder, holder.state_dict())["w"].shape == (6, 4)
    ts.set_attribute(mine, 1, 1)
    assert ts.collect_state_dict(holder, holder.state_dict())["w"].shape == (3, 8)
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), mine)
    optimizer = torch.optim.AdamW([mine])
    mine.grad = torch.ones_like(mine)
    optimizer.step()

    assert [t.tolist() for t in ts.slice(torch.arange(4), 2)] == [[0, 1], [2, 3]]
    assert all(t.is_contiguous() for t in ts.slice(torch.ones(4, 6), 3, contiguous=True))
    assert ts.utils.divide(8, 2) == 4
    with pytest.raises(AssertionError, match="7 is not divisible by 2"):
        ts.utils.check_divisibility(7, 2)
    assert ts.utils.VocabUtility.vocab_range_from_global_vocab_size(10, 1, 2) == (5, 10)
    with pytest.raises(ValueError, match=r"dict .*torch\.nn\.Module"):
        ts.collect_state_dict({}, {})
    ts.distributed.destroy_process_group()
    plain = ts.nn.ParallelLinear(3, 3)  # equal to nn.Linear, without groups too
    assert plain(torch.ones(2, 3)).shape == (2, 3)
    with pytest.raises(LaunchError, match="init_process_group"):
        ts.nn.ParallelLinear(3, 3, dim=1)


def test_helpers(ranks):
    ranks(2).run(helpers)


def usage() -> None:
    """The usage block of its README, on each group of two."""
    ts.distributed.init_process_group(group_size=2)
    torch.manual_seed(1)
    m = nn.Sequential(
        nn.Linear(20, 30, bias=True),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=None),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=0),
        ts.nn.ParallelLinear(30, 30, bias=True, dim=1),
    )
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(20, 30), *(nn.Linear(30, 30) for _ in range(3)))
    x, y = torch.randn(4, 20), torch.randint(30, (4,))
    loss = ts.nn.functional.parallel_cross_entropy(m(x), y)
    loss.backward()
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(m[0].weight.grad, plain[0].weight.grad)
    buffer = io.BytesIO()
    torch.save(ts.collect_state_dict(m, m.state_dict()), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
    assert tpc.get_group("tensor") is ts.distributed.get_group()


@pytest.mark.parametrize("world", [2, 4])
def test_the_usage_block_of_its_readme(ranks, world):
    ranks(world).run(usage)


def collected_alone() -> str:
    """What rank 0 is told that saves by itself."""
    start(2)
    model, told = ts.nn.ParallelLinear(4, 4, dim=1), ""
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attendance, "LIMIT_S", 0.3)
            with pytest.raises(CommError) as met:
                ts.collect_state_dict(model, model.state_dict())
        told = str(met.value)
    dist.barrier()
    attendance._calls.clear()  # what was called alone counts no more
    return told


def test_a_state_dict_that_rank_0_collects_alone_says_what_to_do(ranks):
    told, _ = ranks(2).run(collected_alone)
    assert told.startswith("collect_state_dict() is collective") and "(ranks 1)" in told
    assert "call it on all ranks" in told
