"""Weights of a GPT from the safetensors folder of a transformers model.

Each rank reads its own slices of each tensor, so no rank ever holds a whole model. Nothing is sent.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from torchdistpackage.comm.primitives import Group
from torchdistpackage.config.hugging_face import model_keys, read_config
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import shape_of_section
from torchdistpackage.models.hugging_face_folder import read_weights
from torchdistpackage.models.hugging_face_layout import WeightFolder, open_folder, sources
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
    """Return the model of a transformers folder (GPT-2, Llama), or a stage of it, with its weights.

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
    weights = open_folder(folder, shape)  # refuses before a model takes memory
    options = {"pieces": pieces, "stage_of": stage_of, "dropout": dropout, "device": device}
    net = GPT(shape, group=group, axis=axis, dtype=dtype, **options)
    _fill(net, weights)
    return net


def load_weights(net: GPT, folder: str | Path) -> None:
    """Overwrite the parameters of `net`, a full model or a stage of one, with those of `folder`.

    Every rank reads its own part; values are converted to the parameters' type. For parameters on
    "meta" nothing but headers is read.

    Raises:
        CheckpointError: the folder has not exactly the weights of this model, as `open_folder`.
        LayoutError: transformers has no such model.
    """
    _fill(net, open_folder(folder, net.shape))


def _fill(net: GPT, weights: WeightFolder) -> None:
    layouts, shards = net.layouts(), Mesh(((net.axis, net.group.size()),))
    parameters = [(layouts[name], parameter) for name, parameter in net.named_parameters()]
    read_weights(weights, sources(net.shape), parameters, shards, net.group.rank())
