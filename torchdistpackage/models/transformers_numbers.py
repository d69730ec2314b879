"""Count what each layer of a transformers model sends and computes for one micro-batch. No torch.

It follows from the table of the family, as the split layers do (parallel/tensor/parallelize.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchdistpackage.config.model_section import is_adapter, is_inside
from torchdistpackage.families.found import WIDE_WEIGHTS
from torchdistpackage.families.table import Weight, Weights
from torchdistpackage.layout.derive import even_share
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.table import LayerCut, SplitTable
from torchdistpackage.models.lora_layout import MAGNITUDE
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    part_tables,
    parts,
    weights,
)
from torchdistpackage.parallel.tensor.numbers import (
    BACKWARD_PER_FORWARD,
    ONE_TOKEN,
    CallPlace,
    LayerNumbers,
    dispatch,
    on_rank,
)
from torchdistpackage.predict.calls import CallCount, Microbatch
from torchdistpackage.predict.kernels import Matmul


def layer_numbers(
    shape: TransformersShape, held_pieces: Sequence[int], batch: Microbatch
) -> Iterator[LayerNumbers]:
    """Yield the numbers of the blocks of one stage, and of the embedding and the head where they
    go. What a layer keeps is not stated: the modules are transformers' own."""
    embed, *blocks, head = part_tables(shape)
    block_parts, behind = parts(shape, "tensor")[1:-1], parts(shape, "tensor")[-1]
    has_first, has_last = 0 in held_pieces, len(blocks) - 1 in held_pieces
    # with adapters gradients begin at the first parameter that is trained
    trained = [_has_trained(shape, part) for part in parts(shape, "tensor")]
    has_grad = trained[0]
    if has_first:
        calls = tuple(_embedding_calls(shape, embed, batch, has_grad))
        yield LayerNumbers("embedding", calls)
    for index, (block, part) in enumerate(zip(blocks, block_parts, strict=True)):
        if index in held_pieces:
            calls = tuple(_block(shape, block, part.parameters, batch, has_grad))
            matmuls = (*_matmuls(part.parameters, batch), *_scores(shape, block, batch))
            yield LayerNumbers(f"{shape.kind.blocks}.{index}", calls, matmuls, is_exact=False)
        has_grad |= trained[index + 1]
    if shape.lora is not None:  # a norm before the head
        head_name = f"{shape.kind.output}."
        has_grad |= any(
            shape.lora.trains(x) and not x.startswith(head_name) for x in behind.parameters
        )
    if has_last:
        calls = tuple(_head_calls(shape, head, batch, has_grad))
        vocab = shape.sizes.vocab if shape.head is None else shape.head.num_outputs
        if shape.kind.splits_head:
            vocab = even_share(vocab, batch.tensor, batch.index)[1]
        adapters = {name: w for name, w in behind.parameters.items() if is_adapter(name)}
        matmuls = (Matmul(batch.rows, vocab, shape.sizes.dim), *_matmuls(adapters, batch))
        yield LayerNumbers("head", calls, matmuls, is_exact=False)


def _has_trained(shape: TransformersShape, part: Weights) -> bool:
    return shape.lora is None or any(map(shape.lora.trains, part.parameters))


def piece_costs(shape: TransformersShape) -> tuple[float, ...]:
    """Return the floating-point operations of each block's forward, per token of a full sequence;
    counted as `gpt_numbers.piece_costs` does, the head with the last block."""
    _, *blocks, head = layer_numbers(shape, range(shape.sizes.layers), ONE_TOKEN)
    costs = [block.flops for block in blocks]
    costs[-1] += head.flops
    return tuple(costs)


def flops_per_token(shape: TransformersShape) -> float:
    """Return the floating-point operations of forward and backward for one token of a full
    sequence; what is frozen has no gradient, and a head is not."""
    both = (1 + BACKWARD_PER_FORWARD) * sum(piece_costs(shape))
    if shape.lora is None:
        return both
    of_head = 0 if shape.head is None else 2 * shape.head.num_outputs * shape.sizes.dim
    saved = shape.lora.modules_to_save
    # the gradient of a weight costs what its forward costs
    of_saved = sum(
        2 * w.share * math.prod(w.layout.shape)
        for name, w in weights(shape).items()
        if w.inputs is not None and is_inside(saved, name)
    )
    return both - sum(piece_costs(replace(shape, lora=None, seq_len=0))) + of_head + of_saved


