"""What the tensor and expert ranks of a model of transformers send of one microbatch. No torch.

It follows from the table of the family, as the split layers do (parallel/tensor/parallelize.py).
"""

from collections.abc import Iterator, Sequence

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
    if of.tensor > 1 and has_first:
        yield from _tables(embed, of)
        if shape.sequence_parallel:  # the first block takes its part
            yield place.part(shape.dim, of.stream)
    for index in held:
        yield from _block(shape, blocks[index], index, of)
    if of.tensor > 1 and has_last:
        if shape.sequence_parallel:
            yield place.part(shape.dim, of.stream)
        yield from _layers(head, CallPlace(of, False))
        yield from _tables(head, of)
        read = shape.kind.found
        if read is None or read.cuts.head:
            yield from place.loss()


def problem(shape: TransformersShape, of: Microbatch) -> str | None:
    """Why calls are not known, or None."""
    if of.tensor > 1 and shape.lora is not None:
        return "what adapters have no gradients for is not counted yet"
    if of.recomputed and shape.kind.found is not None:
        return "what is computed again of a model without a table is known once it runs"
    return None


def _block(
    shape: TransformersShape, table: SplitTable, index: int, of: Microbatch
) -> Iterator[CallCount]:
    forward = 2 if of.recomputed else 1
    place, dim = CallPlace(of, shape.sequence_parallel, forward), shape.dim
    if of.tensor > 1:
        again = of.drops or shape.kind.ends_in_norm(shape.settings)
        yield from _layers(table, place, again)
        for _ in table.experts:
            top_k = 0 if shape.kind.found is None else shape.kind.found.top_k
            yield from place.experts(dim, top_k, (of.stream, of.products, of.products))
    read = shape.kind.found
    if read is None or not read.shared_experts:
        return
    prefix = f"{shape.kind.blocks}.{index}."
    if any(x.startswith(prefix) and "expert" in y.split_axes for x, y in layouts(shape).items()):
        dtypes = of.stream, of.products
        if of.expert > 1:
            yield from dispatch(of, read.shared_experts, read.top_k, dim, dtypes, forward)
        if of.tensor > 1:
            weights = of.losses if shape.family in WIDE_WEIGHTS else of.products
            yield from place.experts(dim, read.top_k, (*dtypes, weights))


def _layers(table: SplitTable, place: CallPlace, again: bool = False) -> Iterator[CallCount]:
    """Of products. again: the last sum of a block is needed too where it is computed again."""
    of, shared = place.of, table.shared_inputs(table.layers)
    for path in shared:
        first = next(x for x in table.layers.values() if x.entrance == path)
        yield from place.column(_width(first, inputs=True), of.stream)
    rows = [path for path, cut in table.layers.items() if cut.kind == "row"]
    for path, cut in table.layers.items():
        if cut.kind == "row":
            is_needed = again or path != rows[-1]
            yield from place.row(_width(cut, inputs=False), of.products, is_needed)
        elif cut.kind in ("column", "joined") and cut.entrance not in shared:
            yield from place.column(_width(cut, inputs=True), of.products)
        if cut.kind == "joined":
            yield from place.joined(_part(cut.weight, int(cut.transposed), of), of.products)


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
