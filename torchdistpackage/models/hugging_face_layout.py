"""Map each parameter of a GPT to the tensors of a transformers folder that make it up. No torch.

A parameter is the tensors it comes from, one below the other along its dim 0; GPT-2 stores its
matrices transposed. Names are those that transformers saves: a tied head has none of its own.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torchdistpackage.bounded import (
    StoredTensor,
    parse_json,
    read_header,
    read_regular,
    same_bits,
)
from torchdistpackage.config.hugging_face import FILE as CONFIG
from torchdistpackage.config.hugging_face import GPT2_ACTIVATIONS, other_model, read_config
from torchdistpackage.errors import CheckpointError, LayoutError
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt_layout import GPTShape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 28
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
DTYPES = tuple(_TORCH_NAMES)
_SHOWN = 12

UNREAD = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Buffers that older versions saved: masks and frequencies."""


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of a folder: its name, its shape there, and whether it is stored transposed."""

    key: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that it makes up."""
        return self.shape[-1 if self.transposed else 0]


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The names of a folder's settings and weights, and whether the weights may be split over
    several files.

    stored: by key what a parameter is in the files, of its global name and value; None: the rows of
    its sources. ignored: the file and the shape of each tensor of a folder that the model leaves
    aside and an export keeps, by key; None: there are none.
    """

    config: str = CONFIG
    weights: str = SINGLE
    is_sharded: bool = True
    stored: Callable[[str, Any], Mapping[str, Any]] | None = None
    ignored: Callable[[Path], Mapping[str, tuple[Path, tuple[int, ...]]]] | None = None


def family_of(shape: GPTShape) -> str:
    """Return the model_type, gpt2 or llama, under which transformers loads a GPT of this shape.

    Raises:
        LayoutError: it is neither; lists for both what they have instead.
    """
    gelu = shape.mlp in GPT2_ACTIVATIONS.values()
    wants = {
        "gpt2": {
            "norm=layer": shape.norm == "layer",
            "position=learned": shape.position == "learned",
            "mlp=gelu or gelu_tanh": gelu,
            "attention_bias=true": shape.attention_bias,
            "mlp_bias=true": shape.mlp_bias,
            "kv_heads=heads": shape.num_kv_heads == shape.heads,
            "head_dim=dim / heads": shape.head_dim * shape.heads == shape.dim,
            "no moe": shape.moe is None,
        },
        "llama": {
            "norm=rms": shape.norm == "rms",
            "position=rotary": shape.position == "rotary",
            "mlp=swiglu": shape.mlp == "swiglu",
            "dim a multiple of heads": shape.dim % shape.heads == 0,
            "no moe": shape.moe is None,
        },
    }
    lacking = {name: [x for x, holds in of.items() if not holds] for name, of in wants.items()}
    for name, lacks in lacking.items():
        if not lacks:
            return name
    texts = [f"for {name}: {', '.join(lacks)}" for name, lacks in lacking.items()]
    raise LayoutError(f"gpt: transformers has no model of this shape; it needs, {'; '.join(texts)}")


def sources(shape: GPTShape) -> dict[str, tuple[Source, ...]]:
    """Return the tensors that make up each parameter, by global name in the model's order.

    Raises:
        LayoutError: transformers has no such model.
    """
    of = _gpt2 if family_of(shape) == "gpt2" else _llama
    shapes = {name: layout.shape for name, layout in gpt_layout.layouts(shape).items()}
    return {name: tuple(of(shape, name, full_shape)) for name, full_shape in shapes.items()}


_GPT2 = {
    "embed.weight": "transformer.wte.weight",
    "embed.position": "transformer.wpe.weight",
    "head.norm": "transformer.ln_f",
    "head.weight": "lm_head.weight",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA = {
    "embed.weight": ("model.embed_tokens.weight",),
    "head.norm": ("model.norm",),
    "head.weight": ("lm_head.weight",),
    "norm1": ("input_layernorm",),
    "norm2": ("post_attention_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q": ("self_attn.q_proj",),
    "attention.kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
"""Our name of a parameter, without the block and the last word -> transformers' name."""


