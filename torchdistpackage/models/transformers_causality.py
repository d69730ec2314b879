"""Whether a class of transformers predicts each token from those before it: tried on a small copy.

Encoders with a language model's head (BERT and its relatives) attend in both directions unless
their settings say otherwise. Their loss of the next token means nothing: they see it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchdistpackage.errors import ConfigError
from torchdistpackage.tools.undisturbed import keep_random_states

_TOLERANCE = 1e-4
"""Of float32, relative to the largest logit."""
_SWITCHES: tuple[tuple[str, object], ...] = (
    ("is_decoder", True),
    ("causal", True),
    ("attn_type", "uni"),
    ("use_bidirectional_attention", False),
    ("use_bidirectional_attention", None),
    ("is_causal", True),
)
"""Settings by which classes can be told to look back alone."""
Copies = Callable[[Mapping[str, Any]], Iterator[nn.Module]]
"""Of a config.json small models."""


@torch.no_grad()
def looks_ahead(model: nn.Module, ids: Tensor) -> float:
    """How much the logits of a position change, at most, with a token behind it.

    Relative to the largest logit. model: a small copy in float32. ids (B, S): its first row is
    used.
    """
    moved = deepcopy(model).eval()
    with keep_random_states():
        torch.manual_seed(2)
        for parameter in moved.parameters():  # what begins at zero would hide it
            parameter.add_(torch.randn_like(parameter) * 0.1)
    row, num = ids[:1], ids.shape[1]
    rows = row.repeat(num, 1)
    at = torch.arange(1, num)
    others = row[0, at - 1]  # tokens of the vocabulary
    rows[at, at] = torch.where(others == row[0, at], ids.min() + ids.max() - others, others)
    output: Any = moved(input_ids=rows, return_dict=True)
    logits = output.logits
    before = torch.arange(num)[None, :] < torch.arange(num)[:, None]
    off = (logits - logits[:1]).abs().amax(-1)[before].max()
    return float(off / logits.abs().max().clamp(min=1e-6))


def causality_problem(
    given: Mapping[str, Any], model: nn.Module, ids: Tensor, copies: Copies
) -> str | None:
    """Why `model`, a small copy of the config.json `given`, is no causal language model, and the
    setting that makes it one, if there is such; None: it is one."""
    if (off := looks_ahead(model, ids)) <= _TOLERANCE:
        return None
    text = (
        f"{type(model).__name__} attends in both directions: on a small copy the logits of a token "
        f"change by {off:.0%} of the largest one with tokens behind it, so that it sees what it is "
        f"to predict"
    )
    for name, changed in _switched(given, model):
        if _looks_back(changed, ids, copies):
            return f"{text}; set {name} in config.json to train it from token to token"
    return f"{text}; use a causal language model, or model.target with a loss of your own"


def _looks_back(given: Mapping[str, Any], ids: Tensor, copies: Copies) -> bool:
    try:
        return any(looks_ahead(copy, ids) <= _TOLERANCE for copy in copies(given))
    except ConfigError:  # no value that the class has for this setting
        return False


def _switched(given: Mapping[str, Any], model: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What to set in config.json, and `given` with it, of each switch that stands otherwise."""
    whole: dict[str, Any] = model.config.to_dict()
    for key, value in _SWITCHES:
        to = f"to {json.dumps(value)}"
        if whole.get(key, value) != value:
            yield f"{key} {to}", {**given, key: value}
        for part, inner in whole.items():
            if isinstance(inner, dict) and cast(dict[str, Any], inner).get(key, value) != value:
                own = cast(dict[str, Any], given.get(part) or {})
                yield f"{part}.{key} {to}", {**given, part: {**own, key: value}}
