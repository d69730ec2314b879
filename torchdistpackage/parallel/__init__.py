"""Ways to spread one model over ranks: tensor, sequence and pipeline parallelism.

One rule: a name is loaded on first use, so importing this package, or a pure file in it,
imports no torch.
"""

import importlib

_NAMES: dict[str, tuple[str, ...]] = {
    "tensor.linear": ("ColumnLinear", "RowLinear", "column_linear", "row_linear"),
    "tensor.embedding": ("VocabParallelEmbedding",),
    "tensor.cross_entropy": ("vocab_parallel_cross_entropy",),
    "tensor.norm": ("LayerNorm", "RMSNorm"),
    "tensor.attention": ("ParallelAttention",),
    "tensor.mlp": ("ParallelMlp",),
    "tensor.dropout": ("Dropout",),
    "tensor.init": ("Initial", "initialize"),
    "tensor.collect": ("collect",),
    "tensor.classic": (
        "set_tp_group",
        "get_tp_group",
        "get_tensor_model_parallel_world_size",
        "TpLinear",
        "ColParallelLinear",
        "RowParallelLinear",
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "maybe_gather_from_sequence_parallel",
        "maybe_split_into_sequence_parallel",
        "set_sequence_parallel_attr",
        "is_squence_parallel_tensor",
    ),
    "tensor.classic_block": (
        "Mlp",
        "TpMlp",
        "Attention",
        "TpAttention",
        "Block",
        "ParallelBlock",
        "Transformer",
    ),
    "pipeline.pipeline": ("Pipeline",),
    "pipeline.weight_tying": ("tie",),
    "pipeline.functional": ("forward_backward", "forward_eval"),
    "pipeline.partition.sequential": (
        "flatten_model",
        "flatten_sequence",
        "halves",
        "CallableModule",
        "Residual",
    ),
    "pipeline.partition.policies": (
        "partition_uniform",
        "partition_balanced",
        "partition_by_time",
        "flat_and_partition",
    ),
    "pipeline.partition.layer_costs": ("PieceCost", "measure", "split_measured", "stage_costs"),
    "pipeline.partition.fx_split": ("split_traced",),
    "pipeline.partition.hf_decoder": ("decoder_stages", "DecoderStage"),
    "pipeline.partition.cost_split": ("split_by_cost", "split_evenly"),
    "pipeline.executor": ("Executor",),
}

EXPORTS: dict[str, str] = {
    name: f"torchdistpackage.parallel.{module}"
    for module, names in _NAMES.items()
    for name in names
}
"""Public name -> module that defines it."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)
