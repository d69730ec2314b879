"""Small settings of encoders, and of decoders without a table, with no dropout."""

from typing import Any

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_BERT = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IDS = {"bos_token_id": 2, "eos_token_id": 1, "cls_token_id": 2, "sep_token_id": 1}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "model_type": "bert"},
    "roberta": {**_BERT, **_IDS, "model_type": "roberta"},
    "xlm-roberta": {**_BERT, **_IDS, "model_type": "xlm-roberta"},
    "electra": {**_BERT, "model_type": "electra", "embedding_size": 8},
    "distilbert": {
        "vocab_size": 300,
        "dim": 16,
        "hidden_dim": 24,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 40,
        "pad_token_id": 0,
        "model_type": "distilbert",
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "deberta-v2": {
        **_BERT,
        "model_type": "deberta-v2",
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
        "pooler_dropout": 0.0,
        "pooler_hidden_size": 16,
        "type_vocab_size": 0,
        "max_relative_positions": -1,
    },
    "modernbert": {
        **_SIZES,
        **_IDS,
        "model_type": "modernbert",
        "num_hidden_layers": 4,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "classifier_pooling": "mean",
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
    },
    "mpnet": {**_BERT, **_IDS, "model_type": "mpnet"},
    "albert": {**_BERT, "model_type": "albert", "embedding_size": 8, "classifier_dropout_prob": 0},
}

_DECODER = {**_SIZES, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 1}

DECODERS: dict[str, dict[str, Any]] = {
    "gemma": {**_DECODER, "model_type": "gemma", "head_dim": 4},
    "phi3": {**_DECODER, "model_type": "phi3"},
    "stablelm": {**_DECODER, "model_type": "stablelm"},
    "starcoder2": {**_DECODER, "model_type": "starcoder2"},
    "glm": {**_DECODER, "model_type": "glm", "head_dim": 4},
    "helium": {**_DECODER, "model_type": "helium", "head_dim": 4},
}
"""Decoders without a table, with fused and separate layers."""
