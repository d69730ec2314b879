"""Tensor parallelism for any module: a plan of rules, and the module's shards made from it.

A name is loaded on first use.
"""

from torchdistpackage.lazy import homes, load

_NAMES: dict[str, tuple[str, ...]] = {
    "parallel.auto.factory": ("parallelize_module",),
    "parallel.auto.model": ("ParallelModule",),
    "parallel.auto.rules": ("Config", "match_report"),
    "parallel.auto.layerwise": ("get_default_config",),
    "parallel.auto.explain": ("explain",),
    "parallel.auto.traffic": ("count_traffic",),
    "parallel.auto.trainer": ("prepare_trainer",),
    "parallel.auto.shard": ("make_shard", "make_distributed_shard"),
    "parallel.auto.loading": ("load_tensor_parallel",),
    "parallel.auto.saving": ("save_tensor_parallel",),
    "parallel.auto.actions": (
        "StateAction",
        "Split",
        "SplitInChunks",
        "SplitInGroupedChunks",
        "TakeChunks",
        "FirstOnly",
        "Partial",
        "Scale",
    ),
}

EXPORTS = homes(_NAMES)
"""Public name -> module that defines it."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
