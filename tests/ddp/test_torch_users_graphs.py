"""What users of torch's DDP rely on, one promise a test: dtypes, graphs, compiled blocks."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ddp.against_reference import DIM, both, expect_equal, follow, part, squares
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.reference import ReferenceDDP
from torchdistpackage.ddp.sync_batch_norm import convert_sync_batchnorm

SMALL_MIB = 0.0001


class Mixed(nn.Module):
    """fp64 and fp32 layers in turn."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.float32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = torch.tanh(narrow(wide(x).float()).double())
        return x


def mixed() -> None:
    ddp, reference = both(Mixed)
    follow(ddp, reference, squares)
    assert ddp.module.narrow[0].weight.grad.dtype == torch.float32


def test_each_dtype_is_reduced_as_it_is(ranks):
    ranks(2).run(mixed)


def complex_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(DIM, DIM, dtype=torch.complex128) for _ in range(2)))


def complex_numbers() -> None:
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(torch.complex(x, x.flip(0))).abs().square().sum()

    follow(*both(complex_layers, bucket_cap_mb=SMALL_MIB), loss)


def test_complex_parameters(ranks):
    ranks(2).run(complex_numbers)


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)).double()


def penalised() -> None:
    """The norm of the gradient of the input is part of the loss, as in WGAN-GP."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        out = net(x.requires_grad_())
        (inner,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (inner.norm(dim=1) - 1).square().mean() + out.mean()

    def of_parameters(net: nn.Module, x: Tensor) -> Tensor:
        inner = torch.autograd.grad(squares(net, x), list(net.parameters()), create_graph=True)
        return sum(g.square().sum() for g in inner)

    follow(*both(smooth, bucket_cap_mb=SMALL_MIB), loss)
    follow(*both(smooth, bucket_cap_mb=SMALL_MIB), of_parameters)


def test_a_gradient_in_the_loss_is_differentiated_again(ranks):
    ranks(2).run(penalised)


def kept_graph() -> None:
    ddp, reference = both(smooth)
    for step in range(2):
        ddp.zero_grad(), reference.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch on cycles that create_graph makes
            squares(ddp, part(step)).backward(create_graph=True)
            squares(reference, part(step)).backward(create_graph=True)
        reference.average()
        expect_equal(ddp.module, reference.module)


def test_a_backward_may_create_a_graph(ranks):
    ranks(2).run(kept_graph)


class Checkpointed(nn.Module):
    """Two blocks recomputed in the backward, one of them in two places, and a head."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for i in (0, 1, 0):
            x = torch.tanh(checkpoint(self.blocks[i], x, use_reentrant=self.reentrant))
        return self.head(x)


def checkpointed(reentrant: bool) -> None:
    ddp, reference = both(lambda: Checkpointed(reentrant).double(), bucket_cap_mb=SMALL_MIB)
    follow(ddp, reference, squares)


def test_reentrant_checkpointing(ranks):
    ranks(2).run(checkpointed, True)


def test_non_reentrant_checkpointing(ranks):
    ranks(2).run(checkpointed, False)


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
    ).double()


def compiled(backend: str) -> None:
    ddp, reference = both(blocks, bucket_cap_mb=SMALL_MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile on its own parts
        for block in ddp.module:
            block.compile(backend=backend)
        follow(ddp, reference, squares)


def test_blocks_may_be_compiled(ranks):
    ranks(2).run(compiled, "aot_eager")


@pytest.mark.full
def test_blocks_may_be_compiled_by_inductor(ranks):
    ranks(2).run(compiled, "inductor", timeout_s=300)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, DIM)).double()


def synchronised(part_rows: list[int]) -> None:
    """Against one process on the whole batch: the mean over ranks is that of equal parts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    one = normalised()
    ddp = NaiveDDP(convert_sync_batchnorm(copy.deepcopy(one)), reduce_op="sum")
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        ddp.zero_grad(), one.zero_grad()
        x = torch.randn(sum(part_rows[:size]), DIM, generator=draw, dtype=torch.float64)
        squares(one, x).backward()
        squares(ddp, x.split(part_rows[:size])[rank]).backward()
        expect_equal(ddp.module, one)


def test_sync_batch_norm_in_a_wrapper_is_one_process_on_the_whole_batch(ranks):
    ranks(3).run(synchronised, [4, 2, 3])


class TwoExperts(NaiveDDP):
    """Experts are shared by every other rank only."""

    def __init__(self, net: nn.Module, pairs: list):
        self.pairs = pairs
        super().__init__(net)

    def _get_group(self, name: str, parameter: nn.Parameter):
        expert = name.startswith("expert")
        return self.pairs[dist.get_rank() % 2] if expert else super()._get_group(name, parameter)


def per_parameter_groups() -> None:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(dist.get_rank())
    net = nn.ModuleDict({"shared": nn.Linear(DIM, DIM), "expert": nn.Linear(DIM, DIM)}).double()
    net.forward = lambda x: net["expert"](torch.tanh(net["shared"](x)))
    truth = copy.deepcopy(net)
    truth.forward = lambda x: truth["expert"](torch.tanh(truth["shared"](x)))
    ddp = TwoExperts(net, pairs)
    whole = ReferenceDDP(truth["shared"])
    experts = ReferenceDDP(truth["expert"], pairs[dist.get_rank() % 2])
    for step in range(3):
        ddp.zero_grad(), truth.zero_grad()
        squares(ddp, part(step)).backward()
        squares(truth, part(step)).backward()
        whole.average(), experts.average()
        expect_equal(net, truth)


def test_experts_are_averaged_over_groups_of_their_own(ranks):
    ranks(4).run(per_parameter_groups)


def compiled_whole() -> None:
    ddp, reference = both(blocks, bucket_cap_mb=SMALL_MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile on its own parts
        ddp.compile(backend="eager")
        follow(ddp, reference, squares)


@pytest.mark.full
def test_the_wrapper_may_be_compiled_with_its_module(ranks):
    ranks(2).run(compiled_whole)
