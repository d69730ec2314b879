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

from tests.each import each
from tests.tells import facts_pattern
from torchdistpackage.comm.random import seed_rank
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import DataError, LayoutError
from torchdistpackage.layout.derive import blocks, even_share, local_shape
from torchdistpackage.layout.mark import collect
from torchdistpackage.layout.rope import Rope
from torchdistpackage.lazy import resolve
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.registry import model
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
SHAPES["rms, no biases"] = replace(
    SHAPE,
    tied=False,
    norm="rms",
    norm_eps=1e-2,
    mlp="gelu_tanh",
    mlp_hidden=20,
    attention_bias=False,
    mlp_bias=False,
    rope=Rope(theta=50.0),
)
LLAMA = replace(SHAPES["rms, no biases"], kv_heads=2, head_width=6, mlp="swiglu")
SHAPES["llama"] = LLAMA
SHAPES["one kv head, tied"] = replace(LLAMA, kv_heads=1, tied=True, attention_bias=True)
SHAPES["learned, more positions"] = replace(SHAPE, position="learned", max_seq_len=12)
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
    def __init__(self, shape: GPTShape):
        super().__init__()
        dim, bias = shape.dim, shape.attention_bias
        self.norm1, self.norm2 = plain_norm(shape), plain_norm(shape)
        width = shape.head_width or dim // shape.heads
        q, kv = shape.heads * width, (shape.kv_heads or shape.heads) * width
        if q == kv:
            self.qkv = nn.Linear(dim, q + 2 * kv, bias)
        else:
            self.q, self.kv = nn.Linear(dim, q, bias), nn.Linear(dim, 2 * kv, bias)
        self.out = nn.Linear(q, dim, bias)
        hidden = shape.mlp_hidden or int(dim * shape.mlp_ratio)
        if shape.mlp == "swiglu":
            self.gate_up = nn.Linear(dim, 2 * hidden, shape.mlp_bias)
        else:
            self.up = nn.Linear(dim, hidden, shape.mlp_bias)
        self.down = nn.Linear(hidden, dim, shape.mlp_bias)


def plain_norm(shape: GPTShape) -> nn.Module:
    return (nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm)(shape.dim, shape.norm_eps)


class Plain(nn.Module):
    """Batch first, one head at a time, rotations as complex numbers."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        if shape.position == "learned":
            self.position = nn.Embedding(shape.max_seq_len or shape.seq_len, shape.dim)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = plain_norm(shape)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        if self.shape.position == "learned":
            x = x + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            q, k, v = self.heads(block, block.norm1(x))
            shared = len(q) // len(k)
            mixed = [self.attend(x, k[i // shared], v[i // shared]) for i, x in enumerate(q)]
            x = x + block.out(torch.cat(mixed, -1))
            x = x + block.down(self.activated(block, block.norm2(x)))
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def heads(self, block: PlainBlock, x: Tensor) -> list[tuple[Tensor, ...]]:
        shape = self.shape
        width = shape.head_width or shape.dim // shape.heads
        kv_heads = shape.kv_heads or shape.heads
        fused = (block.qkv(x),) if kv_heads == shape.heads else (block.q(x), block.kv(x))
        heads = torch.cat(fused, -1).split(width, -1)
        return [heads[: shape.heads], heads[shape.heads : -kv_heads], heads[-kv_heads:]]

    def activated(self, block: PlainBlock, x: Tensor) -> Tensor:
        if self.shape.mlp == "swiglu":
            gate, up = block.gate_up(x).chunk(2, -1)
            return gate * torch.sigmoid(gate) * up
        return F.gelu(block.up(x), approximate="tanh" if self.shape.mlp == "gelu_tanh" else "none")

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.shape.position == "rotary":
            q, k = self.turn(q), self.turn(k)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v

    def turn(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None] / self.shape.rope.theta ** (
            torch.arange(half) / half
        )
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


def test_one_process_equals_plain_torch(ranks):
    ranks(1).run(each, check_against_plain, [(shape,) for shape in SHAPES.values()])


def check_against_one(world, shape: GPTShape) -> None:
    tpc.setup_process_groups(list(world))
    mesh, group = tpc.topology.dense, tpc.get_group("tensor")
    expected, expected_loss, whole = step(make(shape, alone=True))
    net = make(shape)
    logits, loss, grads = step(net)
    start, width = even_share(shape.vocab, group.size(), group.rank())
    torch.testing.assert_close(logits, expected[..., start : start + width], **CLOSE)
    torch.testing.assert_close(loss, expected_loss, **CLOSE)
    layouts = net.layouts()
    assert grads.keys() == whole.keys() == layouts.keys()
    alone = dict(make(shape, alone=True).named_parameters())
    for name, parameter in net.named_parameters():
        for at, local in blocks(layouts[name], mesh, tpc.rank):
            assert torch.equal(parameter[local], alone[name][at]), name
    for name, grad in grads.items():
        for at, local in blocks(layouts[name], mesh, tpc.rank):
            torch.testing.assert_close(grad[local], whole[name][at], **CLOSE)


def both(shape: GPTShape) -> list[GPTShape]:
    """Without and with sequence parallelism."""
    return [replace(shape, sequence_parallel=sequence) for sequence in (False, True)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        ((("tensor", 2),), [*SHAPES]),
        ((("tensor", 2), ("data", 2)), ["rotary, tied"]),
        ((("tensor", 4),), ["learned, untied", "llama", "one kv head, tied"]),
        ((("tensor", 3),), ["rotary, tied"]),
        pytest.param((("tensor", 4),), [*SHAPES], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_tensor_ranks_equal_one_process(ranks, world, kinds):
    fits = [False, True] if S % dict(world)["tensor"] == 0 else [False]
    shapes = [s for kind in kinds for s in both(SHAPES[kind]) if s.sequence_parallel in fits]
    cases = [(world, shape) for shape in shapes]
    ranks(Mesh(world).size).run(each, check_against_one, cases)


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


def test_stages_in_a_row_equal_the_whole(ranks):
    shapes = [both(shape)[True] for shape in SHAPES.values()]
    ranks(2).run(each, check_stages, [(shape, (0, 0, 1, 1, 1, 2)) for shape in shapes])


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


def test_modules_hold_what_the_pure_table_says(ranks):
    ranks(4).run(each, check_layouts, [(s,) for shape in SHAPES.values() for s in both(shape)])


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
    net = resolve(model("gpt").module)(replace(SHAPE, position="learned"), dtype=torch.float64)
    assert isinstance(net, GPT)
    with pytest.raises(DataError, match=r"a sequence of 11 tokens, but positions .* for 10"):
        net(torch.zeros(1, 11, dtype=torch.int64))
    with pytest.raises(LayoutError, match=r"range\(2, 8\) is not a range within the 6 pieces"):
        GPT(SHAPE, pieces=range(2, 8))
    with pytest.raises(LayoutError, match=facts_pattern("2 heads", "4 tensor")):
        GPT(replace(SHAPE, heads=2))
    both = r"(?s)gpt: 2 problems.*2 heads, which 4 .* MLP has 3 elements, which 4 .* use 4"
    with pytest.raises(LayoutError, match=both):
        GPT(replace(SHAPE, heads=2, mlp_hidden=3))


def test_mistakes_are_named(ranks):
    ranks(4).run(refuse_mistakes)
