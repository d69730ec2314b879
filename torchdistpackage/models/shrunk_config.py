"""A small config.json of the same classes: narrow, with few layers, heads and experts. No torch.

Rules are tried on such a copy before they split the model itself. Sizes are recognised by their
names, which families share. Proportions between sizes are kept: a key-value head still serves
several query heads if it did, and each kind of layer occurs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

WIDTH, HEAD, VOCAB, POSITIONS = 32, 8, 67, 64
"""Sizes of the small copy: its residual stream, a head, its vocabulary (which ranks cannot share
evenly), and the longest sequence."""
_HEADS, _EXPERTS, _WINDOW, _MOST_LAYERS = 4, 4, 4, 8

_WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "n_embed",
    "emb_dim",
    "embedding_dim",
    "embedding_size",
    "word_embed_proj_dim",
    "attention_hidden_size",
    "lru_width",
    "input_embedding_size",
    "output_embedding_size",
    "rotary_emb_dim",
    "backbone_hidden_size",
    "pooler_hidden_size",
)
_INNER = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "dff",
    "dim_ff",
    "d_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "intermediate_size_mlp",
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "feed_forward_size",
    "shared_intermediate_size",
    "expert_ffn_hidden_size",
    "dense_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "mlp_dim",
)
_QUERY_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
    "swa_num_attention_heads",
    "num_query_groups",
)
_KEY_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "kv_n_heads": "n_heads",
    "num_global_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
    "num_layers_per_stack",
)
_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "zero_expert_num",
)
_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k",
    "top_k_experts",
)
_FIXED = {
    "hidden_size_global": WIDTH,
    "adapter_in_dim": WIDTH,
    "adapter_out_dim": WIDTH,
    "adapter_input_size": WIDTH,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "decoder_vocab_size": VOCAB,
    "encoder_hash_byte_group_vocab": VOCAB,
    "ngram_vocab_size_base": VOCAB,
    "max_position_embeddings": POSITIONS,
    "n_positions": POSITIONS,
    "n_ctx": POSITIONS,
    "max_seq_len": POSITIONS,
    "max_target_positions": POSITIONS,
    "max_source_positions": POSITIONS,
    "context_length": POSITIONS,
    "head_dim": HEAD,
    "global_head_dim": HEAD,
    "swa_head_dim": HEAD,
    "dim_head": HEAD,
    "d_head": HEAD,
    "attention_head_size": HEAD,
    "query_pre_attn_scalar": HEAD,
    "qk_nope_head_dim": HEAD,
    "qk_rope_head_dim": HEAD // 2,
    "qk_head_dim": HEAD + HEAD // 2,
    "v_head_dim": HEAD,
    "rotary_dim": HEAD // 2,
    "kv_lora_rank": 2 * HEAD,
    "q_lora_rank": 2 * HEAD,
    "o_lora_rank": HEAD,
    "o_groups": 2,
    "index_head_dim": HEAD,
    "index_n_heads": 2,
    "index_topk": HEAD,
    "linear_head_dim": HEAD,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hidden_size_per_layer_input": HEAD,
    "laurel_rank": HEAD,
    "kv_channels": HEAD,
    "d_rel": HEAD,
    "rel_extent": 2 * HEAD,
    "router_hidden_size": 2 * HEAD,
    "adapter_rank": HEAD,
    "loop_gate_rank": HEAD,
    "gated_norm_rank": HEAD,
    "hc_lowrank": HEAD,
    "ple_embed_dim": 2 * HEAD,
    "mamba_d_state": HEAD,
    "ssm_state_size": HEAD,
    "state_size": HEAD,
    "mamba_n_heads": 2 * WIDTH // HEAD,
    "mamba_num_heads": 2 * WIDTH // HEAD,
    "mamba_d_head": HEAD,
    "mamba_head_dim": HEAD,
    "mamba_headdim": HEAD,
    "n_mamba_heads": 2 * WIDTH // HEAD,
    "mamba_d_ssm": 2 * WIDTH,
    "time_step_rank": 4,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
    "block_size": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "pronunciation_embed_dim": WIDTH,
    "shape_embed_dim": WIDTH,
    "pronunciation_vocab_size": VOCAB,
    "shape_vocab_size": VOCAB,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "axial_pos_shape": [3, 4],
    "axial_pos_embds_dim": [WIDTH // 2, WIDTH // 2],
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "ffn_round_up_to_multiple_of": 1,
    "block_multiple_of": 1,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "prompt_length": 4,
    "n_layers_per_attn_res_block": 1,
    "n_input_layers": 1,
    "n_recurrent_layers": 2,
    "n_output_layers": 1,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 1,
}
_WINDOWS = ("window", "attention_chunk_size", "local_attention")
_KINDS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "block_types",
    "indexer_types",
    "attention_layers",
    "attn_layers",
)
"""Lists that name the kind of each layer."""
_NUMBERS = ("_idxs", "layer_ids")
"""Ends of the names of lists of layers' numbers."""


