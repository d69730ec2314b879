"""Tensor parallelism for a user's existing module: its copy is split, called, saved and loaded.

split_root what every split module offers to saving and loading split_model a module split by a
table; pretrained_calls: one of transformers saving, loading whole state from parts, and back draws
dropout that is alike, or apart, on ranks caches key-value caches that come to the ranks, and go

`models/tensor_parallel.py` is the call. A name is loaded on first use.
"""

from torchdistpackage.lazy import homes, load

_NAMES: dict[str, tuple[str, ...]] = {
    "parallel.auto.traffic": ("count_traffic",),
    "parallel.auto.trainer": ("prepare_trainer",),
    "parallel.auto.loading": ("load_tensor_parallel",),
    "parallel.auto.saving": ("save_tensor_parallel",),
}

EXPORTS = homes(_NAMES)
"""Public name -> module that defines it."""

__all__ = list(EXPORTS)


def __getattr__(name: str) -> object:
    return load(__name__, EXPORTS, name)
