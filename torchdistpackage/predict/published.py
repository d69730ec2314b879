"""Published steps as data: what ran where, how long a step took, and who says so.

Rows marked "fit" may be used to fit the constants of a device (`Fit` in devices.py); rows marked
"check" are predicted and printed alone. The rule: a row holds what its source prints or what the
recipe that it names says, and `assumed` says what neither does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torchdistpackage.predict.workload import StepLayout, TransformerSizes


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """One published step. number: of the row, with a letter where a row has several steps.

    seconds: printed, or from tokens per second. assumed: what no source says; "" if nothing.
    unassumed: fields of the layout as they are without the assumption.
    """

    number: str
    use: Literal["fit", "check"]
    title: str
    device: str
    sizes: TransformerSizes
    layout: StepLayout
    seconds: float
    source: str
    assumed: str = ""
    unassumed: Mapping[str, object] = field(default_factory=dict[str, object])


SOURCES = {
    "A": "Korthikanti et al. 2022 (arXiv:2205.05198), table 5",
    "B": "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx and examples/llm_benchmark",
    "E": "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    "F": "mosaicml/llm-foundry, scripts/train/benchmarking/README.md",
    "G": "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and -archive.md",
    "I": "foundation-model-stack/fms-fsdp, README.md",
    "M": "MLPerf Training, tracked_stats of result_0 and the configuration beside it: "
    "mlcommons/training_results_v5.0 and _v5.1",
    "O": "pytorch/ao, docs/source/workflows/training.md",
    "R": "PrimeIntellect-ai/prime-rl, benchmarks/baselines",
    "S": "MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md (measured with Megatron-LM "
    "23e00ed and Transformer Engine 2.11, flags in run_pretrain_llama3.sh there)",
    "W": "pytorch/torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
}


def _megatron(layers: int, dim: int, heads: int) -> TransformerSizes:
    """The sizes of a GPT of Megatron-LM."""
    width = dim // heads
    return TransformerSizes(
        layers,
        dim,
        heads,
        heads,
        width,
        4 * dim,
        51200,
        gated=False,
        norm="layer",
        rotary=False,
        tied=True,
    )


def _mpt(layers: int, dim: int, heads: int) -> TransformerSizes:
    """The sizes of a model of llm-foundry."""
    width = dim // heads
    return TransformerSizes(
        layers,
        dim,
        heads,
        heads,
        width,
        4 * dim,
        50432,
        gated=False,
        norm="layer",
        rotary=False,
        tied=True,
    )


LLAMA2_7B = TransformerSizes(32, 4096, 32, 32, 128, 11008, 32000)
LLAMA2_34B = TransformerSizes(48, 8192, 64, 8, 128, 22016, 32000)
LLAMA2_70B = TransformerSizes(80, 8192, 64, 8, 128, 28672, 32000)
LLAMA3_8B = TransformerSizes(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA3_70B = TransformerSizes(80, 8192, 64, 8, 128, 28672, 128256)
LLAMA3_405B = TransformerSizes(126, 16384, 128, 8, 128, 53248, 128256)
LLAMA3_70B_12 = replace(LLAMA3_70B, layers=12)
LLAMA3_405B_4 = replace(LLAMA3_405B, layers=4, kv_heads=16)
"""Source S has 16 heads of keys and values."""
QWEN3_06B = TransformerSizes(28, 1024, 16, 8, 128, 3072, 151936, tied=True, qk_norm=True)
QWEN3_4B = TransformerSizes(36, 2560, 32, 8, 128, 9728, 151936, tied=True, qk_norm=True)
QWEN3_30B = TransformerSizes(
    48, 2048, 32, 4, 128, 768, 151936, num_experts=128, top_k=8, qk_norm=True
)
GPT_OSS = TransformerSizes(
    36, 2880, 64, 8, 64, 2880, 201088, num_experts=128, top_k=4, window=128, window_share=0.5
)


def _korthikanti(
    number: str,
    use: Literal["fit", "check"],
    title: str,
    sizes: TransformerSizes,
    degrees: tuple[int, int, int],
    batch: tuple[int, int],
    seconds: tuple[float, float],
) -> list[PublishedStep]:
    """Selective recomputation with sequence parallelism, and full without. degrees: GPUs, pipe,
    chunks. batch: sequences at a time, and how often."""
    ranks, pipe, chunks = degrees
    rows: list[PublishedStep] = []
    for letter, text, seconds_of in zip("ab", ("selective", "full"), seconds, strict=True):
        is_selective = text == "selective"
        layout = StepLayout(
            ranks,
            2048,
            *batch,
            tensor=8,
            pipe=pipe,
            chunks=chunks,
            schedule="interleaved" if chunks > 1 else "1f1b",
            sequence_parallel=is_selective,
            recompute="attention" if is_selective else "blocks",
            stops_early=False,
            attention="unfused",
            dropout=True,
            joins=True,
        )
        rows.append(
            PublishedStep(
                f"{number}{letter}",
                use,
                f"{title}, {text} recompute",
                "a100",
                sizes,
                layout,
                seconds_of,
                "A",
            )
        )
    return rows


def _fsdp(ranks: int, seq_len: int, micro_batch: int, times: int = 1, **more: object) -> StepLayout:
    """A layout of FSDP, with PyTorch's own loss and optimizer unless it says otherwise."""
    options = {"loss": "eager", "optimizer": "foreach", "copies": "all", **more}
    return StepLayout(ranks, seq_len, micro_batch, times, zero=3, **options)  # type: ignore[arg-type]