def shrunk(
    config_dict: Mapping[str, Any], of_each_kind: int = 1, heads: int = _HEADS
) -> dict[str, Any]:
    """Return the config.json of a small model of the same classes as that of `config_dict`, which
    has all settings of a config.json.

    of_each_kind: layers that the copy keeps of each kind. heads: that it has at most; where they do
    not divide `WIDTH` it is wider. Whether transformers can make a model of it has to be tried.
    """
    to_width = WIDTH if WIDTH % heads == 0 else heads * HEAD
    config_dict = _one_entry_a_layer(config_dict)
    small = dict(config_dict)
    layers = _layers_of(config_dict)
    kept_layers = _kept_layers(config_dict, layers, of_each_kind)
    if layers:
        for key, value in config_dict.items():
            if isinstance(value, list) and len(cast(list[Any], value)) == layers:
                small[key] = [value[i] for i in kept_layers]
            elif isinstance(value, list) and ("layers" in key or key.endswith(_NUMBERS)):
                small[key] = _indices(value, kept_layers)
    width = next((config_dict[k] for k in _WIDTHS if _is_size(config_dict.get(k))), 0)
    num_experts = next((config_dict[k] for k in _EXPERT_COUNTS if _is_size(config_dict.get(k))), 0)
    for key, value in config_dict.items():
        if isinstance(value, dict):
            inner = cast(dict[str, Any], value)
            small[key] = _shrunk_inside(key, inner, kept_layers, of_each_kind, heads)
        elif isinstance(value, list) and key in _INNER:
            small[key] = [_inner(x, width, to_width) for x in small[key]]
        elif isinstance(value, list) and key in ("axial_pos_shape", "axial_pos_embds_dim"):
            small[key] = _FIXED[key]
        elif isinstance(value, list) and key.endswith("token_id"):
            small[key] = [x if x < VOCAB else 2 for x in cast(list[int], value)]
        elif type(value) is int and value > 0:
            small[key] = _size(
                key, value, config_dict, width, to_width, len(kept_layers), num_experts, heads
            )
    return small


