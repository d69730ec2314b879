"""The families of transformers' causal language models that can be cut and staged, by their
model_type. No torch."""

from torchdistpackage.models.families.bloom import BLOOM
from torchdistpackage.models.families.falcon import FALCON
from torchdistpackage.models.families.gpt2 import GPT2
from torchdistpackage.models.families.gpt_neox import GPT_NEOX
from torchdistpackage.models.families.llama import GEMMA2, LLAMA, MISTRAL, QWEN2, QWEN3
from torchdistpackage.models.families.opt import OPT
from torchdistpackage.models.families.table import Family

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
