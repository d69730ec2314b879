"""Sizes and valid cuts of 4-bit weights of linear layers, as numbers. No torch.

bitsandbytes quantizes blocks of 64 elements in memory order, each with its own scale. So a shard of
the quantized matrix equals the quantized shard only if every cut lies between blocks.
"""

from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Mesh

BLOCK_SIZE = 64


def packed_bytes(count: int) -> int:
    """Return the bytes of `count` elements, stored as whole blocks with a float32 scale each."""
    return -(-count // BLOCK_SIZE) * (BLOCK_SIZE // 2 + 4)


def keeps_blocks(layout: Layout, inputs: int, mesh: Mesh) -> bool:
    """Return whether every rank's shard of a matrix consists of whole 64-element blocks.

    inputs: the dim of the input features, along which the blocks of a row lie.
    """
    outputs = 1 - inputs
    rows, columns = layout.shape[outputs], layout.shape[inputs]
    for index in range(mesh.size):
        for box, local in blocks(layout, mesh, index):
            width = box[inputs].stop - box[inputs].start
            if width < columns:
                edges = columns, width, box[inputs].start, local[inputs].start
                is_last = False
            else:
                first, last = box[outputs].start, box[outputs].stop
                edges = first * columns, local[outputs].start * columns, last * columns
                is_last = last == rows
            if any(edge % BLOCK_SIZE for edge in (edges[:2] if is_last else edges)):
                return False
    return True