def without_dropout(small: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `small` with every dropout rate 0, so that ranks draw no random numbers."""
    return {
        key: without_dropout(cast(dict[Any, Any], x))
        if isinstance(x, dict)
        else 0.0
        if "drop" in str(key) and isinstance(x, float)
        else x
        for key, x in small.items()
    }


def _one_entry_a_layer(config_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with one entry a layer, where `config_dict` lists the attention and the MLP
    of each layer apart, as Dory's does.
    """
    kinds = config_dict.get("layer_types")
    if not isinstance(kinds, list) or "mlp" not in kinds:
        return config_dict
    if cast(list[Any], kinds)[1::2] != ["mlp"] * (len(kinds) // 2):
        return config_dict
    counts = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    halved = {key: config_dict[key] // 2 for key in counts if _is_size(config_dict.get(key))}
    return {**config_dict, **halved, "layer_types": kinds[::2]}


def _size(
    key: str,
    value: int,
    config_dict: Mapping[str, Any],
    width: int,
    to_width: int,
    layers: int,
    num_experts: int,
    heads: int,
) -> int:
    if key in _WIDTHS:
        return max(round(value * to_width / width / HEAD) * HEAD, HEAD)
    if key in _INNER:
        return _inner(value, width, to_width)
    if key in _LAYERS:
        return layers if value == _layers_of(config_dict) else min(value, 2)
    if key in _KEY_HEADS:
        queries = config_dict.get(_KEY_HEADS[key])
        return min(value, heads if queries == value else heads // 2)
    if key in _QUERY_HEADS:
        return (2 * WIDTH // HEAD) if _is_mamba2(config_dict) else min(value, heads)
    if key in _EXPERT_COUNTS:
        return min(value, _EXPERTS)
    if key == "top_k" and "num_beams" in config_dict:
        return value  # of generation, whose defaults transformers 4 writes into every config.json
    if key in _CHOSEN:
        return min(value, 2, _EXPERTS if num_experts else value)
    if key in ("n_group", "num_expert_group", "mamba_n_groups", "n_groups", "mamba_ngroups"):
        return min(value, 2)
    if key == "topk_group":
        return 1
    if key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        return min(value, 1)
    if key == "num_kv_shared_layers":
        return layers if value == _layers_of(config_dict) else min(value, layers // 2)
    if key in ("num_nextn_predict_layers", "moe_layer_end_index"):
        return min(value, layers - 1 if key == "moe_layer_end_index" else 1)
    if key.endswith(("_token_id", "_token_index", "_index")) and "layer" not in key:
        return value if value < VOCAB else 2
    if key == "head_dim" and value == config_dict.get("qk_rope_head_dim"):
        return HEAD // 2
    if key == "head_dim" and value in _whole_heads(config_dict):
        return HEAD + HEAD // 2
    if key in _FIXED:
        return cast(int, _FIXED[key])
    if any(part in key for part in _WINDOWS) and value > _WINDOW and "pattern" not in key:
        return _WINDOW
    return value


def _inner(value: int, width: int, to_width: int) -> int:
    """Return twice the proportional width, so that each rank has more than one channel."""
    return max(round(value * to_width / (width or value) / HEAD), 2) * HEAD


def _is_mamba2(config_dict: Mapping[str, Any]) -> bool:
    """Return whether this is Mamba 2, in which the number of heads times their width must equal the
    inner width.
    """
    return config_dict.get("model_type") == "mamba2"


def _whole_heads(config_dict: Mapping[str, Any]) -> set[int]:
    """Return the widths of heads including their rotary part, for latent attention."""
    by_layer = cast(dict[str, Any], config_dict.get("per_layer_config") or {}).values()
    parts = {x.get("qk_nope_head_dim") for x in (config_dict, *by_layer) if isinstance(x, Mapping)}
    rotary = config_dict.get("qk_rope_head_dim")
    return {x + rotary for x in parts if x and rotary}


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _layers_of(config_dict: Mapping[str, Any]) -> int:
    return next((config_dict[key] for key in _LAYERS if _is_size(config_dict.get(key))), 0)


def _kept_layers(config_dict: Mapping[str, Any], layers: int, of_each_kind: int) -> list[int]:
    """Return the layers that the copy keeps: `of_each_kind` of each kind that a list names, and at
    least two (four without such a list).
    """
    kinds = [
        config_dict[k]
        for k in _KINDS
        if isinstance(config_dict.get(k), list) and len(config_dict[k]) == layers
    ]
    # the last layers read what earlier ones of their kind made
    shared = layers - min(config_dict.get("num_kv_shared_layers") or 0, layers)
    seen: dict[object, list[int]] = {}
    for index in range(layers):
        kind = tuple(str(names[index]) for names in kinds)
        seen.setdefault((index >= shared, kind), []).append(index)
    if any("hybrid" in kind for _, kind in seen):  # tied over all layers of that kind
        of_each_kind += 1
    chosen = sorted(i for indices in seen.values() for i in indices[:of_each_kind])[:_MOST_LAYERS]
    num_layers = 2 if kinds and not config_dict.get("n_recurrent_layers") else 4
    more = [i for i in range(layers) if i not in chosen]
    return sorted([*chosen, *more[: max(num_layers - len(chosen), 0)]])


def _indices(value: Sequence[Any], layers: Sequence[int]) -> list[Any]:
    """Return the kept entries of a list of layer numbers, with their new numbers."""
    new = {old: at for at, old in enumerate(layers)}
    return [new.get(x, x) for x in value if not isinstance(x, int) or x in new]


def _shrunk_inside(
    key: str, inner: Mapping[str, Any], kept: Sequence[int], of_each_kind: int, heads: int
) -> dict[str, Any]:
    if key.endswith("_config") and key != "per_layer_config":
        return shrunk(inner, of_each_kind, heads)
    if key == "per_layer_config":
        new = {old: at for at, old in enumerate(kept)}
        return {  # its keys may have leading zeros
            str(new[int(k)]): shrunk(v, of_each_kind, heads) if isinstance(v, dict) else v
            for k, v in inner.items()
            if int(k) in new
        }
    return _shrunk_rope(inner)


def _shrunk_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings whose lists, of one number per channel, are cut to the small head."""
    half = HEAD // 2
    return {
        key: (value[:half] if isinstance(value, list) else _shrunk_rope(value))
        if isinstance(value, list | dict)
        else value
        for key, value in rope.items()
    }
