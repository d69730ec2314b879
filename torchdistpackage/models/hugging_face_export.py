"""A GPT as a folder that transformers loads: config.json and safetensors files.

One process writes, file by file: it holds the tensors of one file, and one whole parameter. The
folder has its name once it is complete.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchdistpackage import errors
from torchdistpackage.comm import primitives
from torchdistpackage.comm.p2p import receive, send
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.config.hugging_face import FILE, GPT2_ACTIVATIONS, read_config
from torchdistpackage.errors import CheckpointError, LayoutError, TorchDistError
from torchdistpackage.layout.derive import blocks, local_shape, owns
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.hugging_face import with_starts
from torchdistpackage.models.hugging_face_layout import INDEX, SINGLE, Source, family_of, sources
from torchdistpackage.topology.mesh import Mesh

SHARD_BYTES = 5_000_000_000
"""Largest file by default."""
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    "generation_config.json",
)
"""Files that go with a model, copied from the folder that it was made from."""


def config_json(
    shape: GPTShape, dtype: torch.dtype, like: str | Path | None = None
) -> dict[str, Any]:
    """The config.json of a model.

    like: a folder whose other settings (special tokens, ...) are kept.

    Raises:
        LayoutError: transformers has no such model.
        ConfigError: `like` has no readable config.json.
    """
    family = family_of(shape)
    kept = {"bos_token_id": None, "eos_token_id": None}
    if like is not None:
        kept = read_config(like)
        kept.pop("torch_dtype", None)
    known = _gpt2(shape) if family == "gpt2" else _llama(shape)
    return {**kept, **known, "model_type": family, "dtype": str(dtype).removeprefix("torch.")}


def _gpt2(shape: GPTShape) -> dict[str, Any]:
    activations = {ours: theirs for theirs, ours in reversed(GPT2_ACTIVATIONS.items())}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": shape.layers,
        "n_embd": shape.dim,
        "n_head": shape.heads,
        "n_inner": shape.hidden,
        "n_positions": shape.num_positions,
        "vocab_size": shape.vocab,
        "activation_function": activations[shape.mlp],
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
    }


def _llama(shape: GPTShape) -> dict[str, Any]:
    rope = {k: v for k, v in asdict(shape.rope).items() if k != "theta" and v is not None}
    kind = rope.pop("type")
    today = {"rope_theta": shape.rope.theta, "rope_type": kind, **rope}
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.dim,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.num_positions,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": today,
        # as versions before 5 read it
        "rope_theta": shape.rope.theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
    }


def check_new(folder: str | Path) -> None:
    """Raises CheckpointError if `folder` is there and not empty: old files would mix with new."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty; name a new folder, or remove it")


