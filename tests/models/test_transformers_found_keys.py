"""Tables that are kept for later questions: whatever changes one is in the key of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.models.coverage import settings
from tests.models.found_cases import transformers
from torchdistpackage.config.head_tasks import HEAD_TASKS, ModelHead
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.table import FoundModel
from torchdistpackage.models import transformers_found
from torchdistpackage.models.lora_layout import Lora
from torchdistpackage.models.transformers_found import found_model
from torchdistpackage.models.transformers_layout import TransformersShape, layouts, part_tables
from torchdistpackage.models.transformers_meta import known_settings, on_meta

assert transformers
Answer = FoundModel | str
"""What the finder reads of a config.json; the name of an error where transformers refuses it."""


def others(value: object) -> tuple[object, ...]:
    """Return values that a setting could have in place of `value`."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return 2 * value, value + 1
    if isinstance(value, float):
        return (2 * value + 0.25,)
    if isinstance(value, list):
        return (value[::-1], value[:1] * len(value))
    return (2,) if value is None else ()


def changes(given: Mapping[str, Any], most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each setting with at most so many other values, and the config.json with them."""
    for key, value in given.items():
        for other in others(value)[:most]:
            yield key, {**given, key: other}


def answer(read: Callable[[], FoundModel]) -> Answer:
    try:
        return read()
    except ConfigError as error:  # whose text may list a set of transformers in any order
        return type(error).__name__


def read_anew(given: Mapping[str, Any], tensor: int) -> FoundModel:
    """Return what the finder reads without what it keeps."""
    tried = transformers_found._tried(given)
    config = known_settings(given)
    whole = transformers_found._found(on_meta(given, torch.float32), config, tried)
    return (
        whole
        if tensor == 1 or whole.refused
        else transformers_found._cut(given, whole, tensor, None)
    )


def settings_that_change(given: dict[str, Any], tensor: int, most: int = 2) -> set[str]:
    """Ask with each setting changed, after the same without; return those with another answer."""
    changing: set[str] = set()
    for key, changed in changes(given, most):
        before = found_model(given, tensor)
        kept = answer(lambda changed=changed: found_model(changed, tensor))
        anew = answer(lambda changed=changed: read_anew(changed, tensor))
        assert kept == anew, key
        if anew != before:
            changing.add(key)
    return changing


STRUCTURE = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "attention_bias",
    "max_position_embeddings",
}


def test_settings_that_change_what_is_read_of_modules_are_in_the_key(monkeypatch):
    """Without trials, of which there would be two for each setting."""
    nothing = transformers_found._Tried()
    monkeypatch.setattr(transformers_found, "_tried", lambda *_: nothing)
    transformers_found._read.cache_clear()
    try:
        given = {**settings("olmo2"), "num_hidden_layers": 1}
        given = {key: x for key, x in given.items() if key in STRUCTURE or key == "model_type"}
        assert settings_that_change(given, 1, most=1) == STRUCTURE
    finally:
        transformers_found._read.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("olmo2", STRUCTURE),
        ("mixtral", {"num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"}),
        ("gemma3_text", {"head_dim"}),
        ("gpt_oss", {"num_local_experts"}),
    ],
)
def test_settings_that_change_a_table_are_in_the_key(family, more, tensor):
    given = settings(family)
    if family == "mixtral":
        given["output_router_logits"] = True
    changing = settings_that_change(given, tensor)
    assert changing >= more & given.keys(), changing


def test_each_shape_keeps_tables_of_its_own():
    """By the axis of the tensor ranks; a shape that differs in any field begins anew."""
    shape = TransformersShape("llama", settings("llama"), 8)
    of_axes = part_tables(shape), part_tables(shape, "other")
    assert of_axes == (part_tables(shape), part_tables(shape, "other"))
    axes = [{x for y in layouts(shape, axis=a).values() for x in y.split_axes} for a in AXES]
    assert axes == [{axis} for axis in AXES]
    other = {
        "family": "gpt_neox",
        "given": {**shape.given, "hidden_size": 2 * shape.dim},
        "seq_len": 9,
        "sequence_parallel": True,
        "lora": Lora(2, 4.0, 0.0, ("q_proj",)),
        "tensor": 2,
        "head": ModelHead(HEAD_TASKS["classification"], ("a", "b", "c")),
        "stored_vocab": 60,
        "mtp": "leave_out",
        "mtp_loss": 0.5,
    }
    assert other.keys() == {x.name for x in fields(TransformersShape)}
    for name, value in other.items():
        changed = replace(shape, **{name: value})
        anew = TransformersShape(**{x: getattr(changed, x) for x in other})
        assert part_tables(changed) == part_tables(anew)
        # settings of the folder and of the loss
        is_same = name in ("seq_len", "tensor", "stored_vocab", "mtp", "mtp_loss")
        assert (part_tables(changed) == of_axes[0]) == is_same, name


AXES = ("tensor", "other")
