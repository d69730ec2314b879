"""Small models of each family that has a plan."""

import transformers as hf

from tests.parallel.auto.models import SMALL, VOCAB

HALF = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": VOCAB, "d_model": 24, "d_ff": 37, "num_layers": 2, "num_heads": 4}
T5 |= {"d_kv": 6, "dropout_rate": 0.0, "decoder_start_token_id": 0}
CODEGEN = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 16, "n_positions": 32}
CODEGEN |= {"n_ctx": 32, "n_inner": 37, "rotary_dim": 2, "bos_token_id": 0, "eos_token_id": 1}
CODEGEN |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
OPT = {**HALF, "ffn_dim": 37, "dropout": 0.0, "max_position_embeddings": 32}

FAMILIES = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**{**SMALL, "num_key_value_heads": 4}, head_dim=6)
    ),
    "qwen3 with shared key heads": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, head_dim=6)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SMALL, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SMALL, head_dim=8, query_pre_attn_scalar=8)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**SMALL, num_local_experts=4, experts_implementation="eager")
    ),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, word_embed_proj_dim=24)),
    "opt with projections": lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, word_embed_proj_dim=16)),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=4)
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**HALF, intermediate_size=37, hidden_dropout=0.0, attention_dropout=0.0)
    ),
    "codegen": lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(**CODEGEN)),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**HALF, num_kv_heads=2, new_decoder_architecture=True, bias=True)
    ),
    "falcon with one key head": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**HALF, multi_query=True)
    ),
    "falcon with alibi": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**HALF, multi_query=False, alibi=True, bias=True, parallel_attn=False)
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**HALF, intermediate_size=37, **NO_DROPOUT)),
    "bert as a decoder": lambda: hf.BertLMHeadModel(
        hf.BertConfig(**HALF, intermediate_size=37, is_decoder=True, **NO_DROPOUT)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "t5 with gates": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
}
FULLY_MASKED = ("gemma2", "bloom")
"""Without a number where a row sees nothing, as the unsplit models."""
IN_FLOAT32 = ("mixtral", "qwen3 with shared key heads")
"""Steps that are rounded to float32 are in float64 here: the router's scores, and norms of keys,
through which each of the shards that hold a key head has a part of the gradient, rounded apart."""