def _gpt2(shape: GPTShape, name: str, full_shape: tuple[int, ...]) -> Iterator[Source]:
    if name in _GPT2:
        yield Source(_GPT2[name], full_shape)
        return
    block, module, last = _words(name)
    path = _GPT2[module] if block is None else f"transformer.h.{block}.{_GPT2[module]}"
    transposed = len(full_shape) == 2
    yield Source(f"{path}.{last}", full_shape[::-1] if transposed else full_shape, transposed)


def _llama(shape: GPTShape, name: str, full_shape: tuple[int, ...]) -> Iterator[Source]:
    if name in _LLAMA:
        yield Source(_LLAMA[name][0], full_shape)
        return
    block, module, last = _words(name)
    keys = _LLAMA[module]
    q, kv = shape.heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = (q, kv, kv) if len(keys) == 3 else (full_shape[0] // len(keys),) * len(keys)
    for key, num_rows in zip(keys, rows, strict=True):
        path = key if block is None else f"model.layers.{block}.{key}"
        yield Source(f"{path}.{last}", (num_rows, *full_shape[1:]))


def _words(name: str) -> tuple[str | None, str, str]:
    """Return (block, module, weight or bias) of a global name."""
    module, _, last = name.rpartition(".")
    if not module.startswith("blocks."):
        return None, module, last
    _, block, module = module.split(".", 2)
    return block, module, last


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """The safetensors files of a folder: for each tensor, by its name in a whole model, its file
    and its name there."""

    folder: Path
    places: Mapping[str, tuple[str, str]]


def open_folder(folder: str | Path, shape: GPTShape) -> WeightFolder:
    """Open a folder that has exactly the weights of a GPT; only headers are read.

    Raises:
        CheckpointError: it has no weights, or others: lists all that are missing, unexpected, or
            of another shape or type.
        LayoutError: transformers has no such model.
    """
    expected = {s.key: s.shape for parts in sources(shape).values() for s in parts}
    if not shape.tied:
        return find_tensors(folder, expected)
    (embedding,) = sources(shape)["embed.weight"]
    return find_tensors(folder, expected, ("lm_head.weight", embedding.key))


def find_tensors(
    folder: str | Path,
    expected: Mapping[str, tuple[int, ...]],
    tied: tuple[str, str] | None = None,
    other_names: Mapping[str, str] = MappingProxyType({}),
    *,
    unread: Collection[str] = (),
    is_causal: bool = True,
) -> WeightFolder:
    """Open a folder that has exactly the `expected` tensors, with these shapes.

    tied: of a tied head the name and that of the embedding it has to equal, bit by bit, in folders
        that have both. other_names: of tensors in the files -> in `expected`. unread: tensors that
        the files may have beside these. is_causal: the model is a causal language model.

    Raises:
        CheckpointError: it has no weights, or others: lists all that are missing, unexpected, or
            of another shape or type; or a tied head is not equal.
    """
    folder = Path(folder)
    stored = dict(headers(folder))
    stored_names = _in_whole_model(stored, expected)
    names = {other_names.get(name, name): found_as for name, found_as in stored_names.items()}
    head = None if tied is None else names.pop(tied[0], None)
    names = {name: found_as for name, found_as in names.items() if name not in unread}
    problems = [f"{key} is missing" for key in expected if key not in names]
    problems += [
        f"{found_as} is not expected" for key, found_as in names.items() if key not in expected
    ]
    for key, shape_wanted in expected.items():
        if key in names:
            _, has = stored[names[key]]
            if has.shape != shape_wanted:
                problems.append(
                    f"{names[key]} has shape {has.shape}, where the model has {shape_wanted}"
                )
            elif has.dtype not in DTYPES:
                problems.append(
                    f"{names[key]} is of type {has.dtype}, but only {DTYPES} can be read"
                )
    if problems:
        if is_causal and (text := other_model(folder)):
            raise CheckpointError(text)
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"the weights in {folder} do not fit this model: {len(problems)} of {len(expected)} "
            f"tensors differ: {'; '.join(problems[:_SHOWN])}{more}; use the model section that "
            "its config.json describes, or another folder"
        )
    if tied is not None and head is not None:
        _check_tied(folder, stored, head, names[tied[1]])
    return WeightFolder(folder, {key: (stored[names[key]][0], names[key]) for key in expected})


