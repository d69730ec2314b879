"""A transformers folder: config.json, safetensors files, and a model's companion files.

All ranks read their own shards, file by file. One process writes, file by file: it holds the
tensors of one file, and one full parameter. The folder gets its name once it is complete.
"""

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchdistpackage.config.chat_templates import template_files
from torchdistpackage.config.hugging_face import config_file, tagged, taken
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.hugging_face_layout import INDEX, FolderFiles, Source, WeightFolder
from torchdistpackage.topology.mesh import Mesh

SHARD_BYTES = 5_000_000_000
"""Largest file by default."""
TRANSFORMERS_FILES = FolderFiles()
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
"""Files that accompany a model, copied from the folder it was made from; templates are copied
too.
"""


@torch.no_grad()
def read_weights(
    folder: WeightFolder,
    made_of: Mapping[str, Sequence[Source]],
    parameters: Iterable[tuple[Layout, Tensor]],
    mesh: Mesh,
    index: int,
) -> None:
    """Overwrite parameters with those of a folder, converted to their types.

    folder: the opened files. made_of: maps a parameter's global name, as in its layout, to the
        tensors that make it up, one below the other. parameters: each is the shard of its layout
        at `index` of `mesh`; those on "meta" are left alone.
    """
    by_file = defaultdict[str, list[tuple[str, Source, int, Layout, Tensor]]](list)
    for layout, parameter in parameters:
        if not parameter.is_meta:
            for source, start in with_starts(made_of[layout.name]):
                file, key = folder.places[source.key]
                by_file[file].append((key, source, start, layout, parameter))
    for file, sources_of_file in by_file.items():
        with safe_open(folder.folder / file, framework="pt") as opened:
            for key, source, start, layout, parameter in sources_of_file:
                stored = opened.get_slice(key)
                for target, piece in _pieces(parameter, layout, mesh, index, source, start):
                    part = stored[piece]
                    target.copy_(part.t() if source.transposed else part)


def with_starts(parts: Sequence[Source]) -> Iterator[tuple[Source, int]]:
    """Yield each source with the first row of the parameter that it fills."""
    start = 0
    for source in parts:
        yield source, start
        start += source.num_rows


def _pieces(
    parameter: Tensor, layout: Layout, mesh: Mesh, index: int, source: Source, start: int
) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield views of the shard at `index`, each with the slices of the stored source that fill
    it.
    """
    for (rows, *rest), (local, *local_rest) in blocks(layout, mesh, index):
        first, last = max(rows.start, start), min(rows.stop, start + source.num_rows)
        if first >= last:
            continue
        room = slice(local.start + first - rows.start, local.start + last - rows.start)
        region = (slice(first - start, last - start), *rest)
        yield parameter[room, *local_rest], region[::-1] if source.transposed else region


def check_new(folder: str | Path) -> None:
    """Raise CheckpointError if `folder` exists and is not empty."""
    if problem := taken(folder):
        raise CheckpointError(problem)


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    made_of: Mapping[str, tuple[Source, ...]],
    gather_full: Callable[[str], Tensor],
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
    like: str | Path | None = None,
    files: FolderFiles = TRANSFORMERS_FILES,
) -> Path:
    """Write config.json and the weights to `folder`, which is new or empty; returns it.

    config: the config.json. files: what it and the weights are called.
    made_of: for each parameter, by global name, the tensors of the files that it makes up.
    gather_full: returns the full parameter of a global name; it is called once for each, in the
        order of `made_of`.
    dtype: type of the weights in the files.
    shard_bytes: the largest file, as transformers' max_shard_size; one tensor may be larger.
    like: a folder of a transformers model, or its config.json, whose tokenizer is kept.

    Raises:
        CheckpointError: the folder is not empty, or cannot be written; nothing of it is left.
    """
    with new_folder(folder) as written:
        _write_weights(written, made_of, gather_full, dtype, shard_bytes, files)
        text = json.dumps(tagged(config), indent=2, sort_keys=True)
        (written / files.config).write_text(text + "\n")
        copy_companions(like, written)
    return Path(folder)


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder to write to, and rename it to `folder`, new or empty, once all is
    written.

    Raises:
        CheckpointError: the folder is not empty, or cannot be written; nothing of it is left.
    """
    folder = Path(folder)
    check_new(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_companions(like: str | Path | None, folder: Path) -> None:
    """Copy the tokenizer and settings of a folder, or of a config.json's folder, into `folder`."""
    if like is None:
        return
    source = config_file(like).parent
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for file in template_files(source):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def _write_weights(
    folder: Path,
    made_of: Mapping[str, tuple[Source, ...]],
    gather_full: Callable[[str], Tensor],
    dtype: torch.dtype,
    shard_bytes: int,
    named: FolderFiles,
) -> None:
    in_order = [source for of in made_of.values() for source in of]
    chunks = (
        list(_chunks(in_order, dtype.itemsize, shard_bytes)) if named.is_sharded else [in_order]
    )
    files = [named.weights]
    if len(chunks) > 1:
        files = [f"model-{i:05}-of-{len(chunks):05}.safetensors" for i in range(1, len(chunks) + 1)]
    tensors = _stored(made_of, gather_full, dtype, named)
    for file, chunk in zip(files, chunks, strict=True):
        save_file(dict(islice(tensors, len(chunk))), folder / file, metadata={"format": "pt"})
    if len(chunks) > 1:
        places = {x.key: file for file, of in zip(files, chunks, strict=True) for x in of}
        number = sum(math.prod(source.shape) for source in in_order)
        size = {"total_parameters": number, "total_size": number * dtype.itemsize}
        index = {"metadata": size, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _chunks(parts: Iterable[Source], itemsize: int, shard_bytes: int) -> Iterator[list[Source]]:
    """Yield the sources of each file in order, as many per file as fit."""
    chunk: list[Source] = []
    num_bytes = 0
    for source in parts:
        more = math.prod(source.shape) * itemsize
        if chunk and num_bytes + more > shard_bytes:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(source)
        num_bytes += more
    yield chunk


def _stored(
    made_of: Mapping[str, tuple[Source, ...]],
    gather_full: Callable[[str], Tensor],
    dtype: torch.dtype,
    named: FolderFiles,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each source, as it is stored."""
    for name, of in made_of.items():
        full = gather_full(name).detach()
        parts = _rows(full, of) if named.stored is None else named.stored(name, full)
        for source in of:
            # a copy, since tensors of one file must not share memory
            part = parts[source.key]
            on_cpu = part.to("cpu", dtype if part.is_floating_point() else part.dtype)
            yield source.key, on_cpu.clone(memory_format=torch.contiguous_format)


def _rows(full: Tensor, of: Sequence[Source]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for source, start in with_starts(of):
        rows = full[start : start + source.num_rows]
        tensors[source.key] = rows.t() if source.transposed else rows
    return tensors
