"""Weights of linear layers in 4 bits as numbers: how many bytes, which cuts. No torch.

bitsandbytes rounds blocks of 64 elements in memory order, each with a scale of its own. So a part
of a matrix is the same part of the rounded one only where a cut goes between blocks.
"""

from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Mesh

BLOCK_SIZE = 64


def packed_bytes(count: int) -> int:
    """Of so many elements, in whole blocks with a float32 scale each."""
    return -(-count // BLOCK_SIZE) * (BLOCK_SIZE // 2 + 4)


def keeps_blocks(layout: Layout, inputs: int, mesh: Mesh) -> bool:
    """Whether every rank's part of a matrix has whole blocks of it, at the same places within it.

    inputs: the dim of the features that a layer is given, by which rows are rounded.
    """
    outputs = 1 - inputs
    rows, columns = layout.shape[outputs], layout.shape[inputs]
    for index in range(mesh.size):
        for whole, local in blocks(layout, mesh, index):
            width = whole[inputs].stop - whole[inputs].start
            if width < columns:
                edges = columns, width, whole[inputs].start, local[inputs].start
                is_last = False
            else:
                first, last = whole[outputs].start, whole[outputs].stop
                edges = first * columns, local[outputs].start * columns, last * columns
                is_last = last == rows
            if any(edge % BLOCK_SIZE for edge in (edges[:2] if is_last else edges)):
                return False
    return True
