"""Find the head of a run: its task, and the classes named by the run or its folder. No torch."""

from typing import Any, cast

from torchdistpackage.config.head_tasks import ModelHead, labels_in
from torchdistpackage.config.hugging_face import read_config
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError


def head_of(config: RunConfig) -> ModelHead | None:
    """Return the head that the run trains, or None."""
    data = config.data
    if data.head is None:
        return None
    labels = class_labels(config) if data.head.has_classes else ()
    return ModelHead(data.head, labels, data.multi_label)


def class_labels(config: RunConfig) -> tuple[str, ...]:
    """Return the class names: data.labels, or those of a folder that has a head; () if neither
    names any.
    """
    if config.data.labels or config.model.hf is None:
        return config.data.labels
    try:
        return labels_in(read_config(config.model.hf))
    except ConfigError:  # the model itself is refused for it
        return ()


def padding_of(config: RunConfig) -> int | None:
    """Return the pad_token_id of the model's config.json, or of its text; None if it has none."""
    if config.model.hf is None:
        return None
    settings = read_config(config.model.hf)
    padding, text = settings.get("pad_token_id"), settings.get("text_config")
    if padding is None and isinstance(text, dict):
        padding = cast(dict[str, Any], text).get("pad_token_id")
    return padding if isinstance(padding, int) else None
