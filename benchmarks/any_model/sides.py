"""One model split in several ways. A side is made from a `Case` and the folder of its files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.pytorch_utils import Conv1D

from benchmarks.any_model.models import Case, make
from torchdistpackage import save_tensor_parallel, tensor_parallel

OURS, MESSAGES = "ours", "its messages alone"
ALONE = ("one process", "ours, threads")
"""Sides that only rank 0 runs."""


@dataclass
class Side:
    """whole: all weights, on all ranks that run the side, by the names of the model."""

    model: Any
    whole: Callable[[], dict[str, Tensor]]


def one_process(case: Case, folder: Path) -> Side:
    model = make(case)
    return Side(model, lambda: dict(model.named_parameters()))


def ours(case: Case, folder: Path) -> Side:
    return _ours(case, tensor_parallel(make(case)))


def threads(case: Case, folder: Path) -> Side:
    devices = ["cpu"] * case.ranks
    return _ours(case, tensor_parallel(make(case), devices, distributed=False))


def _ours(case: Case, model: nn.Module) -> Side:
    def whole() -> dict[str, Tensor]:
        with save_tensor_parallel(model):
            return dict(model.state_dict())

    return Side(model, whole)


def transformers(case: Case, folder: Path) -> Side:
    """By the library's own plan, from files."""
    config = DistributedConfig(tp_plan="auto", tp_size=case.ranks)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    model.train()
    return Side(model, lambda: _joined(model))


def _joined(model: nn.Module) -> dict[str, Tensor]:
    parts = {name: p.detach() for name, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parts.items()}


# -- DTensor -------------------------------------------------------------------------------


def dtensor(case: Case, folder: Path) -> Side:
    """`parallelize_module` with heads, columns, rows and vocabulary cut as the other sides do.

    An input that several layers share is made a DTensor once, so that its gradient is summed once.
    """
    model = make(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"llama": _dtensor_llama, "gpt2": _dtensor_gpt2}[case.family](model, mesh)


def _dtensor_llama(model: Any, mesh: Any) -> Side:
    column, row = ColwiseParallel(), RowwiseParallel()
    named = {"hidden_states": Replicate()}
    layer: dict[str, Any] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts=named, desired_input_kwarg_layouts=named
        ),
        **dict.fromkeys([f"self_attn.{x}_proj" for x in "qkv"], column),
        "self_attn.o_proj": row,
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "mlp.gate_proj": column,
        "mlp.up_proj": column,
        "mlp.down_proj": row,
    }
    for each in model.model.layers:
        parallelize_module(each, mesh, layer)
    _ends(model, mesh, "model.embed_tokens")
    return Side(model, lambda: _joined(model))


def _dtensor_gpt2(model: Any, mesh: Any) -> Side:
    """Linear layers for Conv1D, which DTensor has no style for, q, k and v of a rank together."""
    size, dim = mesh.size(), model.config.n_embd
    order = torch.arange(3 * dim).view(3, size, dim // size).transpose(0, 1).flatten()
    column, row = ColwiseParallel(), RowwiseParallel()
    for block in model.transformer.h:
        attention = block.attn
        attention.c_attn = _linear(attention.c_attn, order)
        attention.c_proj = _linear(attention.c_proj)
        block.mlp.c_fc, block.mlp.c_proj = _linear(block.mlp.c_fc), _linear(block.mlp.c_proj)
        attention.split_size = attention.embed_dim = dim // size
        attention.num_heads //= size
        names = {"attn.c_attn": column, "attn.c_proj": row, "mlp.c_fc": column, "mlp.c_proj": row}
        parallelize_module(block, mesh, names)
    _ends(model, mesh, "transformer.wte")
    model.lm_head.weight = model.transformer.wte.weight

    def whole() -> dict[str, Tensor]:
        found = _joined(model)
        for name, value in found.items():
            if ".c_attn." in name:
                found[name] = value[order.argsort()]
            if ".c_" in name and name.endswith("weight"):
                found[name] = found[name].t()
        return found

    return Side(model, whole)


def _linear(layer: Conv1D, order: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(*layer.weight.shape)
    rows = slice(None) if order is None else order
    linear.weight = nn.Parameter(layer.weight.detach().t()[rows].contiguous())
    linear.bias = nn.Parameter(layer.bias.detach()[rows].clone())
    return linear


def _ends(model: Any, mesh: Any, embedding: str) -> None:
    """Embedding and head, cut along the vocabulary."""
    plan = {
        embedding: RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


SIDES: dict[str, Callable[[Case, Path], Side]] = {
    "one process": one_process,
    "ours, threads": threads,
    "transformers": transformers,
    "DTensor": dtensor,
    OURS: ours,
}
