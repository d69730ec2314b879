"""Runs that break one rule of the model section each, and what is said of it."""

from typing import Any

BROKEN_MODELS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"model__moe": {"top_k": 3}},
        "model.moe.top_k",
        "model.moe.top_k model.moe.num_experts",
    ),
    (
        {"model__moe": {"num_experts": 2, "top_k": 3}},
        "model.moe.num_experts",
        "model.moe: top_k=3 experts for each token, of num_experts=2; set top_k to 2 or less",
    ),
    (
        {"model__moe": {"num_experts": 8, "first": 9}},
        "model.moe.first",
        "model.moe.first=9 model.layers=4 set first 3",
    ),
    (
        {"model__moe": {"num_experts": 8, "capacity_factor": 1.0}, "parallel__context": 2},
        "model.moe.capacity_factor",
        "model.moe.capacity_factor=1 parallel.context=2 set capacity_factor null context 1",
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
        "model.heads=6 model.kv_heads=3 parallel.tensor=4 set tensor 3",
    ),
    (
        {"model__kv_heads": 3},
        "model.kv_heads",
        "model.heads=4 model.kv_heads=3 set kv_heads 2 4 heads 3 6",
    ),
    (
        {"model__head_dim": 7},
        "model.head_dim",
        "model.head_dim=7 model.position=rotary set head_dim 6",
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
        "model.dim=12 model.heads=4 3 odd model.position=rotary set dim 8 16 heads 3 6",
    ),
    (
        {"model__mlp_ratio": 0.4, "model__dim": 8, "parallel__tensor": 4},
        "model.mlp_ratio",
        "model.dim=8 model.mlp_ratio=0.4 = 3 parallel.tensor=4 set mlp_ratio 0.5 4",
    ),
    (
        {"model__mlp_hidden": 3, "parallel__tensor": 4},
        "model.mlp_hidden",
        "model.mlp_hidden=3 parallel.tensor=4 set mlp_hidden 4",
    ),
    (
        {"model__mlp_hidden": 32, "model__mlp_ratio": 3},
        "model.mlp_hidden",
        "model.mlp_ratio=3 model.mlp_hidden=32 remove",
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
        "model.rope.theta model.position=learned remove",
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
        "model.args model.target",
    ),
    (
        {"model__target": "a:b", "model__layers": 9, "model__tied": False},
        "model.layers",
        "model.layers model.tied model.target=a:b",
    ),
    (
        {"model__lora": {"target": ("q_proj", "v_proj")}},
        "model.lora.target",
        "model.lora.target=[q_proj, v_proj] set model.hf folder",
    ),
    (
        {"model__hf": "m/config.json", "model__lora": {"target": ("q_proj",)}},
        "model.lora.target",
        "adapters model.hf=m/config.json weights set model.hf folder",
    ),
    (
        {"optim__name": "muon", "model__hf": "m", "model__lora": {"target": ("q_proj",)}},
        "optim.name",
        "optim.name=muon model.lora.target=[q_proj] lora_A lora_B use optim.name=adamw",
    ),
    (
        {
            "model__hf": "m",
            "model__lora": {"target": ("q_proj",), "modules_to_save": ("lm_head",)},
            "data__name": "preference",
            "data__path": "p.jsonl",
            "data__tokenizer": "m",
        },
        "model.lora.modules_to_save",
        "model.lora.modules_to_save=[lm_head] reference data.name=preference set "
        "train.dpo.reference file remove modules_to_save",
    ),
    (
        {"model__lora": {"r": 4, "alpha": 2}},
        "model.lora.r",
        "model.lora.r model.lora.alpha model.lora.target",
    ),
    (
        {
            "model__hf": "m",
            "model__lora": {"target": ("q_proj",), "load_in_4bit": True, "load_in_8bit": True},
        },
        "model.lora.load_in_8bit",
        "model.lora.load_in_8bit load_in_4bit both set one false",
    ),
    (
        {"model__mtp": "leave_out"},
        "model.mtp",
        "model.mtp no effect without model.hf",
    ),
    (
        {"model__hf": "m", "model__mtp": "train", "parallel__pipe": 2},
        "model.mtp",
        "model.mtp=train parallel.pipe set model.mtp keep",
    ),
    (
        {
            "model__hf": "m",
            "model__lora": {"target": ("q_proj",), "bnb_4bit_use_double_quant": True},
        },
        "model.lora.bnb_4bit_use_double_quant",
        "model.lora.bnb_4bit_use_double_quant load_in_4bit set that true",
    ),
    (
        {
            "model__hf": "m",
            "model__lora": {"target": ("q_proj",), "load_in_4bit": True},
            "train__compile": "blocks",
        },
        "model.lora.load_in_4bit",
        "model.lora.load_in_4bit train.compile=blocks off load_in_4bit false",
    ),
]
"""As `BROKEN` of broken_runs.py."""
