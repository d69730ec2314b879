"""What the tensor and expert ranks of a model of transformers send of one microbatch. No torch.

It follows from the table of the family, as the split layers do (parallel/tensor/parallelize.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchdistpackage.families.found import WIDE_WEIGHTS
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.table import LayerCut, SplitTable
from torchdistpackage.models.layer_calls import CallPlace, dispatch
from torchdistpackage.models.transformers_layout import TransformersShape, layouts, part_tables
from torchdistpackage.predict.calls import CallCount, Microbatch
from torchdistpackage.topology.mesh import Mesh


def layer_calls(
    shape: TransformersShape, held: Sequence[int], of: Microbatch
) -> Iterator[CallCount]:
    """Of the blocks of one stage, with the embedding and the head where they go."""
    embed, *blocks, head = part_tables(shape)
    has_first, has_last = 0 in held, len(blocks) - 1 in held
    place = CallPlace(of, shape.sequence_parallel)
    # with adapters gradients begin at the first of them
    has_grad = shape.lora is None
    if of.tensor > 1 and has_first:
        yield from _tables(embed, of)
        if shape.sequence_parallel:  # the first block takes its part
            yield place.shared_sequence(shape.dim, of.stream, has_grad)
    for index, block in enumerate(blocks):
        if index in held:
            yield from _block(shape, block, index, of, has_grad)
        has_grad |= bool(_adapted(block))
    if of.tensor > 1 and has_last:
        if shape.sequence_parallel:
            yield place.joined_sequence(shape.dim, of.stream)
        yield from _layers(head, CallPlace(of, False), has_grad=has_grad)
        yield from _tables(head, of)
        if shape.kind.splits_head:
            yield from place.loss()


def problem(shape: TransformersShape, of: Microbatch) -> str | None:
    """Why calls are not known, or None."""
    if shape.kind.order(shape.settings).is_listed:
        return None
    name = shape.class_name
    if of.tensor > 1 and shape.lora is not None:
        return f"which gradients adapters of a {name} need is known once it runs"
    if of.recomputed:
        return f"what is computed again of a {name} is known once it runs"
    return None


def _block(
    shape: TransformersShape, table: SplitTable, index: int, of: Microbatch, has_grad: bool
) -> Iterator[CallCount]:
    """has_grad: of what comes into the block."""
    forward = 2 if of.recomputed and (has_grad or _adapted(table)) else 1
    place, dim = CallPlace(of, shape.sequence_parallel, forward), shape.dim
    top_k = shape.kind.top_k
    if of.tensor > 1:
        order = shape.kind.order(shape.settings)
        again = of.drops or order.ends_in_norm
        yield from _layers(table, place, again, has_grad, order.is_parallel)
        for _ in table.experts:
            yield from place.experts(dim, top_k, (of.stream, of.products, of.products))
    if not shape.kind.shared_experts:
        return
    prefix = f"{shape.kind.blocks}.{index}."
    if any(x.startswith(prefix) and "expert" in y.split_axes for x, y in layouts(shape).items()):
        dtypes = of.stream, of.products
        if of.expert > 1:
            num = shape.kind.shared_experts
            yield from dispatch(of, num, top_k, dim, dtypes, forward)
        if of.tensor > 1:
            weights = of.losses if shape.family in WIDE_WEIGHTS else of.products
            yield from place.experts(dim, top_k, (*dtypes, weights))


def _layers(
    table: SplitTable,
    place: CallPlace,
    again: bool = False,
    has_grad: bool = True,
    is_parallel: bool = False,
) -> Iterator[CallCount]:
    """Of products, which are listed in the order of the forward. again: the last sum of a block is
    needed too where it is computed again. has_grad: of what comes in. is_parallel: all column
    layers read that, and not what the row layers before them add to it."""
    of, adapted = place.of, _adapted(table)
    shared, entered = table.shared_inputs(table.layers, adapted), set[str]()
    read, made = _gradients(table, adapted, has_grad, is_parallel)
    # what is computed again ends with what the last gradient needs
    behind = [path for path, has in made.items() if has]
    rows = [path for path in behind if table.layers[path].kind == "row"]
    last, is_behind = behind[-1] if behind else "", False
    for path, cut in table.layers.items():
        here = replace(place, forward=1) if is_behind else place
        is_behind |= path == last
        if cut.kind in ("column", "joined"):
            if cut.entrance not in shared:
                yield from here.column(_width(cut, inputs=True), of.products, read[path])
            elif cut.entrance not in entered:
                entered.add(cut.entrance)
                yield from here.column(_width(cut, inputs=True), of.stream, read[path])
        if cut.kind == "row":
            is_needed = again or path not in rows[-1:]
            yield from here.row(_width(cut, inputs=False), of.products, is_needed, made[path])
        elif cut.kind == "joined":
            yield from here.joined(_part(cut.weight, int(cut.transposed), of), of.products)


def _gradients(
    table: SplitTable, adapted: frozenset[str], has_grad: bool, is_parallel: bool
) -> tuple[dict[str, bool], dict[str, bool]]:
    """By layer whether what it reads has a gradient, and what it makes."""
    read: dict[str, bool] = {}
    made: dict[str, bool] = {}
    inside, stream = False, has_grad  # since the last row layer; where that added its result
    for path, cut in table.layers.items():
        if cut.kind in ("column", "joined"):
            read[path] = has_grad if is_parallel else stream
            made[path] = read[path] or path in adapted
            inside |= made[path]
        elif cut.kind == "row":
            made[path] = inside or path in adapted
            stream, inside = stream or made[path], False
    return read, made


def _adapted(table: SplitTable) -> frozenset[str]:
    """Layers with adapters."""
    factors = (path for path, cut in table.layers.items() if cut.kind == "adapter")
    return frozenset(path.rpartition(".lora_")[0] for path in factors)


def _tables(table: SplitTable, of: Microbatch) -> Iterator[CallCount]:
    """Of embeddings, before the sequence is shared."""
    for cut in table.layers.values():
        if cut.kind == "vocab":
            yield from CallPlace(of, False).row(cut.weight.shape[1], of.stream)
        elif cut.kind == "feature":
            rows = of.tokens if cut.once and not of.has_positions else of.rows
            num = rows * _part(cut.weight, 1, of)
            yield CallCount("tensor", "all_gather", num, of.stream, "columns of an embedding")


def _width(cut: LayerCut, *, inputs: bool) -> int:
    return cut.weight.shape[int(inputs != cut.transposed)]


def _part(layout: Layout, dim: int, of: Microbatch) -> int:
    """Of a dim what this rank has."""
    return local_shape(layout, Mesh((("tensor", of.tensor),)), of.index)[dim]
