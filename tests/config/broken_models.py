"""Runs that break one rule of the model section each, and what is said of it."""

from typing import Any

BROKEN_MODELS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"model__moe": {"top_k": 3}},
        "model.moe.top_k",
        "model.moe.top_k would not be read without model.moe.num_experts",
    ),
    (
        {"model__moe": {"num_experts": 2, "top_k": 3}},
        "model.moe.num_experts",
        "model.moe: top_k=3 experts for each token, of num_experts=2; set top_k to 2 or less",
    ),
    (
        {"model__moe": {"num_experts": 8, "first": 9}},
        "model.moe.first",
        "model.moe.first=9 leaves none of model.layers=4 blocks experts; set first to 3",
    ),
    (
        {"model__moe": {"num_experts": 8, "capacity_factor": 1.0}, "parallel__context": 2},
        "model.moe.capacity_factor",
        "model.moe.capacity_factor=1 counts places in whole sequences",
    ),
    (
        {"model__heads": 4, "parallel__tensor": 8},
        "model.heads",
        "model.heads=4 cannot be shared by parallel.tensor=8 ranks, as each needs one; set "
        "tensor to 4, or heads to 8",
    ),
    (
        {"model__heads": 6, "model__kv_heads": 3, "model__dim": 24, "parallel__tensor": 4},
        "model.heads",
        "model.heads=6 of model.kv_heads=3 groups cannot be shared by parallel.tensor=4 ranks, "
        "as each needs one, and each group as many ranks; set tensor to 3",
    ),
    (
        {"model__kv_heads": 3},
        "model.kv_heads",
        "model.heads=4 cannot share model.kv_heads=3 evenly; set kv_heads to 2 or 4, or heads "
        "to 3 or 6",
    ),
    (
        {"model__head_dim": 7},
        "model.head_dim",
        "model.head_dim=7 is odd, but model.position=rotary turns pairs; set head_dim to 6 or",
    ),
    (
        {"model__dim": 130},
        "model.dim",
        "model.dim=130 is not a multiple of model.heads=4; set dim to 128 or 136, or heads to "
        "1 or 5",
    ),
    (
        {"model__dim": 12},
        "model.dim",
        "model.dim=12 / model.heads=4 gives heads of 3, an odd width, but "
        "model.position=rotary turns pairs; set dim to 8 or 16, or heads to 3 or 6",
    ),
    (
        {"model__mlp_ratio": 0.6, "model__dim": 8, "parallel__tensor": 4},
        "model.mlp_ratio",
        "model.dim=8 x model.mlp_ratio=0.6 = 5 wide, which parallel.tensor=4 ranks cannot "
        "share so that each has some; set mlp_ratio to 0.5, which gives 4",
    ),
    (
        {"model__mlp_hidden": 5, "parallel__tensor": 4},
        "model.mlp_hidden",
        "model.mlp_hidden=5 cannot be shared by parallel.tensor=4 ranks so that each has some; "
        "set mlp_hidden to 4 or 7",
    ),
    (
        {"model__mlp_hidden": 32, "model__mlp_ratio": 3},
        "model.mlp_hidden",
        "model.mlp_ratio=3 would not be read with model.mlp_hidden=32; remove one of them",
    ),
    (
        {"model__rope": {"type": "llama3", "factor": 0.5, "beta_fast": 3}},
        "model.rope.theta",
        "model.rope: type=llama3 needs low_freq_factor, high_freq_factor, "
        "original_max_position_embeddings; beta_fast would not be read with type=llama3; "
        "remove it; factor=0.5; set it to 1 or more",
    ),
    (
        {"model__rope": {"theta": 5e5}, "model__position": "learned"},
        "model.rope.theta",
        "model.rope.theta would not be read with model.position=learned; remove it",
    ),
    (
        {"model__vocab": 100},
        "model.vocab",
        "model.vocab=100 is too small for data.name=python_stdlib",
    ),
    (
        {"model__name": "gpt", "model__target": "a:b"},
        "model.name",
        "model.name=gpt and model.target=a:b exclude each other",
    ),
    (
        {"model__args": {"depth": 3}},
        "model.name",
        "model.args (depth) would not be read, only model.target takes them",
    ),
    (
        {"model__target": "a:b", "model__layers": 9, "model__tied": False},
        "model.layers",
        "model.layers, model.tied would not be read, because model.target=a:b builds",
    ),
    (
        {"model__lora": {"target": ("q_proj", "v_proj")}},
        "model.lora.target",
        "model.lora.target=[q_proj, v_proj] adapts transformers' own modules; name their",
    ),
    (
        {"model__hf": "m/config.json", "model__lora": {"target": ("q_proj",)}},
        "model.lora.target",
        "model.hf=m/config.json names no weights that they could adapt; name the folder",
    ),
    (
        {"model__lora": {"r": 4, "alpha": 2}},
        "model.lora.r",
        "model.lora.r, model.lora.alpha would not be read without model.lora.target",
    ),
    (
        {
            "model__hf": "m",
            "model__lora": {"target": ("q_proj",), "load_in_4bit": True},
            "train__compile": "blocks",
        },
        "model.lora.load_in_4bit",
        "model.lora.load_in_4bit unpacks weights within their products, which train.compile=blocks",
    ),
]
"""As `BROKEN` of broken_runs.py."""
