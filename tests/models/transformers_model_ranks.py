"""What ranks do with stages of transformers' own modules: differences, and memory."""

import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.hugging_face import read_config
from torchdistpackage.errors import ConfigError, DataError, NotAvailableError
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.families.table import DocumentsWay
from torchdistpackage.models import transformers_layout
from torchdistpackage.models.lora_layout import Lora
from torchdistpackage.models.transformers_layout import TransformersShape, shape_of_section
from torchdistpackage.models.transformers_model import load_weights, on_meta, stage


def different_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> (shape by transformers, shape by the table) where they are not the same."""
    shape = TransformersShape(settings["model_type"], settings, 8)
    named = on_meta(shape).named_parameters()
    real = {transformers_layout.global_name(shape, n): tuple(p.shape) for n, p in named}
    known = {n: layout.shape for n, layout in transformers_layout.layouts(shape).items()}
    names = real.keys() | known.keys()
    return {n: (real.get(n), known.get(n)) for n in names if real.get(n) != known.get(n)}


def different_defaults(family: str) -> dict[str, Any]:
    """Setting -> (transformers' default, ours) where they are not the same; None: derived."""
    from transformers import CONFIG_MAPPING

    real = CONFIG_MAPPING[family]()
    mine = FAMILIES[family].defaults
    return {
        name: (getattr(real, name), value)
        for name, value in mine.items()
        if value is not None and hasattr(real, name) and getattr(real, name) != value
    }


def different_under_other_keys(family: str, folder: str) -> dict[str, Any]:
    """Setting -> (by transformers, as read) where a config.json says it twice and they differ."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    older = {"n_embed": "hidden_size"} if family in ("bloom", "falcon") else {}
    keys = {**kind.attribute_map, **older}
    mine = FAMILIES[family].defaults
    twice = {key: name for key, name in keys.items() if name in mine}
    given = {"model_type": family, **dict.fromkeys(twice.values(), 24), **dict.fromkeys(twice, 48)}
    path = Path(folder) / f"{family}.json"
    path.write_text(json.dumps(given))
    real, read = kind.from_dict(dict(given)), read_config(path)
    pairs = {name: (getattr(real, name), read[name]) for name in twice.values()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def initial_of_transformers(settings: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """(mean, standard deviation) of every parameter as transformers draws it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[settings["model_type"]].from_dict(dict(settings))
    model = AutoModelForCausalLM.from_config(config)
    shape = TransformersShape(settings["model_type"], settings, 8)
    return {
        transformers_layout.global_name(shape, n): (p.mean().item(), p.std().item())
        for n, p in model.named_parameters()
    }


def frequencies(settings: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Rotary ones as the installed transformers makes them; and of one that says it is older."""
    shape = TransformersShape(settings["model_type"], settings, 8)
    first = _frequencies(on_meta(shape))
    with patch("torchdistpackage.config.packages.version", lambda _: "4.57.0"):
        return first, _frequencies(on_meta(shape))


def _frequencies(model: torch.nn.Module) -> list[float]:
    found = {n: x for n, x in model.named_buffers() if n.endswith("rotary_emb.inv_freq")}
    (only,) = found.values()
    return only.tolist()


def memory_of_loading(folder: str, tensor: int) -> tuple[int, int]:
    """(most bytes in use while a stage is built and read, above those before; bytes it holds)."""
    tpc.setup_process_groups([("tensor", tensor)])
    shape = shape_of_section({"hf": folder}, 8, False)
    group = tpc.get_group("tensor")
    load_weights(stage(shape, group=group), folder)  # what is imported and kept on first use
    gc.collect()
    before = _forget_peak()
    made = stage(shape, group=group)
    load_weights(made, folder)
    return _status("VmHWM") - before, sum(p.numel() * p.element_size() for p in made.parameters())


def _forget_peak() -> int:
    """Begin anew with the largest memory; the memory in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found) * 1024


def what_is_refused(settings: Mapping[str, Any], alibi: Mapping[str, Any]) -> list[str]:
    """By transformers, of data whose documents this model cannot keep apart, of old packages."""
    said = []
    try:
        stage(TransformersShape(settings["model_type"], {**settings, "hidden_act": "none"}, 8))
    except ConfigError as error:
        said.append(str(error))
    made = stage(TransformersShape(alibi["model_type"], alibi, 8))
    made.shape.__dict__["documents_way"] = DocumentsWay("not", "its states go on")
    ids = torch.zeros(1, 8, dtype=torch.int64)
    try:
        made(ids, position_ids=ids)
    except DataError as error:
        said.append(str(error))
    with patch("torchdistpackage.config.packages.version", lambda _: "0.13"):
        try:
            on_meta(replace(made.shape, lora=Lora(8, 8.0, 0.0, ("dense",))))
        except NotAvailableError as error:
            said.append(str(error))
    return said
