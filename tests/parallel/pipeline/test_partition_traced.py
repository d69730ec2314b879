"""Models that are no chain: a cut through residuals, and the ResNet of the pipeline page."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tells import facts_pattern
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.fx_split import split_traced
from torchdistpackage.parallel.pipeline.partition.policies import (
    partition_by_time,
    partition_uniform,
)
from torchdistpackage.parallel.pipeline.partition.sequential import flatten_model
from torchdistpackage.parallel.pipeline.pipeline import Pipeline


class BasicBlock(nn.Module):
    """Two convolutions and a way round them, as in ResNet-18; activations change in place."""

    def __init__(self, before: int, width: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """torchvision's names, 8 and 16 channels."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


NAMES = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "avgpool"]


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet().double()


def images() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, 12, 12, generator=draw, dtype=torch.float64), torch.arange(8)


def stages_in_a_row(stages, *given):
    """Each stage gets leaves, as from a message; gradients go back by hand."""
    x, boundaries = stages[0](*given), []
    for stage in stages[1:]:
        sent = x if isinstance(x, dict) else {"": x}
        room = {k: v.detach().requires_grad_(v.is_floating_point()) for k, v in sent.items()}
        boundaries.append((sent, room))
        handed = {k: v.clone() for k, v in room.items()}  # may be changed in place
        x = stage(handed if isinstance(x, dict) else handed[""])
    x.backward()
    for sent, room in reversed(boundaries):
        ends = [k for k, v in sent.items() if v.requires_grad]
        torch.autograd.backward([sent[k] for k in ends], [room[k].grad for k in ends])
    return x.detach()


class WithLoss(nn.Module):
    """Targets go past all stages but the last; a parameter is used by itself."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = resnet(), nn.Parameter(torch.ones(10, dtype=torch.float64))

    def forward(self, x, targets):
        return F.cross_entropy(self.net(x) * self.scale, targets)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_a_traced_model_in_stages_is_the_model(num_stages):
    whole, (x, targets) = WithLoss(), images()
    stages = split_traced(whole, (x[:2], targets[:2]), range(num_stages), rounds=1)
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(held) == sorted(name for name, _ in whole.named_parameters())
    expected = copy.deepcopy(whole)
    loss = expected(x, targets)
    loss.backward()
    assert torch.equal(stages_in_a_row(stages, x, targets), loss)
    known = dict(whole.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(known[name].grad, parameter.grad, rtol=0, atol=1e-14)


class UsesTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        return self.c(self.a(self.b(self.a(x))))


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_what_shares_a_parameter_stays_together():
    stages = split_traced(UsesTwice(), (torch.ones(1, 2),), range(2), rounds=1)
    assert [name for name, _ in stages[1].named_parameters()] == ["c.weight", "c.bias"]
    with pytest.raises(ScheduleError, match=facts_pattern("UsesTwice", "1 places", "3")):
        split_traced(UsesTwice(), (torch.ones(1, 2),), range(3), rounds=1)


def test_what_cannot_be_traced_is_refused_with_the_reason():
    with pytest.raises(ScheduleError, match=r"Branches cannot be traced .*control flow.*`leaves`"):
        split_traced(Branches(), (torch.ones(2),), range(2))
    model = nn.Sequential(Branches(), Branches())
    stages = split_traced(model, (torch.ones(2),), range(2), leaves=[Branches], rounds=1)
    assert [len(list(s.modules())) for s in stages] == [2, 2]


def trained(cut: str) -> None:
    """Three steps of the page's loop, beside one process that runs the same microbatches."""
    rank, p = dist.get_rank(), dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    whole, (x, targets), m = resnet(), images(), 4
    if cut == "by time":
        stage = partition_by_time(resnet(), x[:2], rounds=1)
    else:
        names = [*NAMES, lambda x: torch.flatten(x, 1), "fc"]
        stage = nn.Sequential(*partition_uniform(flatten_model(resnet(), names, return_list=True)))
    # by time, on a busy machine, a stage may be nothing but a pooling
    own = list(stage.parameters()) or [nn.Parameter(torch.zeros(()))]
    mine = torch.optim.SGD(own, lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)

    pipe = Pipeline(stage, loss=F.cross_entropy, num_microbatches=m)
    for _ in range(3):
        mine.zero_grad()
        loss = pipe.step(x, targets=targets)
        mine.step()
        theirs.zero_grad()
        losses = [
            F.cross_entropy(whole(a), b) for a, b in zip(x.chunk(m), targets.chunk(m), strict=True)
        ]
        expected = torch.stack(losses).mean()
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    stage.eval()
    output = pipe.predict(x)
    if rank == p - 1:
        torch.testing.assert_close(output, whole.eval()(x), rtol=0, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("cut", ["by time", "by names"])
def test_a_resnet_in_stages_trains_as_one_piece_does(ranks, cut):
    ranks(3).run(trained, cut)
