"""`tdp plan FOLDER --tensor N`: how `tensor_parallel` would split a Hugging Face model."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from torchdistpackage.errors import ConfigError, NotAvailableError
from torchdistpackage.parallel.auto.explain import ParameterRow, PlanTable, explain
from torchdistpackage.parallel.auto.traffic import Traffic

Key = tuple[object, ...]
_OF_TORCH = torch.autocast


def split_table(path: Path, num_shards: int, seq_len: int, lists_all: bool) -> str:
    """The plan as text. Nothing is allocated: the model is made on the meta device.

    lists_all: each layer by itself, not equal ones in one row.

    Raises:
        ConfigError: there is no such model.
        LayoutError: it cannot be split over so many shards.
        NotAvailableError: transformers is not installed.
    """
    model = model_of(path)
    table = explain(model, num_shards)
    if hasattr(model, "set_experts_implementation"):  # transformers 5
        # The default one has no meta kernel but for bfloat16; what is sent is the same under all.
        model.set_experts_implementation("batched_mm")
    try:
        ids = {
            name: torch.zeros(1, seq_len, dtype=each.dtype, device="meta")
            for name, each in model.dummy_inputs.items()
        }
        with patch.object(torch, "autocast", _autocast):
            table = replace(table, traffic=explain(model, num_shards, kwargs=ids).traffic)
        sent = f"a forward of 1 x {seq_len} tokens"
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        sent = f"what a forward sends is not known without weights: {error}"
    title = f"{type(model).__name__} over {num_shards} shards, {model.dtype}; {sent}"
    return f"{title}\n\n{table if lists_all else folded(table)}"


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """torch's, but for the meta device, which it refuses: transformers 4 turns it off there."""
    return nullcontext() if device_type == "meta" else _OF_TORCH(device_type, *args, **kwargs)


def model_of(path: Path) -> Any:
    """The model of a config.json, on the meta device."""
    try:
        import transformers
    except ImportError as error:
        raise NotAvailableError(
            "the plan of a Hugging Face model needs transformers, which is not installed; install "
            'the extra hf: pip install "torchdistpackage[hf]"'
        ) from error
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} is not there; name a folder with the config.json of a model")
    try:
        config = transformers.AutoConfig.from_pretrained(
            file, local_files_only=True, trust_remote_code=False
        )
        name = (config.architectures or [""])[0]
        made: Any = getattr(transformers, name, None) if name else None
        if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
            made = partial(transformers.AutoModel.from_config, trust_remote_code=False)
        with torch.device("meta"):
            return made(config).to(config.dtype or torch.float32)
    except Exception as error:  # what a wrong setting raises depends on the family
        raise ConfigError(f"{file} describes no model of transformers: {error}") from error


def folded(table: PlanTable) -> PlanTable:
    """Layers that differ in nothing but their number in one row, with the bytes of all."""
    rows: dict[Key, list[ParameterRow]] = {}
    for row in table.parameters:
        key = (re.sub(r"\d+", "*", row.name), row.shape, row.cut, row.num_bytes)
        rows.setdefault(key, []).append(row)
    parameters = tuple(
        replace(
            same[0],
            name=named(same),
            num_bytes=tuple(len(same) * num for num in same[0].num_bytes),
        )
        for same in rows.values()
    )
    traffic: dict[str, Traffic] = {}
    for name, each in table.traffic.items():
        total = traffic.setdefault(re.sub(r"\d+", "*", name), Traffic({}, {}))
        for kind, calls in each.calls.items():
            total.calls[kind] = total.calls.get(kind, 0) + calls
            total.num_bytes[kind] = total.num_bytes.get(kind, 0) + each.num_bytes[kind]
    return replace(table, parameters=parameters, traffic=traffic)


def named(same: list[ParameterRow]) -> str:
    if len(same) == 1:
        return same[0].name
    return f"{len(same)} x {re.sub(r'[0-9]+', '*', same[0].name)}"