def _tokens_s(batch: int, seq_len: int, tokens: float, ranks: int) -> float:
    """Seconds of a step from tokens per second and GPU."""
    return batch * seq_len / (tokens * ranks)


_TITAN = _fsdp(8, 8192, 2, recompute="matmuls", loss="fused")
_AUTO_LORA = "TP2, FSDP, recompute blocks, asynchronous TP"
_HALF = "the share of recomputed blocks: one half"
_EAGER = (
    "compiled blocks run as eager ones, since attention breaks the graph inside a checkpoint, "
    "which torch.utils.checkpoint then leaves to eager mode"
)
_EXPERT_BIAS = (
    "biases of experts are added expert by expert in float32, and gates are clamped before the "
    "fused activation, as Megatron-LM does"
)
_EXPERT_BIAS_B300 = (
    f"{_EXPERT_BIAS}; and network cards of 400 Gbit/s a device, as with 64 ranks of experts a step "
    "takes about as long as on B200, although the data sheet of B300 has 800"
)
_NO_EXPERT_BIAS = {"expert_bias": False, "clamps": False}


def _mlperf_lora(recomputed: int = 0) -> StepLayout:
    """The layout of AMD's llama2_70b_lora: a copy of the model on each of eight devices, adapters
    on attention alone, attention by AITER."""
    return StepLayout(
        8,
        8192,
        1,
        1,
        float8=True,
        attention="flash3",
        joins=True,
        lora=16,
        lora_mlp=False,
        recompute="blocks" if recomputed else "none",
        recompute_share=recomputed / 80 if recomputed else 1.0,
        stops_early=False,
    )


def _gpt_oss(device: str, expert: int) -> StepLayout:
    """The layout of GPT-OSS 120B on 64 GPUs without a pipe, as in
    scripts/performance/configs/gpt_oss/gpt_oss_workload_base_configs.py of v0.3.0 and, with 8 ranks
    of experts, v0.4.0: where memory is short, norms and activations are computed again. The loss
    is Megatron-LM's own, which copies logits to float32 (`cross_entropy_fusion_impl` in
    src/megatron/bridge/recipes/gpt_oss/gpt_oss.py)."""
    return StepLayout(
        64,
        4096,
        4,
        5,
        expert=expert,
        zero=1,
        reduce_bytes=2,
        recompute="elementwise" if device in ("b200", "gb200") else "none",
        dedups=expert == 8,
        loss="eager",
        attention="flash3",
        joins=True,
        expert_bias=True,
        clamps=True,
        network_bytes_per_s=50e9 if device == "b300" else 0.0,
    )