def _matmuls(parameters: Mapping[str, Weight], batch: Microbatch) -> Iterator[Matmul]:
    """Yield the matmuls of all matrices; for experts, those of the tokens that a mean rank gets."""
    for w in parameters.values():
        if len(w.layout.shape) >= 2:
            *experts, width, terms = on_rank(w.layout, batch)
            yield Matmul(batch.rows * w.share, width, terms, math.prod(experts))


def _scores(shape: TransformersShape, table: SplitTable, batch: Microbatch) -> Iterator[Matmul]:
    """Yield the matmuls of scores and values, over the whole sequence."""
    heads = shape.sizes.heads
    for cut in table.attention.values():
        heads = cut.queries.head_range(batch.tensor, batch.index)[1]
    width = shape.sizes.head_dim
    yield Matmul(batch.tokens, shape.seq_len, width, batch.samples * heads)
    yield Matmul(batch.tokens, width, shape.seq_len, batch.samples * heads)


def _embedding_calls(
    shape: TransformersShape, table: SplitTable, batch: Microbatch, has_grad: bool
) -> Iterator[CallCount]:
    if batch.tensor == 1:
        return
    yield from _tables(table, batch)
    if shape.sequence_parallel:  # the first block takes its part
        place = CallPlace(batch, shape.sequence_parallel)
        yield place.shared_sequence(shape.dim, batch.stream, has_grad)


def _head_calls(
    shape: TransformersShape, table: SplitTable, batch: Microbatch, has_grad: bool
) -> Iterator[CallCount]:
    if batch.tensor == 1:
        return
    place = CallPlace(batch, shape.sequence_parallel)
    if shape.sequence_parallel:
        yield place.joined_sequence(shape.dim, batch.stream)
    yield from _layers(table, CallPlace(batch, False), has_grad=has_grad)
    yield from _tables(table, batch)
    if shape.kind.splits_head:
        yield from place.loss()


def problem(shape: TransformersShape, batch: Microbatch) -> str | None:
    """Return why the calls cannot be counted, or None."""
    name = shape.class_name
    if shape.sequence_parallel and not shape.has_table:
        return f"what the slices of a {name} send is known once it runs"
    blocks = shape.lora is not None and shape.lora.modules_to_save and parts(shape, "tensor")[1:-1]
    if blocks and batch.tensor > 1:
        names = (name for block in blocks for name in block.parameters)
        saved = (name for name in names if is_inside(shape.lora.modules_to_save, name))
        if (name_in_block := next(saved, None)) is not None:
            return f"which gradients {name_in_block} of modules_to_save needs is known once it runs"
    if shape.kind.order(shape.settings).is_listed:
        return None
    if batch.tensor > 1 and shape.lora is not None:
        return f"which gradients adapters of a {name} need is known once it runs"
    if batch.recomputed:
        return f"what is computed again of a {name} is known once it runs"
    return None


def _block(
    shape: TransformersShape,
    table: SplitTable,
    parameters: Mapping[str, Weight],
    batch: Microbatch,
    has_grad: bool,
) -> Iterator[CallCount]:
    """Yield the calls of one block. has_grad: whether its input has a gradient."""
    forward = 2 if batch.recomputed and (has_grad or _adapted(table)) else 1
    place, dim = CallPlace(batch, shape.sequence_parallel, forward), shape.dim
    top_k = shape.kind.top_k
    if batch.tensor > 1:
        order = shape.kind.order(shape.settings)
        again = batch.drops or order.ends_in_norm
        yield from _layers(table, place, again, has_grad, order.is_parallel)
        for _ in table.experts:
            yield from place.experts(dim, top_k, (batch.stream, batch.products, batch.products))
    if not shape.kind.shared_experts:
        return
    if any("expert" in w.layout.split_axes for w in parameters.values()):
        dtypes = batch.stream, batch.products
        if batch.expert > 1:
            num = shape.kind.shared_experts
            yield from dispatch(batch, num, top_k, dim, dtypes, forward)
        if batch.tensor > 1:
            weights = batch.losses if shape.family in WIDE_WEIGHTS else batch.products
            yield from place.experts(dim, top_k, (*dtypes, weights), again=True)


