"""The families of transformers with a table, by their model_type. No torch."""

from torchdistpackage.families.bert import BERT
from torchdistpackage.families.bloom import BLOOM
from torchdistpackage.families.codegen import CODEGEN
from torchdistpackage.families.falcon import FALCON, REFINED_WEB
from torchdistpackage.families.gpt2 import GPT2
from torchdistpackage.families.gpt_neox import GPT_NEOX
from torchdistpackage.families.llama import GEMMA2, LLAMA, MISTRAL, QWEN2, QWEN3
from torchdistpackage.families.mixtral import MIXTRAL
from torchdistpackage.families.opt import OPT
from torchdistpackage.families.t5 import T5
from torchdistpackage.families.table import Family

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
"""Causal language models whose tables list every parameter: `model.hf` and `tensor_parallel`."""

SPLIT_ALONE: dict[str, Family] = {
    "gemma": LLAMA,
    "mixtral": MIXTRAL,
    "codegen": CODEGEN,
    "RefinedWeb": REFINED_WEB,
    "RefinedWebModel": REFINED_WEB,
    "bert": BERT,
    "t5": T5,
}
"""Those whose tables list what is cut, by the ends of names: `tensor_parallel` alone."""
