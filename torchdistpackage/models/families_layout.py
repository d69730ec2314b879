"""The families of transformers' causal language models that can be cut and staged, by their
model_type. No torch."""

from torchdistpackage.models.family_layout import Family
from torchdistpackage.models.fused_layout import BLOOM, FALCON, GPT2, GPT_NEOX
from torchdistpackage.models.llama_layout import GEMMA2, LLAMA, MISTRAL, QWEN2, QWEN3
from torchdistpackage.models.opt_layout import OPT

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "falcon": FALCON,
    "opt": OPT,
    "bloom": BLOOM,
}
