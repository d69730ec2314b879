"""Smaller constructor arguments for your own model, recognised by their usual names.

Sizes keep their ratios: heads that share keys still do, and a width is still that of its heads.
What the data are must fit: an argument of `data.args` with the same name and value is made smaller
with that of the model, and a number of tokens only then. No torch.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import CUSTOM

USUAL_NAMES = {
    "layers": "layers num_layers n_layers n_layer depth num_hidden_layers num_blocks n_blocks",
    "heads": "heads num_heads n_heads n_head nhead num_attention_heads",
    "kv_heads": "kv_heads num_kv_heads n_kv_heads num_key_value_heads num_query_groups",
    "head_dim": "head_dim head_size d_head kv_channels",
    "dim": "dim d_model model_dim hidden_size n_embd embed_dim embedding_dim width",
    "hidden": "hidden hidden_dim mlp_hidden mlp_dim d_ff ffn_dim ffn_hidden_size n_inner "
    "intermediate_size dim_feedforward",
    "vocab": "vocab vocab_size num_tokens n_vocab num_embeddings",
    "length": "seq_len max_seq_len block_size max_length n_positions n_ctx context_length",
}
"""Kind of an argument -> usual names of it."""
_KIND = {name: kind for kind, names in USUAL_NAMES.items() for name in names.split()}
_OF_DATA = ("vocab", "length")
_HEADS, _HEAD_DIM, _DIM, _VOCAB, _BYTES, _LENGTH = 4, 8, 32, 64, 256, 32
"""Smallest sizes: four heads are two for each of two ranks."""


def with_smaller_arguments(config: RunConfig, defaults: Mapping[str, Any]) -> RunConfig:
    """Return the run with smaller `model.args`, and `data.args` that follow; unchanged if no
    argument has a usual name and a size to spare.

    defaults: what the constructor takes for arguments that are not given.
    """
    model, data = config.model, config.data
    argument_sizes = dict(_sizes({**defaults, **model.args}))
    sizes: dict[str, set[int]] = {}
    for name, size in argument_sizes.items():
        sizes.setdefault(_KIND[name], set()).add(size)
    clear = {kind: next(iter(names)) for kind, names in sizes.items() if len(names) == 1}
    small = _smaller(clear, config)
    fed = dict(_sizes(data.args))
    changed = {
        name: (size, small[kind])
        for name, size in argument_sizes.items()
        if (kind := _KIND[name]) in small
        and small[kind] < size
        and (kind not in _OF_DATA or fed.get(name) == size or (kind == "vocab" and _bytes(config)))
    }
    if not changed:
        return config
    added = {k: v for k, v in defaults.items() if k in changed and k not in model.args}
    return config.model_copy(
        update={
            "model": model.model_copy(update={"args": _replaced({**added, **model.args}, changed)}),
            "data": data.model_copy(update={"args": _replaced(data.args, changed)}),
        }
    )


def _bytes(config: RunConfig) -> bool:
    """Return whether a token is a byte."""
    return config.data.has_bytes


def _sizes(args: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in args.items():
        if isinstance(value, dict):
            yield from _sizes(value)
        elif name in _KIND and type(value) is int and value > 0:
            yield name, value


def _replaced(args: Mapping[str, Any], changed: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in args.items():
        was, becomes = changed.get(name, (None, None))
        if isinstance(value, dict):
            value = _replaced(value, changed)
        arguments[name] = becomes if type(value) is int and value == was else value
    return arguments


def _smaller(sizes: Mapping[str, int], config: RunConfig) -> dict[str, int]:
    """Return the smaller size of each kind of argument that can shrink."""
    small = {"vocab": _BYTES if _bytes(config) else _VOCAB, "length": _LENGTH}
    if config.pipeline.schedule != CUSTOM:
        stages = 2 * (config.pipeline.chunks or 2) if config.parallel.pipe > 1 else 1
        small["layers"] = 2 * stages
    dim, heads = sizes.get("dim"), sizes.get("heads")
    fewer = _HEADS if heads is not None and heads % _HEADS == 0 else heads
    if heads is not None and fewer is not None:
        shared = heads // sizes.get("kv_heads", heads)
        small["heads"], small["kv_heads"] = fewer, max(fewer // shared, 2 if shared > 1 else 1)
    small["head_dim"] = _HEAD_DIM
    if dim is not None:
        if heads is None or fewer is None or dim % heads:
            small["dim"] = _halved(dim, _DIM)
        else:
            small["dim"] = fewer * _halved(dim // heads, _HEAD_DIM)
    if (hidden := sizes.get("hidden")) is not None:
        if dim is None or hidden % dim:
            small["hidden"] = _halved(hidden, 2 * _DIM)
        else:
            small["hidden"] = hidden // dim * small["dim"]
    return small


def _halved(size: int, least: int) -> int:
    """Return `size` divided by a power of two, but not below `least`."""
    while size % 2 == 0 and size // 2 >= least:
        size //= 2
    return size
