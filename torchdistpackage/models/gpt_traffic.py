"""What the tensor and expert ranks of a GPT send of one microbatch. No torch."""

from collections.abc import Iterator, Sequence

from torchdistpackage.models.gpt_layout import ATTENTION, EMBED, HEAD, GPTShape, pieces
from torchdistpackage.models.layer_calls import CallPlace, dispatch
from torchdistpackage.predict.calls import CallCount, Microbatch


def layer_calls(shape: GPTShape, held: Sequence[int], of: Microbatch) -> Iterator[CallCount]:
    """Of the pieces of one stage, forward and backward."""
    names = pieces(shape)
    for at, index in enumerate(held):
        name = names[index]
        if name in (EMBED, HEAD):
            if of.tensor > 1:
                yield from _ends(shape, name, of)
            continue
        # its block ends here, so that nothing is computed again to have its last sum
        follows = names[held[at + 1]] if at + 1 < len(held) else ""
        is_last = name.rpartition(".")[0] != follows.rpartition(".")[0]
        yield from _half(shape, name, of, again=of.drops or not is_last)


def _ends(shape: GPTShape, name: str, of: Microbatch) -> Iterator[CallCount]:
    place = CallPlace(of, shape.sequence_parallel)
    if name == EMBED:
        yield from place.row(shape.dim, of.stream)
    else:
        yield from place.column(shape.dim, of.products)
        yield from place.loss()


def _half(shape: GPTShape, name: str, of: Microbatch, again: bool) -> Iterator[CallCount]:
    forward = 2 if of.recomputed else 1
    place, dim = CallPlace(of, shape.sequence_parallel, forward), shape.dim
    moe = None if name.endswith(ATTENTION) else shape.moe_of(int(name.split(".")[1]))
    if moe is None:
        if of.tensor > 1:
            yield from place.column(dim, of.products)
            yield from place.row(dim, of.products, again)
        return
    if of.expert > 1:
        # norms compute in float32 under autocast, and experts in the dtype of their tokens
        yield from dispatch(of, moe.num_experts, moe.top_k, dim, (of.stream, of.stream), forward)
    if of.tensor > 1:
        yield from place.experts(dim, moe.top_k, (of.stream, of.stream, of.stream), again)
        if moe.shared_hidden is not None:
            yield from place.column(dim, of.products)
            yield from place.row(dim, of.products)
