"""Find how tensor ranks share a user's Hugging Face model, by the table that trains it.

The table and the layouts are those of `model.hf`, for the model's own settings. Only the head
differs: the ranks join its outputs, since the model's forward returns all logits.
"""

from typing import Any

from torch import nn

from torchdistpackage.errors import ConfigError, LayoutError, NotAvailableError
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.families.table import block_of
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts
from torchdistpackage.models.transformers_layout import (
    TransformersShape,
    can_share,
    global_name,
    layouts,
    setting_problems,
    split_table,
)
from torchdistpackage.models.transformers_meta import settings_of
from torchdistpackage.parallel.auto.split_model import ModelSplit


def shape_of(model: Any, num_ranks: int, sequence_parallel: bool = False) -> TransformersShape:
    """Return the sizes and settings of a Hugging Face model, as plans use them.

    Raises:
        LayoutError: so many ranks cannot share it by a table, and why.
    """
    config_dict = settings_of(model)
    family = str(config_dict.get("model_type"))
    shape = TransformersShape(family, config_dict, 1, sequence_parallel, None, num_ranks)
    try:
        kind = shape.kind
    except (ConfigError, NotAvailableError) as error:
        raise LayoutError(str(error)) from error
    if problems := setting_problems(shape):
        raise LayoutError(f"{family}: {'; '.join(problems)}")
    if not can_share(shape, num_ranks):
        n = shape.sizes
        raise LayoutError(
            f"{num_ranks} ranks cannot share {shape.class_name}: {kind.unshared}"
            if kind.unshared is not None
            else (
                f"{family} with {n.heads} heads, {n.kv_heads} key-value heads and an MLP of "
                f"{n.hidden} cannot be shared evenly by {num_ranks} ranks; use a number of ranks "
                "that divides them"
            )
        )
    if sequence_parallel and not kind.splits_sequence:
        raise LayoutError(
            f"sequence_parallel=True needs a family with a table, which are {', '.join(FAMILIES)}; "
            f"{family} has none"
        )
    return shape


def find_split(shape: TransformersShape, model: Any, axis: str = "tensor") -> ModelSplit:
    """Return the split of `model`, whose settings are those of `shape`.

    model: the family's causal language model, its base model, or one with another head.

    Raises:
        LayoutError: its blocks have other parameters than the table lists.
    """
    table_layouts, base = layouts(shape, axis=axis), _base_path(shape, model)
    model_layouts, seen = Layouts(), set[str]()
    for name, parameter in model.named_parameters():
        full = global_name(shape, f"{base}.{name}" if base else name)
        seen.add(full)
        layout = table_layouts.get(full) or Layout(name, tuple(parameter.shape))
        if layout.shape != tuple(parameter.shape):
            raise LayoutError(
                f"{name} of this {type(model).__name__} has the shape {tuple(parameter.shape)}, "
                f"but the table of {shape.family} has {layout.shape}; build it from its own config"
            )
        if not parameter.is_floating_point():
            raise LayoutError(
                f"{name} is of type {parameter.dtype}, as quantised weights are, whose packed "
                f"numbers cannot be cut; split the model first and quantise the shards"
            )
        model_layouts[name] = layout.named(name) if base else layout
    kind = shape.kind
    # beside the blocks a base model, or one with another head, has other parameters
    needed = {name for name in table_layouts if block_of(kind.blocks, name) or not kind.blocks}
    if missing := sorted(needed - seen):
        raise LayoutError(
            f"this {type(model).__name__} has no {', '.join(missing[:3])}, which its settings ask "
            f"for; build it from its own config"
        )
    if kind.output and shape.sizes.tied != _is_tied(model, shape.sizes.tied):
        raise LayoutError(
            f"tie_word_embeddings of this {type(model).__name__} is {shape.sizes.tied}, but its "
            "embedding and its head say otherwise; set it as the model has them"
        )
    blocks = kind.blocks
    path = blocks.removeprefix(f"{base}.") if base else blocks
    table = split_table(shape, axis).inside(base).with_outputs_joined(_heads(model))
    return ModelSplit(
        table, model_layouts, axis, path if shape.sequence_parallel else "", is_known=True
    )


def _base_path(shape: TransformersShape, model: Any) -> str:
    """Return the path in the whole model at which the table has `model`; "" if it is all of it."""
    prefix = model.base_model_prefix
    is_base = prefix and shape.kind.blocks.startswith(f"{prefix}.") and not hasattr(model, prefix)
    return prefix if is_base else ""


def _heads(model: nn.Module) -> list[str]:
    """Return the paths of the layer that makes logits."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    named = model.named_modules(remove_duplicate=False)
    return [path for path, module in named if head is not None and module is head]


def _is_tied(model: Any, default: bool) -> bool:
    """Return whether the embedding and the head share one matrix, or `default` if the model lacks
    one of them.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table is None or head is None:
        return default
    return head.weight is table.weight
