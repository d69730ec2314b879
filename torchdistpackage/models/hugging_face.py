"""Weights of a GPT from the safetensors folder of a transformers model.

Each rank reads its own slices of each tensor, so no rank ever holds a whole model. Nothing is sent.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.hugging_face import model_keys, read_config
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import shape_of_section
from torchdistpackage.models.hugging_face_layout import (
    Source,
    WeightFolder,
    open_folder,
    sources,
)
from torchdistpackage.topology.mesh import Mesh


def from_pretrained(
    folder: str | Path,
    *,
    seq_len: int | None = None,
    sequence_parallel: bool = False,
    pieces: range | None = None,
    stage_of: Sequence[int] | None = None,
    group: Group | None = None,
    axis: str = "tensor",
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> GPT:
    """The model of a transformers folder (GPT-2, Llama), or a stage of it, with its weights.

    seq_len: the longest sequence to train on; default all that the model knows. The others are
    arguments of `GPT`.

    Raises:
        ConfigError: its config.json describes no model that a GPT can be.
        CheckpointError: the weights are not those that its config.json describes.
        LayoutError: the group cannot share the model.
    """
    keys = model_keys(read_config(folder), folder)
    seq_len = keys["max_seq_len"] if seq_len is None else seq_len
    shape = shape_of_section(keys, seq_len, sequence_parallel)
    found = open_folder(folder, shape)  # refuses before a model takes memory
    made = {"pieces": pieces, "stage_of": stage_of, "dropout": dropout, "device": device}
    net = GPT(shape, group=group, axis=axis, dtype=dtype, **made)
    _fill(net, found)
    return net


def load_weights(net: GPT, folder: str | Path) -> None:
    """Overwrite the parameters of `net`, a whole model or a stage of one, with those of `folder`.

    Every rank reads its own part; values are converted to the parameters' type. For parameters on
    "meta" nothing but headers is read.

    Raises:
        CheckpointError: the folder has not exactly the weights of this model, as `open_folder`.
        LayoutError: transformers has no such model.
    """
    _fill(net, open_folder(folder, net.shape))


@torch.no_grad()
def _fill(net: GPT, found: WeightFolder) -> None:
    made_of, layouts = sources(net.shape), net.layouts()
    mesh, index = Mesh(((net.axis, net.group.size()),)), net.group.rank()
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name, parameter in net.named_parameters():
            if parameter.is_meta:
                continue
            layout = layouts[name]
            for source, start in with_starts(made_of[layout.name]):
                file, key = found.places[source.key]
                if file not in files:
                    opened = safe_open(found.folder / file, framework="pt")
                    files[file] = stack.enter_context(opened)
                for target, piece in _pieces(parameter, layout, mesh, index, source, start):
                    part = files[file].get_slice(key)[piece]
                    target.copy_(part.t() if source.transposed else part)


def with_starts(parts: Sequence[Source]) -> Iterator[tuple[Source, int]]:
    """Each source with the first row of the parameter that it makes up."""
    start = 0
    for source in parts:
        yield source, start
        start += source.num_rows


def _pieces(
    parameter: Tensor, layout: Layout, mesh: Mesh, index: int, source: Source, start: int
) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Views of the shard at `index`, and the slices of the source, as stored, that go there."""
    for (rows, *rest), (local, *local_rest) in blocks(layout, mesh, index):
        first, last = max(rows.start, start), min(rows.stop, start + source.num_rows)
        if first >= last:
            continue
        room = slice(local.start + first - rows.start, local.start + last - rows.start)
        there = (slice(first - start, last - start), *rest)
        yield parameter[room, *local_rest], there[::-1] if source.transposed else there
