"""BERT, also as a decoder: separate q, k and v; the vocabulary's bias has two names. No torch.

Used by `tensor_parallel(model)` only.
"""

from torchdistpackage.families.fused import last_norm, sizes_of
from torchdistpackage.families.table import Family, Settings, Sizes, Weights
from torchdistpackage.layout.layout import HeadSplit

_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def _bert_embed(w: Weights, s: Settings, n: Sizes) -> None:
    w.table("bert.embeddings.word_embeddings", n.vocab, n.dim)
    w.table("bert.embeddings.position_embeddings", s["max_position_embeddings"], n.dim)
    w.table("bert.embeddings.token_type_embeddings", s["type_vocab_size"], n.dim)


def _bert_block(w: Weights, s: Settings, n: Sizes) -> None:
    heads = HeadSplit(n.heads)
    own_inputs = ("hidden_states",)
    for name, inputs in (
        ("attention", own_inputs),
        ("crossattention", (*own_inputs, "encoder_hidden_states")),
    ):
        counts = {"num_attention_heads": "heads", "all_head_size": "width"}
        w.attention(f"{name}.self", n, inputs=inputs, **counts)
        for layer in ("query", "key", "value"):
            w.column(f"{name}.self.{layer}", n.dim, n.dim, heads, bias=True)
        w.row(f"{name}.output.dense", n.dim, n.dim, heads, bias=True)
    w.column("intermediate.dense", n.hidden, n.dim, bias=True)
    w.row("output.dense", n.dim, n.hidden, bias=True)


BERT = Family(
    _BERT,
    lambda s: sizes_of(s, s["intermediate_size"]),
    "bert.encoder.layer",
    _bert_embed,
    _bert_block,
    last_norm("cls.predictions.transform.LayerNorm"),
    "bert.embeddings.word_embeddings",
    "BertLMHeadModel",
    output="predictions.decoder",
    saved_names={"predictions.bias": "predictions.decoder.bias"},
)
