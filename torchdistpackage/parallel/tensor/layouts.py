"""The layouts of the parameters of each tensor-parallel layer: the one place that has them.

A layer's `layouts()` and a model's pure layout file both call these functions, so what a plan
counts is what the modules hold. No torch here. Weights are (Dout, Din). Names are local to the
layer; `prefixed` puts layers together.

A gradient is partial, and its layout `unreduced`, where a rank sees only its rows of a sequence:
under sequence parallelism that is every parameter applied outside the column..row pairs.
"""

from dataclasses import replace

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Axes, HeadSplit, Layout
from torchdistpackage.layout.mark import Layouts, prefixed


def column(
    dout: int,
    din: int,
    bias: bool,
    axis: str,
    parts: tuple[int, ...] = (),
    heads: HeadSplit | None = None,
) -> Layouts:
    """Return the layouts of a linear layer with a split output: weight and bias along Dout, evenly
    or not.

    parts: sizes of fused outputs (q, k, v), each of which is cut by itself. heads: that make up
    Dout, or each part, if it consists of heads.
    """
    shape, split = (dout, din), ((axis,), ())
    options = {"uneven": True, "heads": heads}
    layouts = {"weight": Layout("weight", shape, split, parts=(parts, ()), **options)}
    if bias:
        layouts["bias"] = Layout("bias", (dout,), ((axis,),), parts=(parts,), **options)
    return layouts


def row(
    dout: int,
    din: int,
    bias: bool,
    axis: str,
    sequence_parallel: bool = False,
    heads: HeadSplit | None = None,
) -> Layouts:
    """Return the layouts of a linear layer with a split input: the weight along Din, evenly or not.

    The bias is unsplit and added after the all-reduce.
    """
    options = {"uneven": True, "heads": heads}
    weight = Layout("weight", (dout, din), ((), (axis,)), **options)
    layouts = {"weight": weight}
    if bias:
        layouts["bias"] = Layout("bias", (dout,), unreduced=_partial(axis, sequence_parallel))
    return layouts


def vocab_embedding(vocab: int, dim: int, axis: str) -> Layouts:
    """Return the layouts of a table (vocab, dim) split along the vocabulary, evenly or not: an
    embedding or output head.
    """
    return {"weight": _table(vocab, dim, ((axis,), ()))}


def feature_embedding(vocab: int, dim: int, axis: str) -> Layouts:
    """Return the layouts of a table (vocab, dim) split along its features, evenly or not."""
    return {"weight": _table(vocab, dim, ((), (axis,)))}


def position(seq_len: int, dim: int, axis: str, sequence_parallel: bool) -> Layouts:
    """Return the layouts of a learned vector for each position, full on every rank."""
    partial = _partial(axis, sequence_parallel)
    return {"position": Layout("position", (seq_len, dim), unreduced=partial, is_table=True)}


def norm(dim: int, bias: bool, axis: str, sequence_parallel: bool) -> Layouts:
    """Return the layouts of the scale and shift of a norm over the last dim, unsplit on every
    rank.
    """
    names = ("weight", "bias") if bias else ("weight",)
    partial = _partial(axis, sequence_parallel)
    return {name: Layout(name, (dim,), unreduced=partial) for name in names}


def attention(
    dim: int,
    bias: bool,
    axis: str,
    sequence_parallel: bool,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    out_bias: bool | None = None,
) -> Layouts:
    """Return the layouts of fused q, k, v cut by heads (`qkv`), and of the matmul that joins the
    heads again (`out`).

    heads: default one a channel. kv_heads: where they are fewer, queries (`q`) and fused keys and
        values (`kv`) are products of their own, so that ranks that share a key-value head share
        its parameters. head_dim: default dim / heads. out_bias: default as `bias`.
    """
    heads = dim if heads is None else heads
    kv_heads = heads if kv_heads is None else kv_heads
    width = dim // heads if head_dim is None else head_dim
    query = HeadSplit(kv_heads, heads // kv_heads)
    q, kv = heads * width, kv_heads * width
    if kv_heads == heads:
        products = prefixed("qkv", column(3 * q, dim, bias, axis, (q, q, q), query))
    else:
        shared = HeadSplit(kv_heads, shared=True)
        products = {
            **prefixed("q", column(q, dim, bias, axis, heads=query)),
            **prefixed("kv", column(2 * kv, dim, bias, axis, (kv, kv), shared)),
        }
    out_bias = bias if out_bias is None else out_bias
    return products | prefixed("out", row(dim, q, out_bias, axis, sequence_parallel, query))


def mlp(
    dim: int, hidden: int, bias: bool, axis: str, sequence_parallel: bool, gated: bool = False
) -> Layouts:
    """Return the layouts of two linear layers with the hidden dim cut between them (`up`, `down`).

    gated: the first layer also makes a gate, fused with it (`gate_up`, the gate first).
    """
    up = column(hidden, dim, bias, axis)
    first = prefixed("up", up)
    if gated:
        first = prefixed("gate_up", column(2 * hidden, dim, bias, axis, (hidden, hidden)))
    return first | prefixed("down", row(dim, hidden, bias, axis, sequence_parallel))


def transposed(layouts: Layouts) -> Layouts:
    """Return the same layouts with the matrices stored as (Din, Dout)."""
    return {
        name: replace(
            layout, shape=layout.shape[::-1], split=layout.split[::-1], parts=layout.parts[::-1]
        )
        for name, layout in layouts.items()
    }


def heads_per_rank(dim: int, heads: int, num_ranks: int, where: str = "attention") -> int:
    """Return how many of the heads each of `num_ranks` tensor ranks works on.

    Raises:
        LayoutError: dim is not a multiple of the heads, or they cannot be shared evenly.
    """
    if heads < 1 or dim % heads:
        raise LayoutError(
            f"{where}: dim {dim} cannot be cut into {heads} heads of equal width; "
            f"use a dim that is a multiple of {heads}"
        )
    if heads % num_ranks:
        raise LayoutError(
            f"{where}: {heads} heads, which {num_ranks} tensor ranks cannot share evenly; "
            f"use a multiple of {num_ranks} heads, or a number of ranks that divides {heads}"
        )
    return heads // num_ranks


def _table(vocab: int, dim: int, split: tuple[Axes, ...]) -> Layout:
    return Layout("weight", (vocab, dim), split, uneven=True, is_table=True)


def _partial(axis: str, sequence_parallel: bool) -> Axes:
    return (axis,) if sequence_parallel else ()
