"""A folder of peft's adapters with the values from which a run continues: what it holds. No torch.

Only adapters that a run would itself write are read: of one rank and one scale for all layers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import parse_json, read_header, read_regular
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.hugging_face_layout import Source
from torchdistpackage.models.lora_layout import (
    ADAPTER_FILES,
    Lora,
    peft_name,
    peft_names,
    peft_shape,
)

_MAX_BYTES = 1 << 20
_SHOWN = 6
_UNREAD = {
    "peft_type": "LORA",
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}
"""Settings of peft that a run knows with this value alone, which is that of a folder without it."""


def adapter_sources(
    lora: Lora, layouts: Mapping[str, Layout], tied: Mapping[str, str]
) -> dict[str, tuple[Source, ...]]:
    """Return the tensors of each trained parameter in peft's files. layouts: of all, by name. tied:
    another name of a parameter, under which peft writes it too.
    """
    names = peft_names(layouts)
    return {
        name: tuple(
            Source(names.get(x) or peft_name(x), peft_shape(layout))
            for x in (name, tied.get(name))
            if x is not None
        )
        for name, layout in layouts.items()
        if lora.trains(name)
    }


def check_adapters(
    folder: str | Path, lora: Lora, sources: Mapping[str, tuple[Source, ...]]
) -> None:
    """Check that `folder` has the adapters of a run.

    sources: the tensor of each trained parameter.

    Raises:
        CheckpointError: there are none, or others, or with other settings: lists all that differ.
    """
    folder = Path(folder)
    file = folder / ADAPTER_FILES.weights
    try:
        found: Any = parse_json(read_regular(folder / ADAPTER_FILES.config, _MAX_BYTES).decode())
        header = read_header(file.resolve())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"model.lora.adapter={folder} cannot be read: {error}; name a folder with peft's "
            f"{ADAPTER_FILES.config} and {ADAPTER_FILES.weights}"
        ) from error
    settings: dict[str, Any] = found if isinstance(found, dict) else {}
    switches = {"use_rslora": lora.use_rslora, "use_dora": lora.use_dora}
    same = {"r": lora.r, "lora_alpha": lora.alpha, **switches}
    defaults = dict.fromkeys(switches, False)
    problems = [
        f"{key} is {settings.get(key)!r}, where model.lora has {value!r}"
        for key, value in same.items()
        if settings.get(key, defaults.get(key)) != value
    ]
    problems += [
        f"{key} is {settings[key]!r}, and {value!r} alone is read"
        for key, value in _UNREAD.items()
        if settings.get(key, value) not in (value, value or None)
    ]
    rows = settings.get("trainable_token_indices") or ()
    by_layer = rows.values() if isinstance(rows, dict) else [rows]
    if any(tuple(ids) != lora.trainable_token_indices for ids in by_layer):
        ids = list(lora.trainable_token_indices)
        problems.append(f"trainable_token_indices is {rows!r}, where model.lora has {ids!r}")
    expected = {x.key: x.shape for tensors in sources.values() for x in tensors}
    problems += [f"{name} is missing" for name in expected if name not in header]
    problems += [f"{name} is not expected" for name in header if name not in expected]
    problems += [
        f"{name} has shape {header[name].shape}, where the run has {shape}"
        for name, shape in expected.items()
        if name in header and header[name].shape != shape
    ]
    if not problems:
        return
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise CheckpointError(
        f"the adapters of model.lora.adapter={folder} are not those of this run: "
        f"{'; '.join(problems[:_SHOWN])}{more}; set r, alpha, use_rslora, use_dora and target as "
        f"they were trained, or name another folder"
    )
