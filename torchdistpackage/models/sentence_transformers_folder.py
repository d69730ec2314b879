"""Files that sentence-transformers adds to a model's folder: how texts become tokens, and tokens a
vector.

Its tokenizer puts the same ids around a text as training did, and cuts it to the same length.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from torchdistpackage.bounded import parse_json
from torchdistpackage.config.hugging_face import (
    read_tokenizer,
    special_tokens,
    token_ids,
    tokenizer_file,
)
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.text_ends import TextEnds, text_ends
from torchdistpackage.errors import ConfigError

_POOLINGS = {"mean": "mean_tokens", "last": "lasttoken", "cls": "cls_token"}
"""train.embedding.pooling -> the suffix of its key since release 2.0."""
_MODULES = "sentence_transformers.models"
_LIST, _LIMITS = "modules.json", "sentence_bert_config.json"
_FLAG = "pooling_mode_"
_KNOWN = ("Transformer", "Pooling", "Normalize")
"""Modules that training supports; the length of a vector has no effect on a cosine."""


class Embedder(NamedTuple):
    """The settings in the folder of an embedding: train.embedding.pooling, and the most tokens of a
    text, None if it names none.
    """

    pooling: str
    seq_len: int | None


def read_sentence_transformers(folder: Path) -> Embedder | None:
    """Return how texts become vectors by the files of this folder, None if it has none.

    Raises:
        ConfigError: it does so by other modules than `tdp train` has, or a file is not JSON.
    """
    if not (folder / _LIST).is_file():
        return None
    modules = _parsed(folder / _LIST)
    kinds = [str(x["type"]).rpartition(".")[-1] for x in modules]
    if unknown := [x for x in kinds if x not in _KNOWN]:
        raise ConfigError(
            f"{folder / _LIST} has the module {unknown[0]}; use a model of the modules "
            f"{', '.join(_KNOWN)} alone"
        )
    pooling = "mean"
    for kind, module in zip(kinds, modules, strict=True):
        if kind == "Pooling":
            pooling = _pooling(folder / module["path"] / "config.json")
    limits = _parsed(folder / _LIMITS) if (folder / _LIMITS).is_file() else {}
    return Embedder(pooling, limits.get("max_seq_length"))


def _pooling(file: Path) -> str:
    settings = _parsed(file)
    names = settings.get("pooling_mode")  # a name or several from release 6 on, before flags
    if names is None:
        flags = (key for key, x in settings.items() if x is True and key.startswith(_FLAG))
        names = [_named(x.removeprefix(_FLAG)) for x in flags]
    names = [names] if isinstance(names, str) else names
    by_name = {_named(flag): key for key, flag in _POOLINGS.items()}
    if len(names) != 1 or names[0] not in by_name:
        raise ConfigError(
            f"{file} pools by {', '.join(names) or 'nothing'}; use a folder that pools by one of "
            f"{', '.join(by_name)}"
        )
    return by_name[names[0]]


def _named(flag: str) -> str:
    """Return the name of a pooling mode, by the end of its flag."""
    return flag.removesuffix("_tokens").removesuffix("_token")


def _parsed(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def add_sentence_transformers(folder: Path, config: RunConfig, dim: int) -> None:
    """Add the files to the folder of a model that was trained by this run. dim: of embeddings.

    Raises:
        DataError: the tokenizer of the run is gone.
    """
    data, pooling = config.data, config.train.embedding.pooling
    file = tokenizer_file(Path(data.tokenizer or ""))
    ends = text_ends(file, data.bos, data.eos)
    content, names = read_tokenizer(file), token_ids(file)
    by_id = {number: name for name, number in names.items()}
    tokens = special_tokens(file.parent)
    padding = tokens.get("pad_token") or tokens.get("eos_token") or by_id[min(by_id)]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, value in {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{_MODULES}.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{_MODULES}.Pooling"},
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": dim,
            **{f"{_FLAG}{x}": key == pooling for key, x in _POOLINGS.items()},
        },
        "sentence_bert_config.json": {"max_seq_length": data.seq_len, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {}, "similarity_fn_name": "cosine"},
        "tokenizer.json": {
            **content,
            "post_processor": _template(ends, by_id),
            "truncation": None,
            "padding": None,
        },
        "tokenizer_config.json": {
            **tokens,
            "pad_token": padding,
            "padding_side": "right",
            "model_max_length": data.seq_len,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }.items():
        text = json.dumps(value, ensure_ascii=False, indent=2)
        (folder / name).write_text(text, encoding="utf-8")


def _template(ends: TextEnds, by_id: dict[int, str]) -> dict[str, Any]:
    """Return the part of a tokenizer.json that puts `ends` around a text."""
    first, last = (
        [{"SpecialToken": {"id": by_id[x], "type_id": 0}} for x in ids]
        for ids in (ends.bos, ends.eos)
    )
    text, other = ({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*first, text, *last],
        "pair": [*first, text, other, *last],
        "special_tokens": {
            by_id[x]: {"id": by_id[x], "ids": [x], "tokens": [by_id[x]]}
            for x in (*ends.bos, *ends.eos)
        },
    }
