"""Layouts of a mixture of experts, and its messages and matmuls. No torch.

Each matrix of a layer's experts is one parameter with the expert as its first dim. That dim is cut
over the ranks of `expert`, hidden channels over those of `tensor`; lengths differ by one if they do
not divide. The router and everything shared are complete on every expert rank.
"""

from torchdistpackage.layout.balances import BALANCES
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts, prefixed
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.parallel.tensor import numbers as layer_numbers
from torchdistpackage.parallel.tensor.numbers import CallPlace, LayerNumbers, dispatch
from torchdistpackage.predict.calls import ITEM_BYTES, CallCount
from torchdistpackage.predict.kernels import Matmul

STATES = tuple(f"router.{spec.state}" for spec in BALANCES.values() if spec.state)
"""Suffixes of parameters that follow the counts of experts and get no gradient."""


def layouts(shape: MoEShape, dim: int, axis: str = "tensor", sequence_parallel: bool = False):
    """Return the layout of every parameter of a layer, by local name.

    Every rank of a tensor group routes all of its tokens identically, so the router has no partial
    sums, even if the sequence is split around the layer.
    """
    by_name: Layouts = {"router.weight": Layout("router.weight", (shape.num_experts, dim))}
    if shape.balancing.state:
        state = f"router.{shape.balancing.state}"
        by_name[state] = Layout(state, (shape.num_experts,))
    by_name |= prefixed("experts", experts_layouts(shape, dim, axis))
    if shape.shared_hidden is not None:
        sizes = dim, shape.shared_hidden, shape.bias, axis, sequence_parallel, shape.gated
        by_name |= prefixed("shared", cut.mlp(*sizes))
    if shape.shared_gate:
        partial = (axis,) if sequence_parallel else ()
        by_name["shared_gate.weight"] = Layout("shared_gate.weight", (1, dim), unreduced=partial)
    return by_name


def experts_layouts(shape: MoEShape, dim: int, axis: str = "tensor") -> Layouts:
    """Return the layouts of the experts: matrices (E, Dout, Din), biases (E, Dout)."""
    experts, hidden = shape.num_experts, shape.hidden
    first, width = ("gate_up", 2 * hidden) if shape.gated else ("up", hidden)
    parts = (hidden, hidden) if shape.gated else ()

    def layout(name: str, sizes: tuple[int, ...], split, parts=()) -> Layout:
        return Layout(
            name,
            (experts, *sizes),
            (("expert",), *split),
            parts=parts,
            view="expert",
            uneven=True,
        )

    by_name = {
        first: layout(first, (width, dim), ((axis,), ()), ((), parts, ())),
        "down": layout("down", (dim, hidden), ((), (axis,))),
    }
    if shape.bias:
        name = f"{first}_bias"
        by_name[name] = layout(name, (width,), ((axis,),), ((), parts))
        by_name["down_bias"] = layout("down_bias", (dim,), ((),))
    return by_name


def numbers(
    shape: MoEShape, place: CallPlace, cuts: Layouts, dim: int, again: bool = True
) -> LayerNumbers:
    """Return a layer's messages and matmuls if all experts are chosen equally often.

    cuts: its `layouts`. again: see `CallPlace.row`. The router decides what a rank keeps.
    """
    batch, calls = place.of, list[CallCount]()
    padded_rows = shape.padded_rows(batch.tokens, batch.samples) if batch.trains else None
    dtypes = batch.stream, batch.stream  # experts compute in the dtype of their tokens
    if batch.expert > 1:
        sizes = shape.num_experts, shape.top_k, dim
        calls += dispatch(batch, *sizes, dtypes, place.forward, padded_rows)
    if batch.tensor > 1:
        calls += place.experts(dim, shape.top_k, (*dtypes, batch.stream), again)
    hidden = layer_numbers.on_rank(cuts["experts.down"], batch)[2]
    routed = batch.rows * shape.top_k
    if padded_rows is not None:
        routed = shape.num_experts * padded_rows
    matmuls = [
        Matmul(batch.rows, shape.num_experts, dim),
        Matmul(routed, (2 if shape.gated else 1) * hidden, dim),
        Matmul(routed, dim, hidden),
    ]
    item, wide = ITEM_BYTES[batch.stream], max(ITEM_BYTES[batch.stream], 4)
    kept_bytes = {
        "scores of the router": batch.rows * (dim + 2 * shape.num_experts) * wide,
        "tokens of experts": routed * dim * item,
        "before activation of experts": routed * int(matmuls[1].n) * item,
        "hidden of experts": routed * hidden * item,
        "results of experts": routed * dim * item,
    }
    if shape.gated:
        kept_bytes["activated gate of experts"] = routed * hidden * item
    layer = LayerNumbers("experts", tuple(calls), tuple(matmuls), kept_bytes, is_exact=False)
    if shape.shared_hidden is not None:
        shared = {k.removeprefix("shared."): v for k, v in cuts.items() if k.startswith("shared.")}
        layer |= layer_numbers.mlp(place, shared, dim, shape.gated)
    if shape.shared_gate:
        layer |= LayerNumbers("gate", matmuls=(Matmul(place.rows, 1, dim),))
    return layer