def write_folder(
    folder: str | Path,
    shape: GPTShape,
    whole: Callable[[str], Tensor],
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
    like: str | Path | None = None,
) -> Path:
    """Write config.json and the weights to `folder`, which is new or empty; returns it.

    whole: the parameter of a global name, asked for once each in the order of `sources(shape)`.
    dtype: type of the weights in the files.
    shard_bytes: the largest file, as transformers' max_shard_size; one tensor may be larger.
    like: a folder of a transformers model whose other settings and tokenizer are kept.

    Raises:
        CheckpointError: the folder is not empty, or cannot be written; nothing of it is left.
        LayoutError: transformers has no such model.
    """
    folder, config = Path(folder), config_json(shape, dtype, like)
    check_new(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        _write_weights(temporary, shape, whole, dtype, shard_bytes)
        (temporary / FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in COMPANIONS if like is not None else ():
            if (companion := Path(like or "") / name).is_file():
                shutil.copyfile(companion, temporary / name)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_weights(
    folder: Path,
    shape: GPTShape,
    whole: Callable[[str], Tensor],
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    made_of = sources(shape)
    in_order = [source for of in made_of.values() for source in of]
    chunks = list(_chunks(in_order, dtype.itemsize, shard_bytes))
    files = [SINGLE]
    if len(chunks) > 1:
        files = [f"model-{i:05}-of-{len(chunks):05}.safetensors" for i in range(1, len(chunks) + 1)]
    tensors = _stored(made_of, whole, dtype)
    for file, chunk in zip(files, chunks, strict=True):
        save_file(dict(islice(tensors, len(chunk))), folder / file, metadata={"format": "pt"})
    if len(chunks) > 1:
        places = {x.key: file for file, of in zip(files, chunks, strict=True) for x in of}
        number = sum(math.prod(source.shape) for source in in_order)
        size = {"total_parameters": number, "total_size": number * dtype.itemsize}
        index = {"metadata": size, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _chunks(parts: Iterable[Source], itemsize: int, shard_bytes: int) -> Iterator[list[Source]]:
    """Sources of one file each, in order, as many as fit."""
    held: list[Source] = []
    num_bytes = 0
    for source in parts:
        more = math.prod(source.shape) * itemsize
        if held and num_bytes + more > shard_bytes:
            yield held
            held, num_bytes = [], 0
        held.append(source)
        num_bytes += more
    yield held


def _stored(
    made_of: Mapping[str, tuple[Source, ...]], whole: Callable[[str], Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each source, as it is stored."""
    for name, of in made_of.items():
        full = whole(name).detach()
        for source, start in with_starts(of):
            rows = full[start : start + source.num_rows]
            stored = rows.t() if source.transposed else rows
            # a copy, since tensors of one file must not share memory
            yield source.key, stored.to("cpu", dtype).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def save_weights(
    stages: GPT | Iterable[GPT],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    like: str | Path | None = None,
) -> Path:
    """Write the model that the ranks hold as a folder that `from_pretrained` of transformers loads.

    All ranks call it, each with its stages of one model, which may be none; the first rank gets
    one parameter at a time and writes. The rest as in `write_folder`.

    dtype: of the files; default that of the parameters.

    Raises:
        TorchDistError: on all ranks what `write_folder` raises on the first, or LayoutError if a
            rank does not hold its whole shards (ZeRO 3).
    """
    nets = [stages] if isinstance(stages, GPT) else list(stages)
    ranks = _RanksOfModel(nets)
    dtype = ranks.dtype if dtype is None else dtype
    names = iter(sources(ranks.shape))

    def check() -> None:
        check_new(folder)
        config_json(ranks.shape, dtype, like)

    def write() -> None:
        how = {"shard_bytes": shard_bytes, "like": like}
        write_folder(folder, ranks.shape, lambda _: ranks.whole(next(names)), dtype, **how)

    ranks.raise_all(ranks.try_on_first(check))
    error = ranks.try_on_first(write)
    for name in names:  # of the other ranks all, of the first what is left if it failed
        ranks.whole(name)
    ranks.raise_all(error)
    return Path(folder)


class _RanksOfModel:
    """Whole parameters of a model from the ranks that hold its parts.

    Raises:
        LayoutError: a rank does not hold the whole of its shards.
    """

    def __init__(self, nets: list[GPT]):
        self.held: dict[str, Tensor] = {}
        for net in nets:
            layouts = net.layouts()
            for name, parameter in net.named_parameters():
                self.held.setdefault(layouts[name].name, parameter.detach())
        if tpc.is_set:
            self.mesh, self.group = tpc.topology.dense, resolve_group(None, "global")
        else:
            self.group = nets[0].group
            self.mesh = Mesh(((nets[0].axis, self.group.size()),))
        self.ranks, self.rank = primitives.ranks_of(self.group), self.group.rank()
        mine = [(net.shape, net.stage_of, net.axis, _dtype_of(net)) for net in nets]
        all_mine = primitives.gather_objects(mine, self.group)
        first = next(x for found in all_mine for x in cast(list[Any], found))
        self.shape, stage_of, axis, self.dtype = first
        self.layouts = gpt_layout.layouts(self.shape, stage_of, axis)
        self._check()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def try_on_first(self, act: Callable[[], None]) -> TorchDistError | None:
        """What `act` raised on the first rank; nothing is done elsewhere."""
        try:
            if self.is_first:
                act()
        except TorchDistError as error:
            return error
        return None

    def raise_all(self, error: TorchDistError | None) -> None:
        """Raise what the first rank met on every rank."""
        word = None if error is None else (type(error).__name__, str(error))
        said = primitives.broadcast_object(word, self.group)
        if error is not None:
            raise error
        if said is not None:
            kind, text = cast(tuple[str, str], said)
            raise getattr(errors, kind, CheckpointError)(text)

    def whole(self, name: str) -> Tensor:
        """The parameter on the first rank; elsewhere what this rank sent of it."""
        layout = self.layouts[name]
        full = torch.empty(layout.shape, dtype=self.dtype) if self.is_first else torch.empty(0)
        for rank in range(self.mesh.size):
            if not owns(layout, self.mesh, rank):
                continue
            mine = self.held.get(name) if rank == self.rank else None
            if self.is_first and mine is None:
                room = torch.empty(local_shape(layout, self.mesh, rank), dtype=self.dtype)
                mine = receive(self._reachable(room), self.group, self.ranks[rank])
            if self.is_first and mine is not None:
                for where, local in blocks(layout, self.mesh, rank):
                    full[where] = mine[local].to("cpu")
            elif mine is not None:
                send(self._reachable(mine).contiguous(), self.group, self.ranks[0])
        return full

    def _reachable(self, x: Tensor) -> Tensor:
        """On the device that the group's messages need."""
        return x if not self.held else x.to(next(iter(self.held.values())).device)

    def _check(self) -> None:
        problem = None
        for name, parameter in self.held.items():
            wanted = local_shape(self.layouts[name], self.mesh, self.rank)
            if tuple(parameter.shape) != wanted:
                problem = (
                    f"{name} has shape {tuple(parameter.shape)} on rank {self.rank}, where the "
                    f"model has {wanted}; under ZeRO 3 save a checkpoint and use tdp export"
                )
                break
        for found in primitives.gather_objects(problem, self.group):
            if found is not None:
                raise LayoutError(str(found))


def _dtype_of(net: GPT) -> torch.dtype:
    return next((x.dtype for x in net.parameters()), torch.float32)
