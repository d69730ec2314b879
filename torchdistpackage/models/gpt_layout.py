"""A GPT as numbers: its pieces, how each parameter is cut, what each piece costs. No torch.

One rule: the modules in gpt.py and a plan on a laptop read the same functions. Names are
global, `blocks.3.mlp.up.weight`, and do not depend on how the model is cut into stages. The
pieces, in order, are what a pipeline may be cut between: embed, the two halves of each block, head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor.layouts import Layouts, heads_per_rank, prefixed

EMBED, HEAD = "embed", "head"
ATTENTION, MLP = "attention", "mlp"
HALVES = (ATTENTION, MLP)
"""Of a block, each with the norm before it: between them travels what travels between blocks."""
TIED = "embed.weight"
"""Global name of the one weight that embedding and output head share when tied."""


@dataclass(frozen=True, slots=True)
class GPTShape:
    """Everything about a GPT that decides a tensor's size or place.

    vocab: number of token ids. tied: embedding and output head share one weight.
    seq_len: the longest sequence, in tokens; a learned position table has that many rows.
    sequence_parallel: activations between the tensor-parallel products are cut along the sequence.

    Raises:
        LayoutError: the heads do not divide dim, or rotary positions get heads of odd width.
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

    def __post_init__(self) -> None:
        heads_per_rank(self.dim, self.heads, 1, "gpt")
        if self.position == "rotary" and self.head_dim % 2:
            raise LayoutError(
                f"gpt: {self.heads} heads of dim {self.dim} are {self.head_dim} wide, but rotary "
                f"positions turn channels in pairs; use heads of even width, or learned positions"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Width of the MLP: dim * mlp_ratio, to the nearest whole number."""
        return max(round(self.dim * self.mlp_ratio), 1)


def pieces(shape: GPTShape) -> tuple[str, ...]:
    """Names of what a pipeline may be cut between, first to last."""
    blocks = (f"blocks.{index}.{half}" for index in range(shape.layers) for half in HALVES)
    return (EMBED, *blocks, HEAD)


def module_of(piece: str) -> str:
    """Name of the module that holds a piece: a block holds both its halves."""
    return piece if piece in (EMBED, HEAD) else piece.rpartition(".")[0]


def piece_layouts(shape: GPTShape, piece: str, axis: str = "tensor") -> Layouts:
    """Layouts of one piece, by name inside its module. A tied head lists its weight like any
    other."""
    if piece == EMBED:
        learned = shape.position == "learned"
        return embed(shape, axis) | (position(shape, axis) if learned else {})
    if piece == HEAD:
        return prefixed("norm", norm(shape, axis)) | embed(shape, axis)
    dim, sequence_parallel = shape.dim, shape.sequence_parallel
    if piece.endswith(ATTENTION):
        return {
            **prefixed("norm1", norm(shape, axis)),
            **prefixed("attention", cut.attention(dim, True, axis, sequence_parallel)),
        }
    return {
        **prefixed("norm2", norm(shape, axis)),
        **prefixed("mlp", cut.mlp(dim, shape.hidden, True, axis, sequence_parallel)),
    }


def embed(shape: GPTShape, axis: str) -> Layouts:
    return cut.vocab_embedding(shape.vocab, shape.dim, axis)


def position(shape: GPTShape, axis: str) -> Layouts:
    return cut.position(shape.seq_len, shape.dim, axis, shape.sequence_parallel)


def norm(shape: GPTShape, axis: str) -> Layouts:
    return cut.norm(shape.dim, True, axis, shape.sequence_parallel)


def layouts(
    shape: GPTShape, stage_of: Sequence[int] | None = None, axis: str = "tensor"
) -> dict[str, Layout]:
    """Every parameter's layout by global name, in the order of the pieces.

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
        held = prefixed(module_of(piece), piece_layouts(shape, piece, axis))
        for name, layout in held.items():
            result[name] = replace(layout, stages=stages)
    if shape.tied:
        head = result.pop("head.weight")
        result[TIED] = result[TIED].on(*result[TIED].stages, *head.stages)
    return result


def piece_parameters(shape: GPTShape) -> tuple[int, ...]:
    """Number of parameters of each piece, whole; a tied weight counts with the embedding."""
    counts = [
        sum(math.prod(layout.shape) for layout in piece_layouts(shape, piece).values())
        for piece in pieces(shape)
    ]
    counts[-1] -= shape.vocab * shape.dim if shape.tied else 0
    return tuple(counts)


def piece_costs(shape: GPTShape) -> tuple[float, ...]:
    """Floating-point operations of each piece's forward, per token, at full sequence length.

    A multiply-add is two. Counted are the matrix products and, in attention, those of scores and
    values over the whole sequence, causal or not (as in PaLM, arXiv:2204.02311, appendix B).
    """
    attention = 8.0 * shape.dim * shape.dim + 4.0 * shape.seq_len * shape.dim
    mlp = 4.0 * shape.dim * shape.hidden
    return (0.0, *((attention, mlp) * shape.layers), 2.0 * shape.dim * shape.vocab)


BACKWARD_PER_FORWARD = 2.0
"""Each product has two gradients."""


def flops_per_token(shape: GPTShape) -> float:
    """Floating-point operations of forward and backward for one token of a full sequence; what MFU
    divides by. Work that recomputation repeats is not counted: it does not train."""
    return (1 + BACKWARD_PER_FORWARD) * sum(piece_costs(shape))
