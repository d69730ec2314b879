"""A GPT as numbers: its pieces, and the split of each parameter. No torch.

The modules in gpt.py and a plan use the same functions. Names are global, such as
`blocks.3.mlp.up.weight`, and do not depend on the stages. A pipeline may be cut between any two
pieces, which are in order: embed, the two halves of each block, head.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import join
from torchdistpackage.layout.moe import MoEShape, shape_of_options
from torchdistpackage.layout.partition import attention_problems, feature_problems, refuse
from torchdistpackage.layout.rope import UNSCALED, Rope, scaled_length
from torchdistpackage.parallel.expert import shape as mixtures
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.layouts import Layouts, prefixed

EMBED, HEAD = "embed", "head"
ATTENTION, MLP = "attention", "mlp"
MIXTURE = "mixture"
"""The kind of an MLP that is a mixture of experts; other pieces are called like their kind."""
HALVES = (ATTENTION, MLP)
"""The two halves of a block, each with the norm before it. A pipeline may cut between them, because
the same activations pass there as between blocks."""
TIED = "embed.weight"
"""Global name of the one weight that embedding and output head share when tied."""


@dataclass(frozen=True, slots=True)
class GPTShape:
    """All sizes and options that determine a GPT, except its weights.

    vocab: number of token ids. tied: embedding and output head share one weight. seq_len: the
    longest sequence that is trained on, in tokens. max_seq_len: rows of a learned position table;
    None: seq_len. mlp_hidden: width of the MLP; None: dim * mlp_ratio, to the nearest integer.
    kv_heads: heads of keys and values, each for heads / kv_heads query heads; None: heads.
    head_width: channels of a head; None: dim / heads. mlp: activation between its two products, or
    swiglu: down(silu(gate(x)) * up(x)). attention_bias, mlp_bias: whether these products have
    biases. sequence_parallel: activations between the tensor-parallel products are cut along the
    sequence. moe: of every `moe_every`-th block, from block `moe_first` on, in place of its MLP.

    Raises:
        LayoutError: lists every size that does not fit the others, with the nearest that do.
    """

    layers: int
    dim: int
    heads: int
    vocab: int
    seq_len: int
    mlp_ratio: float = 4.0
    tied: bool = True
    position: Literal["rotary", "learned"] = "rotary"
    norm_eps: float = 1e-5
    sequence_parallel: bool = False
    kv_heads: int | None = None
    head_width: int | None = None
    mlp_hidden: int | None = None
    max_seq_len: int | None = None
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    attention_bias: bool = True
    mlp_bias: bool = True
    rope: Rope = UNSCALED
    moe: MoEShape | None = None
    moe_every: int = 1
    moe_first: int = 0

    def __post_init__(self) -> None:
        check_split(self, 1)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.head_width or self.dim // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        """Width of the MLP."""
        return self.mlp_hidden or max(round(self.dim * self.mlp_ratio), 1)

    def moe_of(self, block: int) -> MoEShape | None:
        """Return the mixture of experts of a block, or None if it has an MLP."""
        since = block - self.moe_first
        return self.moe if since >= 0 and since % self.moe_every == 0 else None

    @property
    def num_positions(self) -> int:
        """Rows of a learned position table, and the longest sequence that the model is made for."""
        return self.max_seq_len or self.seq_len

    @property
    def longest_seq_len(self) -> int:
        """Longest sequence that its positions support, with their scaling."""
        rope = self.rope
        return scaled_length(self.num_positions, rope.factor, rope.original_max_position_embeddings)


def shape_of_section(section: Mapping[str, Any], seq_len: int, sequence_parallel: bool) -> GPTShape:
    """Return the shape that the keys of a model section describe; keys left out have their
    defaults.

    Raises:
        LayoutError: the sizes do not fit each other.
    """
    names = {field.name for field in fields(GPTShape)} & section.keys() - {"rope", "moe"}
    shape = GPTShape(
        **{name: section[name] for name in names},
        head_width=section.get("head_dim"),
        rope=Rope(**section.get("rope", {})),
        seq_len=seq_len,
        sequence_parallel=sequence_parallel,
    )
    mixture: Mapping[str, Any] = section.get("moe") or {}
    if mixture.get("num_experts") is None:
        return shape
    same = {"hidden": mixture["hidden"] or shape.hidden, "bias": shape.mlp_bias}
    moe = shape_of_options({**mixture, **same, "gated": shape.mlp == "swiglu"})
    return replace(shape, moe=moe, moe_every=mixture["every"], moe_first=mixture["first"])


def check_split(shape: GPTShape, num_ranks: int) -> None:
    """Check that the sizes fit each other, and that `num_ranks` tensor ranks can share them.

    Raises:
        LayoutError: lists every size that does not fit, with the nearest that do.
    """
    problems = attention_problems(
        shape.dim, shape.heads, num_ranks, shape.kv_heads, shape.head_width
    )
    if not problems and shape.position == "rotary" and shape.head_dim % 2:
        problems.append(
            f"{shape.heads} heads of dim {shape.dim} are {shape.head_dim} wide, but rotary "
            f"positions turn channels in pairs; use heads of even width, or learned positions"
        )
    problems += feature_problems("the MLP", shape.hidden, num_ranks)
    problems += [] if shape.moe is None else shape.moe.check_split(1, num_ranks)
    if shape.position == "learned" and shape.seq_len > shape.num_positions:
        problems.append(
            f"sequences of {shape.seq_len} tokens, but positions are learned for "
            f"{shape.num_positions}; use a seq_len of {shape.num_positions} or less"
        )
    refuse("gpt", problems)


def pieces(shape: GPTShape) -> tuple[str, ...]:
    """Return the names of the pieces that a pipeline may be cut between, first to last."""
    blocks = (f"blocks.{index}.{half}" for index in range(shape.layers) for half in HALVES)
    return (EMBED, *blocks, HEAD)


def module_of(piece: str) -> str:
    """Return the name of the module that holds a piece; a block holds both of its halves."""
    return piece if piece in (EMBED, HEAD) else piece.rpartition(".")[0]


def piece_layouts(shape: GPTShape, piece: str, axis: str = "tensor") -> Layouts:
    """Return the layouts of one piece, by name inside its module. A tied head lists its weight like
    any other.
    """
    return dict(kind_layouts(shape, kind_of(shape, piece), axis))


def kind_of(shape: GPTShape, piece: str) -> str:
    """Return the kind of a piece; all pieces of a kind have the same layouts."""
    half = piece.rpartition(".")[2]
    is_mixture = half == MLP and shape.moe_of(int(piece.split(".")[1])) is not None
    return MIXTURE if is_mixture else half


@lru_cache(maxsize=256)
def kind_layouts(shape: GPTShape, kind: str, axis: str = "tensor") -> Mapping[str, Layout]:
    """Return the layouts of a kind of pieces, built once for all of them."""
    dim, sequence_parallel = shape.dim, shape.sequence_parallel
    norm = cut.norm(dim, shape.norm == "layer", axis, sequence_parallel)
    if kind == EMBED:
        learned = shape.position == "learned"
        rows = cut.position(shape.num_positions, dim, axis, sequence_parallel) if learned else {}
        return embed(shape, axis) | rows
    if kind == HEAD:
        return prefixed("norm", norm) | embed(shape, axis)
    if kind == ATTENTION:
        sizes = shape.heads, shape.kv_heads, shape.head_width
        attention = cut.attention(dim, shape.attention_bias, axis, sequence_parallel, *sizes)
        return prefixed("norm1", norm) | prefixed("attention", attention)
    gated = shape.mlp == "swiglu"
    if kind == MIXTURE:
        assert shape.moe is not None
        mixture = mixtures.layouts(shape.moe, dim, axis, sequence_parallel)
        return prefixed("norm2", norm) | prefixed("mlp", mixture)
    mlp = cut.mlp(dim, shape.hidden, shape.mlp_bias, axis, sequence_parallel, gated)
    return prefixed("norm2", norm) | prefixed("mlp", mlp)


def embed(shape: GPTShape, axis: str) -> Layouts:
    return cut.vocab_embedding(shape.vocab, shape.dim, axis)


def layouts(
    shape: GPTShape, stage_of: Sequence[int] | None = None, axis: str = "tensor"
) -> dict[str, Layout]:
    """Return every parameter's layout by global name, in the order of the pieces.

    stage_of: for each piece the index along pipe of the ranks that hold it; None: no pipeline,
        every rank holds all. A tied weight is listed once, `embed.weight`, with both stages.

    Raises:
        LayoutError: stage_of does not give one stage a piece.
    """
    names = pieces(shape)
    if stage_of is not None and len(stage_of) != len(names):
        raise LayoutError(
            f"gpt: stage_of gives {len(stage_of)} stages for the {len(names)} pieces of a model "
            f"of {shape.layers} layers; give one a piece: {', '.join(names[:3])}, ..., {names[-1]}"
        )
    result: dict[str, Layout] = {}
    for index, piece in enumerate(names):
        stages = () if stage_of is None else (stage_of[index],)
        module = module_of(piece)
        for name, layout in piece_layouts(shape, piece, axis).items():
            path = join(module, layout.name)
            result[join(module, name)] = replace(layout, name=path, stages=stages)
    if shape.tied:
        head = result.pop("head.weight")
        result[TIED] = result[TIED].on(*result[TIED].stages, *head.stages)
    return result


def piece_parameters(shape: GPTShape) -> tuple[int, ...]:
    """Return the number of parameters of each complete piece; a tied weight counts with the
    embedding.
    """
    counts = [
        sum(math.prod(layout.shape) for layout in piece_layouts(shape, piece).values())
        for piece in pieces(shape)
    ]
    counts[-1] -= shape.vocab * shape.dim if shape.tied else 0
    return tuple(counts)
