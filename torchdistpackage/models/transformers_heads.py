"""The heads of transformers for sequences and for tokens. No torch.

In a family with a table their class has the base model of the causal one and, in place of the
output matrix, a layer with an output for each class. It is small, so ranks do not share it. All
other classes are read from their modules (transformers_found.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchdistpackage.config.head_tasks import (
    CLASSIFIER,
    SCORE,
    TOKEN,
    ModelHead,
    has_head,
    labels_in,
)
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.families.table import Family

_OF_TOKENS = {
    **dict.fromkeys(("gpt2", "gpt_neox", "falcon", "bloom"), CLASSIFIER),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2"), SCORE),
}
"""Families with a transformers class for tokens -> the name of its head layer."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def with_head(family: str, head: ModelHead) -> Family:
    """Return the table of a family that has one with this head in place of its output matrix.

    Raises:
        ConfigError: transformers has no such class of it.
    """
    table = FAMILIES[family]
    if head.task.is_of_tokens and family not in _OF_TOKENS:
        raise ConfigError(
            f"transformers has no class with a head for tokens of model_type {family!r}, which "
            f"data.name={head.task.name} trains; there is one of {', '.join(_OF_TOKENS)}"
        )
    name = table.class_name
    for ending in _CAUSAL:
        name = name.removesuffix(ending)
    output = _OF_TOKENS[family] if head.task.is_of_tokens else SCORE
    return replace(table, class_name=name + head.task.ending, output=output, splits_head=False)


def has_bias(head: ModelHead, settings: Mapping[str, Any]) -> bool:
    """Return whether the layer of the head has a bias."""
    return head.task.is_of_tokens and settings.get("token_classification_bias", True) is True


def config_with_head(settings: Mapping[str, Any], head: ModelHead) -> dict[str, Any]:
    """Return a config.json with the settings of this head.

    Raises:
        ConfigError: it is of a class with a head of the other kind, or of other classes.
    """
    if not head.task.ending:
        return dict(settings)
    existing = has_head(settings)
    if existing and not existing.endswith(head.task.ending):
        other = "each token" if existing.endswith(TOKEN) else "a sequence"
        raise ConfigError(
            f"the folder holds {existing}, whose head is for {other}, and "
            f"data.name={head.task.name} trains one {head.task.ending}; name another folder, or "
            f"the language model that it was made from"
        )
    labels = labels_in(settings)
    if existing and len(labels) != head.num_outputs:
        raise ConfigError(
            f"the head of {existing} has {len(labels)} outputs ({', '.join(labels[:4])}), and "
            f"data.name={head.task.name} with {len(head.labels)} data.labels wants "
            f"{head.num_outputs}; name the classes of the folder, or the language model that it "
            f"was made from"
        )
    others = {k: x for k, x in settings.items() if k not in ("num_labels", "problem_type")}
    return {**others, **head.settings()}
