"""The keywords that the forward of a transformers model takes."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn


def arguments_of(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `arguments` that the forward of a model, or of its base class, names."""
    base = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    forwards = [x.forward for x in (model, base) if isinstance(x, nn.Module)]
    named = {name for forward in forwards for name in signature(forward).parameters}
    return {name: value for name, value in arguments.items() if name in named}