def _cut_layers(
    name: str, sizes: TransformerSizes, seconds: Mapping[tuple[int, int], Sequence[float]]
) -> list[PublishedStep]:
    """Llama 3 at full width with few layers on eight B200, where nothing overlaps but what
    Transformer Engine's backward does. seconds: by (tensor, pipe) those of steps with 4, 8 and 32
    micro-batches."""
    rows: list[PublishedStep] = []
    for (tensor, pipe), steps in seconds.items():
        data = 8 // (tensor * pipe)
        text = f"PP{pipe} DP{data}" if pipe > 1 else f"TP{tensor} DP{data}" if data > 1 else "TP8"
        for number, seconds_of in zip((4, 8, 32), steps, strict=True):
            layout = StepLayout(
                8,
                4096,
                1,
                number,
                tensor=tensor,
                pipe=pipe,
                zero=1,
                sequence_parallel=tensor > 1,
                overlaps_data=False,
                attention="flash3",
                joins=True,
            )
            key = f"s{name}-{text.partition(' ')[0].lower()}-{number}".lower()
            title = f"Llama-3 {name}, {sizes.layers} layers, {text}, {number} micro-batches"
            use: Literal["fit", "check"] = "fit" if key in _FITS_B200 else "check"
            rows.append(PublishedStep(key, use, title, "b200", sizes, layout, seconds_of, "S"))
    return rows


def _long_context() -> list[PublishedStep]:
    """The same models with long sequences, whose ranks trade heads for sequence."""
    rows: list[PublishedStep] = []
    for name, sizes, tensor, context, seq_len, seconds in (
        ("70B", LLAMA3_70B_12, 2, 4, 32768, 1.7580),
        ("70B", LLAMA3_70B_12, 1, 8, 32768, 1.7681),
        ("405B", LLAMA3_405B_4, 2, 4, 32768, 1.9846),
        ("405B", LLAMA3_405B_4, 1, 8, 32768, 2.0036),
        ("70B", LLAMA3_70B_12, 2, 4, 131072, 11.3157),
        ("70B", LLAMA3_70B_12, 1, 8, 131072, 11.3019),
        ("405B", LLAMA3_405B_4, 2, 4, 131072, 10.5776),
    ):
        layout = StepLayout(
            8,
            seq_len,
            1,
            4,
            tensor=tensor,
            context=context,
            context_exchange="heads",
            zero=1,
            sequence_parallel=tensor > 1,
            overlaps_data=False,
            attention="flash3",
            joins=True,
        )
        text = f"TP{tensor} CP{context}" if tensor > 1 else f"CP{context}"
        key = f"s{name}-cp{context}-{seq_len // 1024}k".lower()
        title = f"Llama-3 {name}, {sizes.layers} layers, {text}, {seq_len:,} tokens"
        rows.append(PublishedStep(key, "check", title, "b200", sizes, layout, seconds, "S"))
    return rows


_FITS_B200 = ("s70b-pp2-4", "s405b-tp4-4")
"""A row of each model, one with a pipe and one with tensor ranks."""

