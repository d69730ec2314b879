"""Sizes and valid cuts of frozen weights in 4 or 8 bits, as numbers. No torch.

In 4 bits bitsandbytes quantizes blocks of 64 elements in memory order, each with its own scale. So
a shard of the quantized matrix equals the quantized shard only if every cut lies between blocks.
"""

from dataclasses import dataclass
from typing import Literal

from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Mesh

BLOCK_SIZE = 64
SCALES_PER_BLOCK = 256
"""Number of scales that are quantized together by double quantization."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """The format of frozen weights. quant_type: nf4 or fp4, with a scale for each block of
    elements, or int8, with one for each row of outputs. double_quant: the scales of 4-bit weights
    are quantized too, to 8 bits.
    """

    quant_type: Literal["nf4", "fp4", "int8"]
    double_quant: bool = False

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return 8 if self.quant_type == "int8" else 4

    def num_bytes(self, count: int, rows: int, total: int | None = None) -> int:
        """Return the bytes of `count` elements in `rows` of outputs, with their scales. total: the
        elements of the full matrix, of whose scales each rank has the scales; None: as many.
        """
        if self.bits == 8:
            return count + 4 * rows
        num_blocks = -(-count // BLOCK_SIZE)
        if not self.double_quant:
            return num_blocks * (BLOCK_SIZE // 2 + 4)
        all_blocks = num_blocks if total is None else -(-total // BLOCK_SIZE)
        scales = num_blocks + 4 * -(-all_blocks // SCALES_PER_BLOCK) + 4  # and their mean
        return num_blocks * BLOCK_SIZE // 2 + scales


def packed_format(
    load_in_4bit: bool, load_in_8bit: bool, quant_type: Literal["nf4", "fp4"], double_quant: bool
) -> PackedFormat | None:
    """Return the format that the keys of model.lora ask for; None: weights are not packed."""
    if load_in_8bit:
        return PackedFormat("int8")
    return PackedFormat(quant_type, double_quant) if load_in_4bit else None


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
