"""A user's own model, split over data, context and tensor by hand, and mistakes to plant in it."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchdistpackage import NaiveDDP, comm, tpc
from torchdistpackage.ddp.param_spec import batch_group
from torchdistpackage.testing import ParityModel

VOCAB, DIM, HIDDEN, LENGTH, BATCH, IGNORED = 12, 16, 32, 8, 8, -100


def own(x: Tensor, axis: str, dim: int) -> Tensor:
    """This rank's part of what all ranks of an axis hold."""
    return x.chunk(tpc.get_group_size(axis), dim)[tpc.get_group_rank(axis)].clone()


class Positions(nn.Module):
    def __init__(self, wrong: str):
        super().__init__()
        self.table, self.wrong = nn.Parameter(torch.randn(LENGTH, DIM)), wrong

    def forward(self, x: Tensor) -> Tensor:
        at = 0 if self.wrong == "positions" else tpc.get_group_rank("context") * x.shape[1]
        return x + self.table[at : at + x.shape[1]]


class Mixer(nn.Module):
    """Each token gets the mean of those up to it, of the whole sequence."""

    def __init__(self, wrong: str):
        super().__init__()
        self.out, self.wrong = nn.Linear(DIM, DIM), wrong

    def forward(self, x: Tensor) -> Tensor:
        whole = comm.all_gather(x, 1, "context")
        if self.wrong == "gather":  # by hand, so that no gradient comes back from other ranks
            whole = comm.all_gather(x.detach(), 1, "context").clone()
            at = tpc.get_group_rank("context") * x.shape[1]
            whole[:, at : at + x.shape[1]] = x
        at = 0 if self.wrong == "mask" else tpc.get_group_rank("context") * x.shape[1]
        mask = torch.ones(LENGTH, LENGTH, dtype=x.dtype).tril()[at : at + x.shape[1]]
        return self.out(mask / mask.sum(1, keepdim=True) @ whole)


class HiddenNorm(nn.Module):
    """Divides by the root mean square over all hidden channels, of which a rank has a part."""

    def __init__(self, wrong: str):
        super().__init__()
        self.wrong = wrong

    def forward(self, h: Tensor) -> Tensor:
        if self.wrong == "norm":
            return h * torch.rsqrt(h.square().mean(-1, keepdim=True))
        total = comm.copy(comm.reduce(h.square().sum(-1, keepdim=True), "tensor"), "tensor")
        return h * torch.rsqrt(total / HIDDEN)


class Mlp(nn.Module):
    def __init__(self, wrong: str):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.up.weight = nn.Parameter(own(self.up.weight.detach(), "tensor", 0))
        self.down.weight = nn.Parameter(own(self.down.weight.detach(), "tensor", 1))
        self.bias = nn.Parameter(torch.randn(DIM))
        self.norm, self.wrong = HiddenNorm(wrong), wrong

    def forward(self, x: Tensor) -> Tensor:
        if self.wrong != "copy":
            x = comm.copy(x, "tensor")
        y = self.down(self.norm(F.gelu(self.up(x))))
        if self.wrong == "bias":
            return comm.reduce(y + self.bias, "tensor")
        return (y if self.wrong == "reduce" else comm.reduce(y, "tensor")) + self.bias


class Tracker(nn.Module):
    """Keeps the mean of what passes, over all samples."""

    def __init__(self, wrong: str):
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean((0, 1))
        if self.wrong != "buffer":
            mean = comm.all_reduce(mean, batch_group()) / batch_group().size()
        self.mean.copy_(0.9 * self.mean + 0.1 * mean)
        return x


class Layer(nn.Module):
    def __init__(self, wrong: str):
        super().__init__()
        self.norm, self.mixer, self.mlp = nn.LayerNorm(DIM), Mixer(wrong), Mlp(wrong)
        self.drop, self.track, self.wrong = nn.Dropout(0.3), Tracker(wrong), wrong

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        if self.wrong == "own lines":
            x = x * tpc.get_group_size("data")
        return self.track(x + self.drop(self.mlp(self.norm(x))))


class Net(nn.Module):
    def __init__(self, wrong: str):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), Positions(wrong)
        self.first, self.second = Layer(""), Layer(wrong)
        if wrong == "init":
            torch.manual_seed(100 + tpc.get_group_rank("tensor"))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.positions(self.embed(ids)))))


def build(wrong: str = "") -> ParityModel:
    net = Net(wrong).double()
    if wrong == "hook":
        net.second.mixer.out.weight.register_hook(lambda g: g * batch_group().size())
    if wrong == "backward":
        net.second.norm.weight.register_hook(lambda g: g * (1 + tpc.get_group_rank("data")))
    model = NaiveDDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    index = tpc.get_group_rank("data") * tpc.get_group_size("context") + tpc.get_group_rank(
        "context"
    )
    if wrong == "dropout alike":
        index = 0
    if wrong == "dropout apart":
        index += 10 * tpc.get_group_rank("tensor")
    torch.manual_seed(index)

    def step(fed: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = (own(x, "context", 1) for x in fed)
        group, size = batch_group(), batch_group().size()
        optimizer.zero_grad()
        logits = model(ids)
        lost = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        count = (targets != IGNORED).sum().double()
        if wrong == "loss":
            loss, shown = lost / count, lost.detach() / count
        else:
            count = comm.all_reduce(count, group)
            loss = size * lost / count
            shown = comm.all_reduce(lost.detach().clone(), group) / count
        loss.backward()
        optimizer.step()
        return shown

    return ParityModel(net, step)


def batch(number: int, index: int, num: int, wrong: str = "") -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
    targets = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
    targets[:3, 2:] = IGNORED  # so the ranks' counts differ
    index = 0 if wrong == "same data" else index
    return ids.chunk(num)[index], targets.chunk(num)[index]


def planted(wrong: str) -> tuple[partial, partial]:
    return partial(build, wrong), partial(batch, wrong=wrong)
