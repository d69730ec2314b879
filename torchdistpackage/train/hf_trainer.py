"""Read checkpoints of transformers' Trainer, and of trl's trainers, which save in the same form.

The weights have the names of `model.hf`. The optimizer's state has numbers instead of names: its
first group holds the parameters that decay, in the order of the model, its second the others. So
the model of config.json is made without memory, and transformers tells which of its names decay.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.checkpoint.commit import folder_name
from torchdistpackage.checkpoint.formats.files import read_safetensors
from torchdistpackage.checkpoint.formats.importing import write_checkpoint
from torchdistpackage.checkpoint.formats.source import TensorSource
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.config.hugging_face import ADAPTER_FILE, TRAINER_STATE, read_config
from torchdistpackage.errors import CheckpointError
from torchdistpackage.models.transformers_meta import on_meta

IMPORTED_FROM = "imported_from"
"""Fact of a checkpoint that `tdp checkpoint import` writes too."""
_OPTIMIZER = "optimizer.pt"
_MAX_BYTES = 1 << 28
_KEYS = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""Keys of AdamW's state, as in a run with optim.name=adamw."""
_NOT_DECAYING = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Names without decay, by `Trainer.get_decay_parameter_names` of transformers 4.56 to 5."""


def read_hf_trainer(path: Path) -> TensorSource:
    """Return the weights and optimizer state of a folder checkpoint-N, under the names that our
    checkpoints use for `model.hf`.

    Raises:
        CheckpointError: it is no such folder, is one of adapters, of DeepSpeed or FSDP, was saved
            without its optimizer, or its state is not that of AdamW for the model of config.json.
    """
    state = _trainer_state(path)
    if (path / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{path} has {ADAPTER_FILE}: adapters of peft, whose optimizer state cannot be read; "
            "merge them into a folder and train from it (model.hf)"
        )
    if not (path / _OPTIMIZER).is_file():
        raise CheckpointError(
            f"{path} has no {_OPTIMIZER}: it was saved with save_only_model, or by DeepSpeed or "
            f"FSDP; train from its weights with model.hf={path}"
        )
    weights = read_safetensors(path)
    try:
        loaded = torch.load(path / _OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        groups, states = loaded["param_groups"], loaded["state"]
        numbers = [[int(number) for number in group["params"]] for group in groups]
    except Exception as error:  # torch raises many kinds
        raise CheckpointError(f"{path / _OPTIMIZER} cannot be read: {error}") from error
    name_of = _names_of(path, groups, numbers)
    tensors: dict[str, Tensor] = {}
    for number, name in name_of.items():
        tensors |= _state_of(path, name, states.get(number), weights)
    described = {name: (dtype_name(x.dtype), tuple(x.shape)) for name, x in tensors.items()}

    def read(name: str) -> Tensor:
        return tensors[name] if name in tensors else weights.read(name)

    tokens = state.get("num_input_tokens_seen") or 0
    return TensorSource({**weights.tensors, **described}, read, state["global_step"], int(tokens))


def import_hf_trainer(path: Path, folder: Path) -> Path:
    """Convert a folder checkpoint-N to our format in `folder`, unless an earlier start did, and
    return its path.

    Raises CheckpointError as `read_hf_trainer`.
    """
    source = read_hf_trainer(path)
    written = folder / folder_name(source.step)
    facts = {IMPORTED_FROM: str(path.absolute())}
    if written.exists() and read_manifest(written).facts.get(IMPORTED_FROM) == facts[IMPORTED_FROM]:
        return written
    return write_checkpoint(replace(source, facts=facts), folder)


def _trainer_state(path: Path) -> dict[str, Any]:
    try:
        state = parse_json(read_regular(path / TRAINER_STATE, _MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of transformers' Trainer: {TRAINER_STATE} cannot be read "
            f"({error}); name a folder such as checkpoint-500"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        raise CheckpointError(f"{path / TRAINER_STATE} has no global_step; name another checkpoint")
    return state


def _names_of(
    path: Path, groups: list[Mapping[str, Any]], numbers: list[list[int]]
) -> dict[int, str]:
    """Return the name of each number of a parameter in the optimizer's groups."""
    names_of_groups = [group.get("param_names") for group in groups]
    if all(names_of_groups):
        names = [str(name) for group in names_of_groups for name in group or ()]
        return dict(zip((n for group in numbers for n in group), names, strict=True))
    decaying, others = _split_names(path)
    counts = [len(group) for group in numbers]
    expected = [len(decaying), len(others)]
    if counts != expected:
        raise CheckpointError(
            f"{path / _OPTIMIZER} has groups of {counts} parameters, where the model of its "
            f"config.json has {expected[0]} that decay and {expected[1]} others; it was trained "
            f"with another model, with frozen weights, or with groups of its own: train from its "
            f"weights with model.hf={path}"
        )
    names = [*decaying, *others]
    return dict(zip((n for group in numbers for n in group), names, strict=True))


def _split_names(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the model's parameters with decay, and of the others, in model order."""
    from transformers.trainer_pt_utils import get_parameter_names

    model: Any = on_meta(read_config(path))
    names = [name for name, _ in model.named_parameters()]
    decaying = {*get_parameter_names(model, [nn.LayerNorm], list(_NOT_DECAYING))}
    return [x for x in names if x in decaying], [x for x in names if x not in decaying]


def _state_of(path: Path, name: str, state: Any, weights: TensorSource) -> dict[str, Tensor]:
    """Return the state of a parameter by the names of our checkpoints."""
    if name not in weights.tensors:
        raise CheckpointError(
            f"{path} has no weight {name}, which its optimizer has a state of; name "
            "another checkpoint"
        )
    if not isinstance(state, Mapping) or {*state} != _KEYS:
        keys = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else "none"
        raise CheckpointError(
            f"{path / _OPTIMIZER} has the state {keys} of {name}, where AdamW has "
            f"{', '.join(sorted(_KEYS))}; train from its weights with model.hf={path}"
        )
    shape = weights.tensors[name][1]
    for key in ("exp_avg", "exp_avg_sq"):
        if tuple(state[key].shape) != shape:
            raise CheckpointError(
                f"{path / _OPTIMIZER}: {key} of {name} has shape {tuple(state[key].shape)}, its "
                f"weight {shape}; put the config.json of this optimizer's model beside it"
            )
    return {f"{name}#{key}": state[key] for key in sorted(_KEYS)}
