"""Ways to spread one model over ranks: tensor, sequence and pipeline parallelism.

A name is loaded on first use, so importing this package, or a pure file in it,
imports no torch.
"""

from torchdistpackage.lazy import homes, load

_NAMES: dict[str, tuple[str, ...]] = {
    "parallel.tensor.linear": (
        "ColumnLinear",
        "RowLinear",
        "ParallelMlp",
        "column_linear",
        "row_linear",
    ),
    "parallel.tensor.embedding": ("VocabParallelEmbedding", "FeatureParallelEmbedding"),
    "parallel.tensor.cross_entropy": ("linear_cross_entropy", "vocab_parallel_cross_entropy"),
    "parallel.tensor.norm": ("LayerNorm", "RMSNorm"),
    "parallel.tensor.attention": ("ParallelAttention",),
    "parallel.tensor.dropout": ("Dropout",),
    "parallel.context.attention": ("context_attention",),
    "parallel.context.module": ("context_parallel",),
    "parallel.context.sequence": ("gather_sequence", "sequence_positions", "shard_sequence"),
    "parallel.tensor.init": ("Initial", "initialize"),
    "parallel.expert.layer": ("MoELayer",),
    "parallel.expert.router": ("TopKRouter",),
    "parallel.expert.balance": ("balance_experts",),
    "layout.mark": ("collect",),
    "parallel.pipeline.pipeline": ("Pipeline",),
    "parallel.pipeline.weight_tying": ("tie",),
    "parallel.pipeline.partition.sequential": (
        "flatten_model",
        "flatten_sequence",
        "halves",
        "CallableModule",
        "Residual",
    ),
    "parallel.pipeline.partition.policies": (
        "partition_uniform",
        "partition_balanced",
        "partition_by_time",
        "flat_and_partition",
    ),
    "parallel.pipeline.partition.layer_costs": (
        "PieceCost",
        "measure",
        "split_measured",
        "stage_costs",
    ),
    "parallel.pipeline.partition.fx_split": ("split_traced",),
    "parallel.pipeline.partition.hf_decoder": ("decoder_stages", "DecoderStage"),
    "parallel.pipeline.partition.cost_split": ("split_by_cost", "split_evenly"),
    "parallel.pipeline.executor": ("Executor",),
}

EXPORTS = homes(_NAMES)
"""Public name -> module that defines it."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
