"""Published peaks of memory as data: what ran where, and how much a device held."""

from dataclasses import dataclass
from typing import Literal

from torchdistpackage.predict.published import (
    LLAMA3_8B,
    LLAMA3_70B_12,
    LLAMA3_405B_4,
    SOURCES,
)
from torchdistpackage.predict.workload import StepLayout, TransformerSizes

MEMORY_SOURCES = {
    "E": SOURCES["E"],
    "S": SOURCES["S"],
}


@dataclass(frozen=True, slots=True)
class PublishedMemory:
    """One published peak of the device that holds most, in GiB as printed.

    allocated: bytes of tensors. reserved: all that the caching allocator has taken of the device.
    None where the source does not print one. use: "fit" for the rows from which `ALLOCATOR_SHARE`
    of step_memory.py comes.
    """

    title: str
    sizes: TransformerSizes
    layout: StepLayout
    allocated: float | None
    reserved: float
    use: Literal["fit", "check"]
    source: str


def _megatron(seq_len: int, tensor: int = 1, pipe: int = 1, context: int = 1) -> StepLayout:
    """Eight devices, ZeRO 1, one sequence at a time."""
    return StepLayout(
        8,
        seq_len,
        1,
        4,
        tensor=tensor,
        pipe=pipe,
        context=context,
        zero=1,
        sequence_parallel=tensor > 1,
    )


def _titan(ranks: int) -> StepLayout:
    """FSDP2, two sequences at a time, every second matmul recomputed, loss in float32."""
    return StepLayout(ranks, 8192, 2, 1, zero=3, recompute="matmuls", loss="eager", copies="all")


MEMORY_ROWS: tuple[PublishedMemory, ...] = (
    *(
        PublishedMemory(
            f"Llama-3 {name}, {sizes.layers} layers, {text}, {seq_len:,} tokens",
            sizes,
            layout,
            allocated,
            reserved,
            "fit" if seq_len == 4096 else "check",
            "S",
        )
        for name, sizes, text, seq_len, layout, allocated, reserved in (
            ("70B", LLAMA3_70B_12, "PP2 DP4", 4096, _megatron(4096, pipe=2), 66.55, 70.88),
            ("70B", LLAMA3_70B_12, "TP2 DP4", 4096, _megatron(4096, 2), 60.68, 62.53),
            ("70B", LLAMA3_70B_12, "TP4 DP2", 4096, _megatron(4096, 4), 39.07, 40.18),
            ("70B", LLAMA3_70B_12, "TP8", 4096, _megatron(4096, 8), 28.29, 29.12),
            ("405B", LLAMA3_405B_4, "PP2 DP4", 4096, _megatron(4096, pipe=2), 87.08, 92.26),
            ("405B", LLAMA3_405B_4, "TP2 DP4", 4096, _megatron(4096, 2), 81.59, 84.7),
            ("405B", LLAMA3_405B_4, "TP4 DP2", 4096, _megatron(4096, 4), 52.89, 54.65),
            ("405B", LLAMA3_405B_4, "TP8", 4096, _megatron(4096, 8), 38.57, 39.83),
            ("70B", LLAMA3_70B_12, "TP2 CP4", 32768, _megatron(32768, 2, context=4), 68.43, 70.33),
            ("70B", LLAMA3_70B_12, "CP8", 32768, _megatron(32768, context=8), 104.51, 111.94),
            ("405B", LLAMA3_405B_4, "TP2 CP4", 32768, _megatron(32768, 2, context=4), 87.03, 91.15),
            ("405B", LLAMA3_405B_4, "CP8", 32768, _megatron(32768, context=8), 139.22, 152.14),
            (
                "70B",
                LLAMA3_70B_12,
                "TP2 CP4",
                131072,
                _megatron(131072, 2, context=4),
                112.67,
                121.4,
            ),
            ("70B", LLAMA3_70B_12, "CP8", 131072, _megatron(131072, context=8), 147.99, 159.65),
            (
                "405B",
                LLAMA3_405B_4,
                "TP2 CP4",
                131072,
                _megatron(131072, 2, context=4),
                118.13,
                127.5,
            ),
        )
    ),
    *(
        PublishedMemory(
            f"Llama-3.1 8B, FSDP{ranks}, compiled, 8,192 tokens",
            LLAMA3_8B,
            _titan(ranks),
            None,
            reserved,
            "check",
            "E",
        )
        for ranks, reserved in ((8, 77.0), (128, 62.0))
    ),
)
