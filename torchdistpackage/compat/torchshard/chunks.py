"""torch.chunk's rule, by which torchshard cuts a length that does not divide."""

from torchdistpackage.layout.layout import Ranges


def chunk(extent: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return (offset, length) of a chunk: all hold ceil(extent / num_chunks) while they last."""
    step = -(-extent // num_chunks)
    offset = min(index * step, extent)
    return offset, min(step, extent - offset)


def chunks(extent: int, num_chunks: int) -> tuple[Ranges, ...]:
    """Return the (start, stop) of each chunk, as a `Layout` has them; none where all are equal."""
    if extent % num_chunks == 0:
        return ()
    pairs = (chunk(extent, num_chunks, index) for index in range(num_chunks))
    return tuple(((start, start + length),) for start, length in pairs)
