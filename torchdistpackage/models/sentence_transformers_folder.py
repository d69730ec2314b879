"""The files that sentence-transformers reads beside the model of a folder: how texts become
tokens, and tokens a vector.

Its tokenizer puts the same ids around a text as training did, and cuts it to the same length.
"""

import json
from pathlib import Path
from typing import Any

from torchdistpackage.config.hugging_face import (
    read_tokenizer,
    special_tokens,
    token_ids,
    tokenizer_file,
)
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.text_ends import TextEnds, text_ends

_POOLINGS = {"mean": "mean_tokens", "last": "lasttoken", "cls": "cls_token"}
"""train.embedding.pooling -> the end of its key, by which releases from 2.0 on know it."""
_MODULES = "sentence_transformers.models"


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
            **{f"pooling_mode_{x}": key == pooling for key, x in _POOLINGS.items()},
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
