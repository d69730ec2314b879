"""Generated tables of families in written.json; each entry holds for all sizes of a family.

`scripts/families` writes the file (models/transformers_writer.py), and a test holds that it is up
to date, so a plan knows these families without torch. Lengths are products of names in `Sizes`,
such as "heads*head_dim", or of settings of config.json.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torchdistpackage.families.table import BlockOrder, Family, Part, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit, Layout

FILE = Path(__file__).with_name("written.json")
Statement = Mapping[str, Any]
"""One layer, parameter, attention or expert module of a block; see `_STATEMENTS`."""


def written(*families: str) -> dict[str, Family]:
    """Return the generated tables by model_type."""
    tables: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: family_of(tables[name]) for name in families}


def family_of(table: Mapping[str, Any]) -> Family:
    """Return the family described by one entry of written.json."""

    def embed(w: Weights, s: Settings, n: Sizes) -> None:
        w.table(table["table"], n.vocab, n.dim, n.padding)

    return Family(
        table["defaults"],
        sizes_of_settings,
        table["blocks"],
        embed,
        _part(table["block"]),
        _part(table["head"]),
        table["table"],
        table["class"],
        output=table["output"],
        documents=table["documents"],
        own_attention=table["own_attention"],
        order=lambda _: BlockOrder(**table["order"]),
        nullable=frozenset(table["nullable"]),
        uses_is_causal=table["uses_is_causal"],
    )


def sizes_of_settings(s: Settings) -> Sizes:
    """Return the sizes from the setting names that these families share."""
    heads = s["num_attention_heads"]
    return Sizes(
        vocab=s["vocab_size"],
        dim=s["hidden_size"],
        layers=s["num_hidden_layers"],
        heads=heads,
        kv_heads=s["num_key_value_heads"] or heads,
        head_dim=s["head_dim"] or s["hidden_size"] // heads,
        hidden=s["intermediate_size"],
        tied=s["tie_word_embeddings"],
        std=s["initializer_range"],
        padding=s["pad_token_id"],
    )


def product(symbol: str, n: Sizes, s: Settings) -> int:
    """Return the value of a product such as "heads*head_dim" for these sizes."""
    return prod(_factor(each, n, s) for each in symbol.split("*"))


def _factor(symbol: str, n: Sizes, s: Settings) -> int:
    if symbol.isdigit():
        return int(symbol)
    value = getattr(n, symbol) if symbol in Sizes.__dataclass_fields__ else s[symbol]
    assert type(value) is int
    return value


def _part(statements: Sequence[Statement]) -> Part:
    def part(w: Weights, s: Settings, n: Sizes) -> None:
        for statement in statements:
            _STATEMENTS[statement["is"]](w, statement, s, n)

    return part


def _layer(w: Weights, statement: Statement, s: Settings, n: Sizes) -> None:
    """List a linear layer that ranks share. bias: true, false, or the setting that decides it."""
    size, inputs = (product(x, n, s) for x in statement["shape"])
    bias = s[bias] if isinstance(bias := statement["bias"], str) else bias
    heads = {
        "heads": HeadSplit(n.heads),
        "kv_heads": HeadSplit(n.kv_heads, shared=True),
        None: None,
    }[statement["heads"]]
    add = w.column if statement["is"] == "column" else w.row
    add(statement["name"], size, inputs, heads, bias=bias)


def _whole(w: Weights, statement: Statement, s: Settings, n: Sizes) -> None:
    """List an unsplit parameter. partial: each rank computes a partial gradient."""
    shape = (product(x, n, s) for x in statement["shape"])
    w.whole(statement["name"], *shape, kind=statement["start"], partial=statement["partial"])


def _attention(w: Weights, statement: Statement, s: Settings, n: Sizes) -> None:
    w.attention(statement["name"], n, **statement["counts"])


def _experts(w: Weights, statement: Statement, s: Settings, n: Sizes) -> None:
    """List a module with matrices that stack all experts of a block, each split inside."""

    def layout(matrix: Mapping[str, Any]) -> Layout:
        shape = tuple(product(x, n, s) for x in matrix["shape"])
        parts = tuple(product(x, n, s) for x in matrix["parts"])
        return w.cut("", shape, matrix["dim"], parts=parts)

    matrices: Mapping[str, Any] = statement["matrices"]
    w.stacked(statement["name"], **{name: layout(x) for name, x in matrices.items()})


_STATEMENTS = {
    "column": _layer,
    "row": _layer,
    "whole": _whole,
    "attention": _attention,
    "experts": _experts,
}