def _layers(
    table: SplitTable,
    place: CallPlace,
    again: bool = False,
    has_grad: bool = True,
    is_parallel: bool = False,
) -> Iterator[CallCount]:
    """Yield the calls of the layers of `table`, which lists them in the order of the forward.
    again: the block's last sum is needed too where the block is computed again. has_grad: whether
    the input has a gradient. is_parallel: all column layers read the block's input, without what
    row layers before them add.
    """
    batch, adapted = place.of, _adapted(table)
    shared, entered = table.shared_inputs(table.layers, adapted), set[str]()
    input_grads, output_grads = _gradients(table, adapted, has_grad, is_parallel)
    # what is computed again ends with what the last gradient needs
    behind = [path for path, has in output_grads.items() if has]
    rows = [path for path in behind if table.layers[path].kind == "row"]
    last, is_behind = behind[-1] if behind else "", False
    for path, cut in table.layers.items():
        call_place = replace(place, forward=1) if is_behind else place
        is_behind |= path == last
        if cut.kind in ("column", "joined"):
            if cut.entrance not in shared:
                yield from call_place.column(
                    _width(cut, inputs=True), batch.products, input_grads[path]
                )
            elif cut.entrance not in entered:
                entered.add(cut.entrance)
                yield from call_place.column(
                    _width(cut, inputs=True), batch.stream, input_grads[path]
                )
        if cut.kind == "row":
            is_needed = again or path not in rows[-1:]
            yield from call_place.row(
                _width(cut, inputs=False), batch.products, is_needed, output_grads[path]
            )
            if f"{path}.{MAGNITUDE}" in table.layers:
                yield call_place.norms(_width(cut, inputs=False))
        elif cut.kind == "joined":
            yield from call_place.joined(
                _part(cut.weight, int(cut.transposed), batch), batch.products
            )


def _gradients(
    table: SplitTable, adapted: frozenset[str], has_grad: bool, is_parallel: bool
) -> tuple[dict[str, bool], dict[str, bool]]:
    """Return, by layer, whether its input has a gradient, and whether its output has one."""
    input_grads: dict[str, bool] = {}
    output_grads: dict[str, bool] = {}
    inside, stream = False, has_grad  # since the last row layer; where that added its result
    for path, cut in table.layers.items():
        if cut.kind in ("column", "joined"):
            input_grads[path] = has_grad if is_parallel else stream
            output_grads[path] = input_grads[path] or path in adapted
            inside |= output_grads[path]
        elif cut.kind == "row":
            output_grads[path] = inside or path in adapted
            stream, inside = stream or output_grads[path], False
    return input_grads, output_grads


def _adapted(table: SplitTable) -> frozenset[str]:
    """Return the layers that have adapters."""
    factors = (path for path, cut in table.layers.items() if cut.kind == "adapter")
    return frozenset(path.rpartition(".lora_")[0] for path in factors)


def _tables(table: SplitTable, batch: Microbatch) -> Iterator[CallCount]:
    """Yield the calls of embeddings, before the sequence is shared."""
    for cut in table.layers.values():
        if cut.kind == "vocab":
            yield from CallPlace(batch, False).row(cut.weight.shape[1], batch.stream)
        elif cut.kind == "feature":
            rows = batch.tokens if cut.once and not batch.has_positions else batch.rows
            num = rows * _part(cut.weight, 1, batch)
            yield CallCount("tensor", "all_gather", num, batch.stream, "columns of an embedding")


def _width(cut: LayerCut, *, inputs: bool) -> int:
    return cut.weight.shape[int(inputs != cut.transposed)]


def _part(layout: Layout, dim: int, batch: Microbatch) -> int:
    """Return the size of this rank's slice along a dim."""
    return on_rank(layout, batch)[dim]
