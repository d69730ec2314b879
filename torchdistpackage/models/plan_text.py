"""`tdp plan FOLDER --tensor N`: how a run with `parallel.tensor` would split a Hugging Face model.

A model without a table is shown as `tensor_parallel(model)` splits it, by a plan of rules.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from torchdistpackage.errors import ConfigError, LayoutError, NotAvailableError
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.table import LayerKind
from torchdistpackage.lazy import extension
from torchdistpackage.models.find_split import find_split, shape_of
from torchdistpackage.models.transformers_layout import split_table as trained_table
from torchdistpackage.parallel.auto.plan_table import ParameterRow, PlanTable, forward_traffic
from torchdistpackage.parallel.auto.traffic import Traffic
from torchdistpackage.topology.mesh import Mesh

Key = tuple[object, ...]
_OF_TORCH = torch.autocast


def split_table(path: Path, num_shards: int, seq_len: int, lists_all: bool) -> str:
    """Return the plan as text. Nothing is allocated: the model is made on the meta device.

    lists_all: each layer by itself, not equal ones in one row.

    Raises:
        ConfigError: there is no such model.
        LayoutError: it cannot be split over so many shards.
        NotAvailableError: transformers is not installed.
    """
    model = model_of(path)
    try:
        table, outputs = table_of(model, num_shards)
        basis = f"as tdp train splits {model.config.model_type}"
    except LayoutError as error:
        if (by_rules := extension("explained_rules")) is None:
            raise
        table, outputs = by_rules(model, num_shards)
        basis = f"by rules, as it has no table: {error}"
    if hasattr(model, "set_experts_implementation"):  # transformers 5
        # The default one has no meta kernel but for bfloat16; what is sent is the same under all.
        model.set_experts_implementation("batched_mm")
    try:
        ids = {
            name: torch.zeros(1, seq_len, dtype=each.dtype, device="meta")
            for name, each in model.dummy_inputs.items()
        }
        with patch.object(torch, "autocast", _autocast):
            table = replace(table, traffic=forward_traffic(model, outputs, (), ids))
        sends = f"a forward of 1 x {seq_len} tokens"
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        sends = f"what a forward sends is not known without weights: {error}"
    title = f"{type(model).__name__} over {num_shards} shards, {model.dtype}; {sends}"
    return f"{title}\n{basis}\n\n{table if lists_all else folded(table)}"


_SENT: dict[LayerKind, str] = {
    "row": "sum",
    "vocab": "sum",
    "feature": "gather",
    "joined": "gather",
}
"""Action of the ranks on the outputs of a layer."""


def table_of(model: Any, num_ranks: int) -> tuple[PlanTable, dict[str, dict[int, str]]]:
    """Return how ranks of a run share a model, and by path what they do with its layers' outputs.

    Raises:
        LayoutError: no table splits it.
    """
    shape = shape_of(model, num_ranks)
    split = find_split(shape, model)
    mesh = Mesh((("expert", 1), (split.axis, num_ranks)))
    rows = [
        _row(name, parameter, split.layouts[name], mesh)
        for name, parameter in model.named_parameters()
    ]
    if num_ranks == 1:
        return PlanTable(tuple(rows), {}, {}), {}
    module_names = {name for name, _ in model.named_modules()}
    cuts = trained_table(shape, split.axis)
    kinds = {path: kind for path, cut in cuts.layers.items() if (kind := _SENT.get(cut.kind))}
    sums = {
        *cuts.experts,
        *(n.rpartition(".")[0] for n, x in split.layouts.items() if "expert" in x.split_axes),
    }
    kinds |= dict.fromkeys(sums, "sum")
    return PlanTable(tuple(rows), {}, {}), {
        x: {0: kind} for x, kind in kinds.items() if x in module_names
    }


def _row(name: str, parameter: torch.Tensor, layout: Layout, mesh: Mesh) -> ParameterRow:
    shapes = tuple(local_shape(layout, mesh, rank) for rank in range(mesh.size))
    sizes = tuple(torch.Size(shape).numel() * parameter.element_size() for shape in shapes)
    return ParameterRow(name, tuple(parameter.shape), _cut_of(layout), shapes, sizes)


def _cut_of(layout: Layout) -> str:
    """Return how a parameter is cut, in words."""
    for dim, axes in enumerate(layout.split):
        if [axis for axis in axes if axis != "expert"]:
            parts = len(layout.parts[dim])
            inside = f" of {parts} parts" if parts else ""
            return f"dim {dim}{inside}{' by heads' if layout.heads is not None else ''}"
    return "whole, gradients summed" if layout.unreduced else "whole"


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Call torch.autocast, except on the meta device, which torch refuses; transformers 4 turns
    autocast off there.
    """
    return nullcontext() if device_type == "meta" else _OF_TORCH(device_type, *args, **kwargs)


def model_of(path: Path) -> Any:
    """Return the model of a config.json, on the meta device."""
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
        build: Any = getattr(transformers, name, None) if name else None
        if not (isinstance(build, type) and issubclass(build, transformers.PreTrainedModel)):
            build = partial(transformers.AutoModel.from_config, trust_remote_code=False)
        with torch.device("meta"):
            # in the dtype of the folder, since the table counts the bytes of its weights
            return build(config).to(config.dtype or torch.float32)
    except Exception as error:  # what a wrong setting raises depends on the family
        raise ConfigError(
            f"{file} describes no model of transformers: {error}; name a folder with the "
            "config.json of one"
        ) from error


def folded(table: PlanTable) -> PlanTable:
    """Join the rows of layers that differ only in their number, and add their bytes."""
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