def _check_tied(
    folder: Path, stored: Mapping[str, tuple[str, StoredTensor]], head: str, embedding: str
) -> None:
    """Raise CheckpointError if the head differs from the embedding, because one of them would be
    lost.
    """
    head_tensor, other = (
        ((folder / file).resolve(), x) for file, x in (stored[head], stored[embedding])
    )
    try:
        if same_bits(head_tensor, other):
            return
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    raise CheckpointError(
        f"{folder}: {CONFIG} ties the output matrix to the embedding, but {head} in "
        f"{stored[head][0]} differs from {embedding}; set tie_word_embeddings to false in {CONFIG} "
        f"to train both, or remove {head} from the weights"
    )


def _in_whole_model(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, str]:
    """Map the names in a model with a head to the names in the files, which may hold a model
    without one.
    """
    prefix = next(iter(expected)).partition(".")[0] + "."
    bare = not any(name.startswith(prefix) for name in stored)
    return {
        prefix + name if bare and name != "lm_head.weight" else name: name
        for name in stored
        if not UNREAD.search(f".{name}")
    }


def folder_dtype(folder: str | Path) -> str | None:
    """Return torch's name of the type in which transformers loads a folder with `dtype="auto"`:
    that in config.json, else that of the first tensor; None if neither says one.

    Raises:
        ConfigError: it has no readable config.json.
    """
    config = read_config(folder)
    named = config.get("dtype", config.get("torch_dtype"))
    if named in _TORCH_NAMES.values():
        return str(named)
    try:
        types = [stored.dtype for _, (_, stored) in headers(Path(folder))]
    except CheckpointError:  # a config.json alone, or its weights are gone
        return None
    return next((_TORCH_NAMES[x] for x in types if x in _TORCH_NAMES), None)


def headers(folder: Path) -> Iterator[tuple[str, tuple[str, StoredTensor]]]:
    """Yield the name of each tensor of a folder, with its file and its header.

    Raises:
        CheckpointError: the folder has no weights, or lacks a file of them.
    """
    listed = _listed(folder)
    for file in dict.fromkeys(listed.values()) if listed else (SINGLE,):
        try:
            header = read_header((folder / file).resolve())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / file} cannot be read: {error}") from error
        for key, stored in header.items():
            if not listed or listed.get(key) == file:
                yield key, (file, stored)


def _listed(folder: Path) -> dict[str, str]:
    """Return the file of each tensor according to the index; empty if one file holds all."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; name the folder of a transformers model")
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return {}
        others = sorted(x.name for x in folder.iterdir() if x.suffix in (".bin", ".pt", ".pth"))
        pickled = f" ({', '.join(others[:3])} would run code when read)" if others else ""
        raise CheckpointError(
            f"{folder} has no weights: neither {SINGLE} nor {INDEX}{pickled}; save the model with "
            f"save_pretrained(..., safe_serialization=True)"
        )
    try:
        index = parse_json(read_regular((folder / INDEX).resolve(), _MAX_INDEX_BYTES).decode())
        listed = cast(dict[str, str], dict(index["weight_map"]))
        plain = all(isinstance(x, str) and x == Path(x).name for x in listed.values())
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / INDEX} cannot be read: {error!r}") from error
    if not plain or not listed:
        raise CheckpointError(
            f"{folder / INDEX}: weight_map names no files of this folder; download the folder again"
        )
    missing = sorted({file for file in listed.values() if not (folder / file).is_file()})
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(set(listed.values()))} files that {INDEX} "
            f"names: {', '.join(missing[:_SHOWN])}; copy them there"
        )
    return listed
