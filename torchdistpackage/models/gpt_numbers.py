"""Count what each layer of a GPT sends, computes and keeps for one micro-batch. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts
from torchdistpackage.models.gpt_layout import (
    ATTENTION,
    EMBED,
    HEAD,
    MIXTURE,
    GPTShape,
    kind_layouts,
    kind_of,
    piece_layouts,
    pieces,
)
from torchdistpackage.parallel.expert import shape as mixtures
from torchdistpackage.parallel.tensor import numbers
from torchdistpackage.parallel.tensor.numbers import (
    BACKWARD_PER_FORWARD,
    ONE_TOKEN,
    CallPlace,
    LayerNumbers,
)
from torchdistpackage.predict.calls import ITEM_BYTES, Microbatch


def layer_numbers(
    shape: GPTShape, held_pieces: Sequence[int], batch: Microbatch
) -> Iterator[LayerNumbers]:
    """Yield the numbers of each piece of a stage, each half of a block with its norm."""
    names = pieces(shape)
    has_tables = shape.position != "rotary"
    for at, index in enumerate(held_pieces):
        name = names[index]
        if name in (EMBED, HEAD):
            yield replace(_end(shape, name, batch), layer=name)
            continue
        # its block ends here, so that nothing is computed again to have its last sum
        follows = names[held_pieces[at + 1]] if at + 1 < len(held_pieces) else ""
        is_last = name.rpartition(".")[0] != follows.rpartition(".")[0]
        half = _half(shape, kind_of(shape, name), batch, again=batch.drops or not is_last)
        previous = names[held_pieces[at - 1]] if at else ""
        if batch.recomputed:
            is_first = name.rpartition(".")[0] != previous.rpartition(".")[0]
            half = replace(half, kept=_block_input(shape, batch) if is_first else {})
        if not has_tables and name.endswith(ATTENTION):
            half |= numbers.rotary(batch, shape.head_dim)
            has_tables = True
        yield replace(half, layer=name)


@lru_cache(maxsize=16)
def piece_costs(shape: GPTShape) -> tuple[float, ...]:
    """Return the floating-point operations of each piece's forward, per token, at full sequence
    length.

    Counted are the matmuls and, in attention, those of scores and values over the whole sequence,
    causal or not (as in PaLM, arXiv:2204.02311, appendix B).
    """
    return tuple(x.flops for x in layer_numbers(shape, range(len(pieces(shape))), ONE_TOKEN))


def flops_per_token(shape: GPTShape) -> float:
    """Return the floating-point operations of forward and backward for one token of a full
    sequence, the basis of MFU.

    Recomputed work does not count, because it does not train.
    """
    return (1 + BACKWARD_PER_FORWARD) * sum(piece_costs(shape))


def _block_input(shape: GPTShape, batch: Microbatch) -> dict[str, int]:
    rows = CallPlace(batch, shape.sequence_parallel).rows
    return {"input of the block": rows * shape.dim * ITEM_BYTES[batch.stream]}


def _end(shape: GPTShape, name: str, batch: Microbatch) -> LayerNumbers:
    place, dim = CallPlace(batch, shape.sequence_parallel), shape.dim
    if name == EMBED:
        end = numbers.embedding(place, dim)
        end |= _mask(place, dim)
        return replace(end, is_exact=not (batch.drops or batch.has_positions))
    weight = piece_layouts(shape, name)["weight"]
    return numbers.norm(place, dim, shape.norm) | numbers.head(place, weight, dim)


@lru_cache(maxsize=256)
def _half(shape: GPTShape, kind: str, batch: Microbatch, again: bool) -> LayerNumbers:
    """Count each kind of half once for all blocks."""
    place = CallPlace(batch, shape.sequence_parallel, 2 if batch.recomputed else 1)
    norm, cuts = numbers.norm(place, shape.dim, shape.norm), kind_layouts(shape, kind)
    if kind == ATTENTION:
        layer = numbers.attention(
            place,
            _inside(cuts, "attention"),
            shape.dim,
            shape.head_dim,
            shape.seq_len,
            shape.position == "rotary",
            again,
        )
    elif kind == MIXTURE:
        assert shape.moe is not None
        layer = mixtures.numbers(shape.moe, place, _inside(cuts, "mlp"), shape.dim, again)
    else:
        gated = shape.mlp == "swiglu"
        layer = numbers.mlp(place, _inside(cuts, "mlp"), shape.dim, gated, again)
    return (
        norm | _mask(place, shape.dim) | replace(layer, is_exact=layer.is_exact and not batch.drops)
    )


def _mask(place: CallPlace, dim: int) -> LayerNumbers:
    """Dropout behind a layer, in the type of what goes from block to block."""
    num_bytes = place.rows * dim * ITEM_BYTES[place.of.stream]
    return LayerNumbers("dropout", kept={"dropout mask": num_bytes} if place.of.drops else {})


def _inside(cuts: Mapping[str, Layout], module: str) -> Layouts:
    """Return the layouts of a module under local names."""
    prefix = f"{module}."
    return {k.removeprefix(prefix): v for k, v in cuts.items() if k.startswith(prefix)}
