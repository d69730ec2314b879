"""Published peaks of memory as data: what ran where, and how much a device held."""

from dataclasses import dataclass
from typing import Literal

from torchdistpackage.predict.published import LLAMA3_8B, SOURCES
from torchdistpackage.predict.workload import StepLayout, TransformerSizes

MEMORY_SOURCES = {
    "E": SOURCES["E"],
    "S": "MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md (measured with Megatron-LM "
    "23e00ed and Transformer Engine 2.11)",
}


@dataclass(frozen=True, slots=True)
class PublishedMemory:
    """One published peak of the device that holds most. gib: GiB as printed. counts: bytes of
    tensors ("allocated"), or all that the caching allocator has taken of the device ("reserved").
    """

    title: str
    sizes: TransformerSizes
    layout: StepLayout
    gib: float
    counts: Literal["allocated", "reserved"]
    source: str


def _llama3(layers: int, dim: int, heads: int, kv_heads: int, hidden: int) -> TransformerSizes:
    """The full width of Llama 3, with few layers."""
    return TransformerSizes(layers, dim, heads, kv_heads, 128, hidden, 128256)


_LLAMA3_70B = _llama3(12, 8192, 64, 8, 28672)
_LLAMA3_405B = _llama3(4, 16384, 128, 16, 53248)  # the source has 16 heads of keys and values


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
            gib,
            "allocated",
            "S",
        )
        for name, sizes, text, seq_len, layout, gib in (
            ("70B", _LLAMA3_70B, "PP2 DP4", 4096, _megatron(4096, pipe=2), 66.55),
            ("70B", _LLAMA3_70B, "TP2 DP4", 4096, _megatron(4096, 2), 60.68),
            ("70B", _LLAMA3_70B, "TP4 DP2", 4096, _megatron(4096, 4), 39.07),
            ("70B", _LLAMA3_70B, "TP8", 4096, _megatron(4096, 8), 28.29),
            ("405B", _LLAMA3_405B, "PP2 DP4", 4096, _megatron(4096, pipe=2), 87.08),
            ("405B", _LLAMA3_405B, "TP2 DP4", 4096, _megatron(4096, 2), 81.59),
            ("405B", _LLAMA3_405B, "TP4 DP2", 4096, _megatron(4096, 4), 52.89),
            ("405B", _LLAMA3_405B, "TP8", 4096, _megatron(4096, 8), 38.57),
            ("70B", _LLAMA3_70B, "TP2 CP4", 32768, _megatron(32768, 2, context=4), 68.43),
            ("70B", _LLAMA3_70B, "CP8", 32768, _megatron(32768, context=8), 104.51),
            ("405B", _LLAMA3_405B, "TP2 CP4", 32768, _megatron(32768, 2, context=4), 87.03),
            ("405B", _LLAMA3_405B, "CP8", 32768, _megatron(32768, context=8), 139.22),
            ("70B", _LLAMA3_70B, "TP2 CP4", 131072, _megatron(131072, 2, context=4), 112.67),
            ("70B", _LLAMA3_70B, "CP8", 131072, _megatron(131072, context=8), 147.99),
            ("405B", _LLAMA3_405B, "TP2 CP4", 131072, _megatron(131072, 2, context=4), 118.13),
        )
    ),
    *(
        PublishedMemory(
            f"Llama-3.1 8B, FSDP{ranks}, compiled, 8,192 tokens",
            LLAMA3_8B,
            _titan(ranks),
            gib,
            "reserved",
            "E",
        )
        for ranks, gib in ((8, 77.0), (128, 62.0))
    ),
)
