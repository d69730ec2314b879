"""BERT: q, k, v apart, no cache; the head's weight is that of the word embeddings."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.parallel.auto.families.heads import deal_heads
from torchdistpackage.parallel.auto.families.rules import FamilyRules
from torchdistpackage.parallel.auto.rules import Config


def get_bert_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of BERT, also as a decoder, with `model_config` on `devices`."""
    num_heads, dim = model_config.num_attention_heads, model_config.hidden_size
    rules = FamilyRules(len(devices))
    heads = deal_heads("bert", num_heads, dim // num_heads, rules.world_size)
    rules.column("(attention|crossattention)\\.self\\.(query|key|value)", heads.cut_queries(0))
    rules.row("(attention|crossattention)\\.output\\.dense", heads.cut_queries(1))
    rules.enter("(attention|crossattention)\\.self", "hidden_states", "encoder_hidden_states")
    rules.attribute(
        "(attention|crossattention)\\.self",
        num_attention_heads=heads.num_queries,
        all_head_size=heads.width,
    )
    rules.column("intermediate\\.dense")
    rules.enter("intermediate")
    rules.row("[0-9]+\\.output\\.dense")
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        rules.embedding(name, dim)
    decoder = "predictions\\.decoder"
    rules.head(decoder, model_config)
    rules.same_state("predictions\\.bias", f"{decoder}\\.bias")
    rules.key_heads = heads.keys
    rules.draws_apart("(attention|crossattention)\\.self")
    return rules.config()
