"""A GPT over tensor ranks and stages equals one process, which equals plain torch.

In float64: logits, loss and every gradient. The plain model below shares no code with ours.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.comm.random import seed_rank
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import DataError, LayoutError
from torchdistpackage.layout.derive import blocks, chunk, local_shape
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.registry import model
from torchdistpackage.parallel.tensor.collect import collect
from torchdistpackage.parallel.tensor.init import Initial, collect_initials, initialize
from torchdistpackage.parallel.tensor.layouts import prefixed
from torchdistpackage.topology.mesh import Mesh

S, B = 8, 3
SHAPE = GPTShape(layers=2, dim=16, heads=4, vocab=13, seq_len=10, mlp_ratio=1.5)
SHAPES = {
    f"{position}, {'tied' if tied else 'untied'}": replace(SHAPE, tied=tied, position=position)
    for position in ("rotary", "learned")
    for tied in (True, False)
}
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
RANDOM = Initial("normal", 0.3)


def sample() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(SHAPE.vocab, (B, S + 1), generator=draw)
    targets = ids[:, 1:].clone()
    targets[0, 2:4] = -100
    return ids[:, :-1], targets


def make(shape: GPTShape, *, alone: bool = False, **options) -> GPT:
    """A model with random numbers everywhere, the same under every layout."""
    group = tpc.groups.of([tpc.rank]) if alone else None
    net = GPT(shape, group=group, dtype=torch.float64, **options)
    layouts = collect(net)
    mesh, rank = (Mesh(()), 0) if alone else (tpc.topology.dense, tpc.rank)
    initialize(net, layouts, mesh, rank, 9, dict.fromkeys(layouts, RANDOM))
    return net


def step(net: GPT) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    ids, targets = sample()
    logits = net(ids)
    loss, count = net.loss(logits, targets)
    assert count == B * S - 2
    loss.backward()
    return logits, loss, {name: p.grad for name, p in net.named_parameters()}


class PlainBlock(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)


class Plain(nn.Module):
    """Batch first, one head at a time, rotations as complex numbers."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        if shape.position == "learned":
            self.position = nn.Embedding(shape.seq_len, shape.dim)
        hidden = int(shape.dim * shape.mlp_ratio)
        self.blocks = nn.ModuleList(PlainBlock(shape.dim, hidden) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        if self.shape.position == "learned":
            x = x + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            q, k, v = block.qkv(block.norm1(x)).split(self.shape.dim, -1)
            width = self.shape.dim // self.shape.heads
            pieces = zip(q.split(width, -1), k.split(width, -1), v.split(width, -1), strict=True)
            x = x + block.out(torch.cat([self.attend(*piece) for piece in pieces], -1))
            x = x + block.down(F.gelu(block.up(block.norm2(x))))
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.shape.position == "rotary":
            q, k = self.turn(q), self.turn(k)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v

    def turn(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(half) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
        return torch.cat((turned.real, turned.imag), -1)


def check_against_plain(shape: GPTShape) -> None:
    tpc.setup_process_groups([("tensor", 1)])
    torch.set_default_dtype(torch.float64)
    net, plain = make(shape), Plain(shape)
    names = {
        name.replace("attention.", "").replace("mlp.", "").replace("head.norm", "norm"): name
        for name, _ in net.named_parameters()
    }
    names = {("position.weight" if n == "embed.position" else n): name for n, name in names.items()}
    parameters = dict(plain.named_parameters())
    assert parameters.keys() == names.keys()
    ours = dict(net.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(ours[names[name]])
    expected, expected_loss = plain(*sample())
    expected_loss.backward()
    logits, loss, grads = step(net)
    torch.testing.assert_close(logits.transpose(0, 1), expected, **CLOSE)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    for name, parameter in parameters.items():
        torch.testing.assert_close(grads[names[name]], parameter.grad, **CLOSE)


@pytest.mark.parametrize("kind", SHAPES)
def test_one_process_equals_plain_torch(ranks, kind):
    ranks(1).run(check_against_plain, SHAPES[kind])


def check_against_one(world, shape: GPTShape) -> None:
    tpc.setup_process_groups(list(world))
    mesh, group = tpc.topology.dense, tpc.get_group("tensor")
    expected, expected_loss, whole = step(make(shape, alone=True))
    net = make(shape)
    logits, loss, grads = step(net)
    start, width = chunk(shape.vocab, group.size(), group.rank())
    torch.testing.assert_close(logits, expected[..., start : start + width], **CLOSE)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    layouts = net.layouts()
    assert grads.keys() == whole.keys() == layouts.keys()
    for name, grad in grads.items():
        for at, local in blocks(layouts[name], mesh, tpc.rank):
            torch.testing.assert_close(grad[local], whole[name][at], **CLOSE)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize(
    ("world", "kind"),
    [((("tensor", 2),), kind) for kind in SHAPES]
    + [((("tensor", 2), ("data", 2)), "rotary, tied"), ((("tensor", 4),), "learned, untied")],
    ids=str,
)
def test_tensor_ranks_equal_one_process(ranks, world, kind, sequence_parallel):
    shape = replace(SHAPES[kind], sequence_parallel=sequence_parallel)
    ranks(Mesh(world).size).run(check_against_one, world, shape)


def check_stages(shape: GPTShape, stage_of: tuple[int, ...]) -> None:
    """All stages in one process, one after the other, over the same tensor ranks."""
    tpc.setup_process_groups([("tensor", 2)])
    expected, _, whole = step(make(shape))
    runs = [range(stage_of.index(s), stage_of.index(s) + stage_of.count(s)) for s in (0, 1, 2)]
    runs.insert(2, range(0))
    stages = [make(shape, pieces=run, stage_of=stage_of) for run in runs]
    x, targets = sample()
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, expected, **CLOSE)
    stages[-1].loss(x, targets)[0].backward()

    table = gpt_layout.layouts(shape, stage_of)
    total: dict[str, Tensor] = {}
    for index, stage in zip((0, 1, None, 2), stages, strict=True):
        for name, layout in stage.layouts().items():
            assert layout == table[layout.name]
            assert index in layout.stages
            grad = stage.get_parameter(name).grad
            total[layout.name] = total.get(layout.name, 0) + grad
    assert total.keys() == table.keys()
    for name, grad in total.items():
        torch.testing.assert_close(grad, whole[name], **CLOSE)


@pytest.mark.parametrize("kind", SHAPES)
def test_stages_in_a_row_equal_the_whole(ranks, kind):
    shape = replace(SHAPES[kind], sequence_parallel=True)
    ranks(2).run(check_stages, shape, (0, 0, 1, 1, 1, 2))


def check_tying() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    net = make(SHAPE)
    assert net.head.weight is net.embed.weight
    first, last = (
        make(SHAPE, pieces=run, stage_of=(0, 0, 0, 1, 1, 1)) for run in (range(3), range(3, 6))
    )
    assert torch.equal(first.embed.weight, last.head.weight)
    assert last.layouts()["head.weight"].name == "embed.weight"
    assert last.layouts()["head.weight"].stages == (0, 1)
    twin = copy.deepcopy(net)
    assert twin.head.weight is twin.embed.weight
    assert twin.embed.weight is not net.embed.weight


def test_a_tied_weight_is_one_parameter_or_two_equal_ones(ranks):
    ranks(2).run(check_tying)


def check_layouts(shape: GPTShape) -> None:
    """The modules' own layouts, put together, are the pure table."""
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    net = GPT(shape, device="meta")
    parts = {"embed": net.embed, "head": net.head}
    parts |= {f"blocks.{index}": block for index, block in net.blocks.items()}
    own = {}
    for prefix, part in parts.items():
        own |= prefixed(prefix, collect(part))
    if shape.tied:
        del own["head.weight"]
    assert own == gpt_layout.layouts(shape) == collect(net)
    for name, parameter in net.named_parameters():
        assert parameter.shape == local_shape(own[name], tpc.topology.dense, tpc.rank)
    assert collect_initials(net).keys() == own.keys()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("kind", SHAPES)
def test_modules_hold_what_the_pure_table_says(ranks, kind, sequence_parallel):
    ranks(4).run(check_layouts, replace(SHAPES[kind], sequence_parallel=sequence_parallel))


def residual_masks(sequence_parallel: bool) -> list[bool]:
    """Where the embedding's dropout strikes, and that recomputation strikes the same places."""
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    seed_rank(1, tpc.topology.dense, tpc.rank)
    net = make(replace(SHAPE, sequence_parallel=sequence_parallel), dropout=0.3)
    ids, _ = sample()
    results = []
    for recompute in (False, True):
        seed_rank(2, tpc.topology.dense, tpc.rank)
        x = net.embed(ids)
        for block in net.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        net.zero_grad()
        x.square().sum().backward()
        results.append([x.detach(), *(p.grad for p in net.blocks.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    seed_rank(2, tpc.topology.dense, tpc.rank)
    return (net.embed(ids) == 0).flatten().tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_dropout_over_tensor_ranks_and_recomputation(ranks, sequence_parallel):
    one, other, third, _ = ranks(4).run(residual_masks, sequence_parallel)
    assert (one != other) == sequence_parallel
    assert one != third


def refuse_mistakes() -> None:
    net = model("gpt").load()(replace(SHAPE, position="learned"), dtype=torch.float64)
    assert isinstance(net, GPT)
    with pytest.raises(DataError, match=r"a sequence of 11 tokens, but positions .* for 10"):
        net(torch.zeros(1, 11, dtype=torch.int64))
    with pytest.raises(LayoutError, match=r"range\(2, 8\) is no run of the 6 pieces"):
        GPT(SHAPE, pieces=range(2, 8))
    with pytest.raises(LayoutError, match="2 heads, which 4 tensor ranks cannot share"):
        GPT(replace(SHAPE, heads=2))


def test_mistakes_are_named(ranks):
    ranks(4).run(refuse_mistakes)
