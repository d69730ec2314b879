"""Layouts and classes that the tests of transformers' classes without a table share."""

import pytest

transformers = pytest.importorskip("transformers")
FULL = (pytest.mark.full,)
STACKED = pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="transformers 4 does not stack experts"
)
LAYOUTS = {
    "data2": ["parallel.data=2"],
    "zero2": ["parallel.data=2", "parallel.zero=2"],
    "zero3": ["parallel.data=2", "parallel.zero=3"],
    "recompute": ["parallel.data=2", "train.recompute=blocks"],
}
PIPE = ["parallel.pipe=2", "pipeline.microbatches=2"]
LAYOUTS |= {"pipe2": PIPE, "pipe2-recompute": [*PIPE, "train.recompute=blocks"]}
EXPERT = ["parallel.data=2", "parallel.expert=2"]
LAYOUTS |= {
    "expert2": EXPERT,
    "expert2-zero3": [*EXPERT, "parallel.zero=3"],
    "expert2-recompute": [*EXPERT, "train.recompute=blocks"],
    "expert2-pipe2": [*EXPERT, *PIPE],
    "expert4": ["parallel.data=4", "parallel.expert=4"],
    "expert2-data4": ["parallel.data=4", "parallel.expert=2", "parallel.zero=1"],
}
TENSOR = ["parallel.tensor=2"]
CONTEXT = ["parallel.context=2"]
LAYOUTS |= {
    "context2": CONTEXT,
    "context3": ["parallel.context=3", "parallel.cp_comm_type=all_gather"],
    "context2-pipe2": [*CONTEXT, *PIPE],
    "context2-expert2": [*CONTEXT, *EXPERT],
    "context2-expert2-zero3": [*CONTEXT, *EXPERT, "parallel.zero=3"],
    "context2-expert2-recompute": [*CONTEXT, *EXPERT, "train.recompute=blocks"],
    "context2-tensor2": [*CONTEXT, *TENSOR],
}
LAYOUTS |= {
    "tensor2": TENSOR,
    "tensor4": ["parallel.tensor=4"],
    "tensor2-pipe2": [*TENSOR, *PIPE],
    "tensor2-zero3": [*TENSOR, "parallel.data=2", "parallel.zero=3"],
    "tensor2-zero1-recompute": [
        *(*TENSOR, "parallel.data=2", "parallel.zero=1", "train.recompute=blocks")
    ],
    "tensor2-expert2": [*TENSOR, *EXPERT],
    "tensor2-expert2-zero2": [*TENSOR, *EXPERT, "parallel.zero=2"],
}
EXACT = (
    *(
        "afmoe",
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "cwm",
        "doge",
        "emu3",
        "ernie4_5",
    ),
    *("exaone4", "falcon_mamba", "gemma", "gemma3_text", "glm4", "gpt_bigcode", "gpt_oss"),
    *("granite", "granitemoe", "helium", "hyperclovax", "internlm3", "jais2", "jetmoe", "laguna"),
    *("olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen3_moe", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2", "mixtral", "ministral3", "nemotron"),
)
"""Classes without a table that compute in float64 throughout, by docs/model_classes.md."""
SHARED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Mixtures whose routers have Switch's loss, which all ranks count together."""
OWN_ROUTING = (
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "kimi_linear", "minimax", "minimax_m2"),
    *("qwen3_next", "deepseek_v4", "nemotron_h", "dots1", "ernie4_5_moe", "llama4_text"),
)
"""Mixtures with shared experts, groups of experts, biases, or gates and routers of their own."""
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