ROWS: tuple[PublishedStep, ...] = (
    *_korthikanti("1", "check", "22B", _megatron(48, 6144, 64), (8, 1, 1), (4, 1), (1.10, 1.42)),
    *_korthikanti(
        "2", "fit", "GPT-3 175B", _megatron(96, 12288, 96), (64, 8, 3), (1, 64), (13.75, 18.13)
    ),
    *_korthikanti(
        "3", "check", "530B", _megatron(105, 20480, 128), (280, 35, 3), (1, 280), (37.83, 49.05)
    ),
    *_korthikanti(
        "4", "check", "1T", _megatron(128, 25600, 160), (512, 64, 1), (1, 512), (71.49, 94.42)
    ),
    PublishedStep(
        "5",
        "fit",
        "Llama-3 70B, FSDP32 CP2",
        "h100-sxm",
        LLAMA3_70B,
        _fsdp(64, 8192, 1, 4, context=2, recompute="blocks", attention="flash3"),
        18.90,
        "B",
    ),
    PublishedStep(
        "9",
        "check",
        "Qwen3-30B-A3B, EP8 FSDP8",
        "h100-sxm",
        QWEN3_30B,
        _fsdp(
            8,
            4096,
            4,
            16,
            expert=8,
            recompute="blocks",
            attention="flash3",
            dedups=True,
            loss="narrow",
        ),
        21.77,
        "B",
    ),
    *(
        PublishedStep(
            f"13{letter}",
            "check",
            f"Llama-3 70B LoRA, {_AUTO_LORA}, {ranks} GPUs",
            "h100-sxm",
            LLAMA3_70B,
            _fsdp(
                ranks,
                4096,
                2,
                times,
                tensor=2,
                sequence_parallel=True,
                tensor_overlap=True,
                recompute="blocks",
                attention="flash3",
                lora=16,
            ),
            seconds,
            "B",
        )
        for letter, ranks, times, seconds in (("a", 8, 4, 15.00), ("b", 16, 2, 8.32))
    ),
    PublishedStep(
        "24a",
        "check",
        "Llama-3.1 8B, FSDP8, eager",
        "h100-500w",
        LLAMA3_8B,
        _fsdp(8, 8192, 2, recompute="matmuls", kernels="eager"),
        2.84,
        "E",
    ),
    PublishedStep(
        "24b", "check", "Llama-3.1 8B, FSDP8, compiled", "h100-500w", LLAMA3_8B, _TITAN, 2.46, "E"
    ),
    *(
        PublishedStep(
            f"28{letter}",
            "check",
            f"MPT-30B, FSDP{ranks}, recompute blocks",
            "h100-sxm",
            _mpt(48, 7168, 64),
            _fsdp(ranks, 2048, 8, recompute="blocks", kernels="eager", copies="gradients"),
            seconds,
            "F",
        )
        for letter, ranks, seconds in (("a", 128, 7.45), ("b", 512, 7.74))
    ),
    *(
        PublishedStep(
            f"29{letter}",
            "fit",
            f"MPT-7B, FSDP{ranks}",
            "h100-sxm",
            _mpt(32, 4096, 32),
            _fsdp(ranks, 2048, 6, kernels="eager", copies="gradients"),
            seconds,
            "F",
        )
        for letter, ranks, seconds in (("a", 8, 1.15), ("b", 128, 1.17), ("c", 512, 1.27))
    ),
    PublishedStep(
        "40",
        "fit",
        "Llama-2 7B, HSDP, compiled",
        "a100",
        LLAMA2_7B,
        _fsdp(
            128, 4096, 2, shard=8, reduce_bytes=2, network_bytes_per_s=6.25e9, copies="gradients"
        ),
        1.800,
        "I",
    ),
    PublishedStep(
        "41a",
        "check",
        "Llama-2 34B, FSDP128, selective recompute",
        "a100",
        LLAMA2_34B,
        _fsdp(
            128,
            4096,
            2,
            reduce_bytes=2,
            network_bytes_per_s=6.25e9,
            copies="gradients",
            recompute="blocks",
            recompute_share=0.5,
        ),
        9.990,
        "I",
        _HALF,
        {"recompute_share": 1.0},
    ),
    PublishedStep(
        "41b",
        "check",
        "Llama-2 34B, FSDP96, selective recompute",
        "h100-sxm",
        LLAMA2_34B,
        _fsdp(
            96,
            4096,
            2,
            reduce_bytes=2,
            network_bytes_per_s=12.5e9,
            copies="gradients",
            recompute="blocks",
            recompute_share=0.5,
        ),
        4.477,
        "I",
        _HALF,
        {"recompute_share": 1.0},
    ),
    PublishedStep(
        "42",
        "check",
        "Llama-3.1 8B, FSDP8, compiled, float8",
        "h100-500w",
        LLAMA3_8B,
        _fsdp(8, 8192, 2, recompute="matmuls", float8=True, loss="fused"),
        1.92,
        "E",
    ),
    *(
        PublishedStep(
            f"43{letter}",
            "check",
            f"Llama-3.1 70B, FSDP32 TP8, recompute blocks, float8{text}",
            "h100-500w",
            LLAMA3_70B,
            _fsdp(
                256,
                8192,
                16,
                tensor=8,
                sequence_parallel=True,
                tensor_overlap=bool(text),
                recompute="blocks",
                float8=True,
                loss="fused",
            ),
            seconds,
            "E",
        )
        for letter, text, seconds in (("a", "", 20.23), ("b", ", asynchronous TP", 17.39))
    ),
    PublishedStep(
        "44",
        "check",
        "Llama-3 70B SFT, TP4 PP4 VP5, float8",
        "h100-sxm",
        LLAMA3_70B,
        StepLayout(
            32,
            4096,
            1,
            16,
            tensor=4,
            pipe=4,
            chunks=5,
            schedule="interleaved",
            zero=1,
            reduce_bytes=2,
            sequence_parallel=True,
            tensor_overlap=True,
            float8=True,
            attention="flash3",
            joins=True,
        ),
        2.50,
        "G",
    ),
    *(
        PublishedStep(
            f"45{letter}",
            "check",
            f"GPT-OSS 120B, PP4 EP8, batch {batch}",
            "h100-sxm",
            GPT_OSS,
            StepLayout(
                64,
                4096,
                1,
                batch // 16,
                pipe=4,
                expert=8,
                zero=1,
                reduce_bytes=2,
                recompute="elementwise",
                loss="eager",
                attention="flash3",
                joins=True,
                expert_bias=True,
                clamps=True,
            ),
            seconds,
            "G",
            _EXPERT_BIAS,
            _NO_EXPERT_BIAS,
        )
        for letter, batch, seconds in (("a", 1280, 13.67), ("b", 512, 5.82))
    ),
    *(
        PublishedStep(
            f"46{letter}",
            "check",
            f"Qwen3-0.6B SFT, recompute blocks, {seq_len} tokens",
            "h100-sxm",
            QWEN3_06B,
            _fsdp(1, seq_len, 1, 2, recompute="blocks", attention="flash3", kernels="eager"),
            seconds,
            "R",
            _EAGER,
            {"kernels": "fused"},
        )
        for letter, seq_len, seconds in (("a", 8192, 0.6225), ("b", 16384, 1.2819))
    ),
    PublishedStep(
        "47",
        "check",
        "Llama-3 8B LoRA",
        "h100-sxm",
        LLAMA3_8B,
        _fsdp(1, 4096, 2, 16, attention="flash3", lora=16, copies="none"),
        10.51,
        "B",
    ),
    # The host's time of an operation is fitted on this row, whose device waits for it.
    PublishedStep(
        "b200-30b1",
        "fit",
        "Qwen3-30B-A3B, EP8, float8, micro-batch 1",
        "b200",
        QWEN3_30B,
        StepLayout(8, 4096, 1, 64, expert=8, zero=1, float8=True, attention="flash3", joins=True),
        _tokens_s(512, 4096, 9691, 8),
        "G",
    ),
    # Rows of cards beyond A100 and H100, of which none is fitted.
    *(
        PublishedStep(
            f"{device}-8b",
            "check",
            "Llama-3 8B, float8",
            device,
            LLAMA3_8B,
            StepLayout(
                8, 8192, 2, 8, zero=1, float8=True, attention="flash3", joins=True, graphs=True
            ),
            _tokens_s(128, 8192, tokens, 8),
            "G",
        )
        for device, tokens in (("b200", 30624), ("gb200", 31508), ("gb300", 37556))
    ),
    *(
        PublishedStep(
            f"{device}-405b",
            "check",
            f"Llama-3.1 405B, TP{tensor} PP{pipe} CP{context} VP{chunks}, float8",
            device,
            LLAMA3_405B,
            StepLayout(
                ranks,
                8192,
                1,
                batch * tensor * pipe * context // ranks,
                tensor=tensor,
                pipe=pipe,
                chunks=chunks,
                context=context,
                schedule="interleaved",
                zero=1,
                sequence_parallel=True,
                tensor_overlap=True,
                float8=True,
                attention="flash3",
                joins=True,
            ),
            _tokens_s(batch, 8192, tokens, ranks),
            "G",
        )
        for device, ranks, batch, tensor, pipe, context, chunks, tokens in (
            ("b200", 128, 64, 4, 8, 2, 8, 661),
            ("gb200", 256, 1536, 4, 16, 1, 4, 813),
            ("gb300", 256, 1536, 2, 8, 2, 4, 999),
        )
    ),
    PublishedStep(
        "b300-30b",
        "check",
        "Qwen3-30B-A3B, EP8, float8",
        "b300",
        QWEN3_30B,
        StepLayout(
            8,
            4096,
            8,
            8,
            expert=8,
            zero=1,
            float8=True,
            attention="flash3",
            joins=True,
            graphs=True,
        ),
        _tokens_s(512, 4096, 29521, 8),
        "G",
    ),
    *(
        PublishedStep(
            f"{device}-120b{letter}",
            "check",
            f"GPT-OSS 120B, EP{expert}",
            device,
            GPT_OSS,
            _gpt_oss(device, expert),
            _tokens_s(1280, 4096, tokens, 64),
            "G",
            _EXPERT_BIAS_B300 if device == "b300" else _EXPERT_BIAS,
            _NO_EXPERT_BIAS | ({"network_bytes_per_s": 0.0} if device == "b300" else {}),
        )
        for device, letter, expert, tokens in (
            ("b200", "a", 64, 8047),
            ("b200", "b", 8, 13722),
            ("b300", "a", 64, 8359),
            ("b300", "b", 8, 15031),
            ("gb200", "", 64, 15754),
            ("gb300", "", 64, 19366),
        )
    ),
    *(
        PublishedStep(
            f"{device}-4b{letter}",
            "check",
            f"Qwen3-4B SFT, FSDP8, recompute blocks, {seq_len} tokens",
            device,
            QWEN3_4B,
            _fsdp(8, seq_len, 1, 2, recompute="blocks", kernels="eager"),
            seconds,
            "R",
            _EAGER,
            {"kernels": "fused"},
        )
        for device, letter, seq_len, seconds in (
            ("h100-sxm", "", 16384, 5.0146),
            ("h200", "", 16384, 4.7068),
            ("b200", "a", 16384, 3.837),
            ("b200", "b", 65536, 39.61),
        )
    ),
    *(
        PublishedStep(
            f"h200-8b{letter}",
            "check",
            f"Llama-3.1 8B, FSDP{ranks}, compiled, float8",
            "h200",
            LLAMA3_8B,
            _fsdp(
                ranks,
                8192,
                2,
                recompute="matmuls",
                float8=True,
                loss="fused",
                optimizer="fused",
                weight_bytes=1,
            ),
            2 * 8192 / tokens,
            "W",
        )
        for letter, ranks, tokens in (("a", 32, 10938), ("b", 64, 10753))
    ),
    PublishedStep(
        "h200-70b",
        "check",
        "Llama-2 70B LoRA, CP2, float8",
        "h200",
        LLAMA2_70B,
        StepLayout(
            8,
            8192,
            1,
            2,
            context=2,
            float8=True,
            attention="flash3",
            joins=True,
            lora=16,
            lora_mlp=False,
        ),
        8 / 2.552,
        "M",
    ),
    *(
        PublishedStep(
            f"{device}-70b{letter}",
            "check",
            f"Llama-2 70B LoRA, float8, {text}",
            device,
            LLAMA2_70B,
            _mlperf_lora(21 if device == "mi300x" else 0),
            8 / samples,
            "M",
        )
        for device, letter, text, samples in (
            ("mi300x", "a", "v5.0", 2.028),
            ("mi300x", "b", "v5.1", 2.1155),
            ("mi325x", "a", "v5.0", 2.732),
            ("mi325x", "b", "v5.1", 2.837),
            ("mi355x", "", "v5.1", 5.878),
        )
    ),
    PublishedStep(
        "mi355x-8b",
        "check",
        "Llama-3.1 8B, float8, v5.1",
        "mi355x",
        LLAMA3_8B,
        StepLayout(8, 8192, 2, 2, zero=1, float8=True, attention="flash3", joins=True),
        32 / 30.62,
        "M",
    ),
    *_cut_layers(
        "70B",
        LLAMA3_70B_12,
        {
            (1, 2): (0.8430, 1.4768, 5.4365),
            (2, 1): (0.7255, 1.3870, 5.3765),
            (4, 1): (0.4098, 0.7656, 2.9646),
            (8, 1): (0.2809, 0.5567, 2.0737),
        },
    ),
    *_cut_layers(
        "405B",
        LLAMA3_405B_4,
        {
            (1, 2): (1.0746, 1.9354, 7.0464),
            (2, 1): (0.9073, 1.7168, 6.6041),
            (4, 1): (0.4760, 0.8996, 3.4554),
            (8, 1): (0.2588, 0.4881, 1.9018),
        },
    ),
    *_long_context(),
    *(
        PublishedStep(
            f"mi300x-8b{letter}",
            "check",
            f"Llama-3 8B, FSDP8, compiled{text}",
            "mi300x",
            LLAMA3_8B,
            _fsdp(
                8,
                8192,
                1,
                recompute="matmuls",
                loss="fused",
                float8=bool(text),
                weight_bytes=1 if text else 2,
            ),
            8192 / tokens,
            "O",
        )
        for letter, text, tokens in (("a", "", 5376.5), ("b", ", float8", 6166.0))
    ),
)


def is_checked(device: str) -> bool:
    """Return whether a published step stands beside the predictions for this device."""
    return any(row.device == device for row in ROWS)
