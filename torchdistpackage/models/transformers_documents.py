"""Find how a class of transformers keeps the documents of a packed sample apart.

A small copy runs packed documents and each of them alone, and their logits are compared. Given
positions that begin anew, most classes make a mask of them; where that is not enough, as with
states of recurrences or convolutions, each document gets a row of its own (document_rows.py).
"""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.families.found import TRAINED
from torchdistpackage.families.table import DocumentsWay
from torchdistpackage.models.document_rows import DocumentRows
from torchdistpackage.models.transformers_calls import arguments_of
from torchdistpackage.models.transformers_meta import ALONE
from torchdistpackage.models.transformers_small import (
    module_of,
    moved_away,
    sample_ids,
    small_models,
)
from torchdistpackage.tools.undisturbed import in_eval

LENGTHS = (5, 4, 3)
"""Of the documents in a sample that is tried."""
_TOLERANCE = 1e-4
_BY_LENGTH = {
    "xlstm": "xLSTMForCausalLM computes a document otherwise in a longer row: its cells "
    "(xLSTMBackend) add eps to denominators that depend on where a row is cut into chunks"
}
"""Classes whose numbers depend on the length of a row, by less than a trial in float32 shows."""


def found_documents(config_dict: Mapping[str, Any]) -> DocumentsWay:
    """Return how the model of a config.json keeps documents apart."""
    return _found(json.dumps(dict(config_dict), sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _found(text: str) -> DocumentsWay:
    config_dict = json.loads(text)
    problem = f"transformers makes no small copy of {config_dict.get('model_type')} to try it on"
    if (why := _BY_LENGTH.get(str(config_dict.get("model_type")))) is not None:
        return DocumentsWay("not", why)
    # a run may ask in its first forward, under autocast
    with ALONE, torch.autocast("cpu", enabled=False):
        for small in small_models(config_dict):
            way = try_documents(small)
            if not way.problem:
                return way
            problem = way.problem
    return DocumentsWay("not", problem)


@torch.no_grad()
def try_documents(model: Any) -> DocumentsWay:
    """Return the first way in which documents of a sample have the logits that each has alone.

    model: a small copy in float32.
    """
    moved, name = moved_away(model), type(model).__name__
    ids = sample_ids(model.config, sum(LENGTHS))
    one = torch.cat([torch.arange(length) for length in LENGTHS])
    # another order in the second sample, so that borders are not the same in all of a batch
    other = torch.cat([torch.arange(length) for length in reversed(LENGTHS)])
    positions = torch.stack((one, other))
    problem, at = "", name
    with nullcontext() if model.config.model_type in TRAINED else in_eval(moved):
        for row_layout in ("positions", "rows"):
            try:
                expected = _each_alone(moved, ids)
                logits = packed_logits(moved, ids, positions, row_layout)
            except Exception as error:  # whatever the forward of a class raises
                at = module_of(error, moved)
                problem = f"a small copy of {name} with documents in a sample stops in {at}"
                continue
            off = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
            if off <= _TOLERANCE:
                return DocumentsWay("positions" if row_layout == "positions" else "rows")
            problem = (
                f"the logits of a document in a small copy of {name} change by {off:.1e} of the "
                f"largest one with the documents beside it, also where each has a row of its own"
            )
    return DocumentsWay("not", problem)


def packed_logits(model: Any, ids: Tensor, positions: Tensor, way: str) -> Tensor:
    """Return the logits (B, S, V) of packed samples. way: `positions` or `rows`."""
    arguments = arguments_of(model, {"use_cache": False, "position_ids": positions})
    if way == "positions":
        return model(input_ids=ids, return_dict=True, **arguments).logits
    rows = DocumentRows(positions)
    arguments.pop("position_ids", None)
    return rows.joined(model(input_ids=rows.apart(ids), return_dict=True, **arguments).logits)


def _each_alone(model: Any, ids: Tensor) -> Tensor:
    samples: list[Tensor] = []
    options = arguments_of(model, {"use_cache": False})
    for row, lengths in zip(ids, (LENGTHS, LENGTHS[::-1]), strict=True):
        parts = [
            model(input_ids=document[None], return_dict=True, **options).logits[0]
            for document in row.split(lengths)
        ]
        samples.append(torch.cat(parts))
    return torch.stack(samples)
