"""SyncBatchNorm over uneven parts is one process's BatchNorm over the whole batch, in float64."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.ddp.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

STEPS = 3
PARTS = {"even": (4, 4, 4), "uneven": (1, 6, 3), "one has none": (5, 0, 2)}
KINDS = {
    "plain": {},
    "momentum None": {"momentum": None},
    "affine False": {"affine": False},
    "track_running_stats False": {"track_running_stats": False},
}


def same(mine: Tensor, truth: Tensor, what: str) -> None:
    torch.testing.assert_close(mine, truth, rtol=0, atol=1e-12, msg=lambda m: f"{what}: {m}")


def same_as_one_process(kind: dict, parts: tuple[int, ...], spatial: tuple[int, ...]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = parts[:size]
    norm = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(spatial)]
    one = nn.Sequential(norm(5, **kind)).double()
    with torch.no_grad():
        for p in one.parameters():
            p.uniform_(0.5, 2.0)
    mine = convert_sync_batchnorm(copy.deepcopy(one))
    assert type(mine[0]) is SyncBatchNorm
    draw = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(sum(parts), 5, *spatial, generator=draw, dtype=torch.float64) * 3 + 1
        x.requires_grad_()
        target = torch.randn(x.shape, generator=draw, dtype=torch.float64)
        own = x.detach().split(parts)[rank].clone().requires_grad_()
        whole, part = one(x), mine(own)
        same(part, whole.split(parts)[rank], "forward")
        (whole * target).sum().backward()
        (part * target.split(parts)[rank]).sum().backward()
        same(own.grad, x.grad.split(parts)[rank], "gradient of the input")
        for p, q in zip(mine.parameters(), one.parameters(), strict=True):
            dist.all_reduce(p.grad)
            same(p.grad, q.grad, "gradient of a parameter")
            p.grad = q.grad = None
        for p, q in zip(mine.buffers(), one.buffers(), strict=True):
            same(p, q, "running statistics")
    assert mine.state_dict().keys() == one.state_dict().keys()
    if kind.get("track_running_stats", True):
        mine.eval(), one.eval()
        if rank == 0:  # needs no other rank
            same(mine(own), one(own), "eval")


@pytest.mark.few(4)
@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_it_is_the_batch_norm_of_the_whole_batch(ranks, kind, parts):
    for spatial in ((), (3,), (2, 3)):
        ranks(3).run(same_as_one_process, kind, parts, spatial)


def penalised() -> None:
    """A gradient of a gradient crosses the ranks too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, sync = nn.BatchNorm1d(4).double(), SyncBatchNorm(4).double()

    def penalty(norm: nn.Module, part: Tensor) -> Tensor:
        part.requires_grad_()
        (inner,) = torch.autograd.grad(norm(part).pow(3).sum(), part, create_graph=True)
        return inner.square().sum()

    penalty(one, x).backward()
    mine = x.detach().chunk(size)[rank].clone()
    penalty(sync, mine).backward()
    same(mine.grad, x.grad.chunk(size)[rank], "second order")


def test_gradients_of_gradients_are_right(ranks):
    ranks(2).run(penalised)


def bf16_input() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = SyncBatchNorm(4)(x.chunk(dist.get_world_size())[dist.get_rank()])
    truth = nn.BatchNorm1d(4)(x.float()).chunk(dist.get_world_size())[dist.get_rank()]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), truth, rtol=2**-8, atol=1e-6)


def test_bf16_input_has_fp32_statistics(ranks):
    ranks(2).run(bf16_input)


def converted() -> None:
    inner = nn.BatchNorm2d(3, eps=0.1, momentum=0.3)
    net = nn.Sequential(inner, nn.Sequential(nn.Conv2d(3, 3, 1), inner), nn.LayerNorm(4)).eval()
    names, parameters = list(net.state_dict()), list(net.parameters())
    sync = convert_sync_batchnorm(net)
    assert sync is net and net[0] is net[1][1], "a module used twice stays one"
    assert list(net.state_dict()) == names
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert (net[0].eps, net[0].momentum, net[0].training) == (0.1, 0.3, False)
    group = dist.new_group([0, 1])
    alone = convert_sync_batchnorm(nn.BatchNorm1d(2), group)
    assert alone.process_group is group and copy.deepcopy(alone).process_group is group
    back = pickle.loads(pickle.dumps(alone))  # noqa: S301
    x = torch.full((1, 2), float(dist.get_rank()))
    torch.testing.assert_close(back(x), alone(x))
    with pytest.raises(ValueError, match="batch norm over 0 value"):
        alone(x[:0])
    with pytest.raises(ValueError, match="expected at least 2D"):
        alone(x[0])


def test_conversion_keeps_names_parameters_and_settings(ranks):
    ranks(2).run(converted)
