"""The transformers families that have a table, by model_type. No torch."""

from torchdistpackage.families.bert import BERT
from torchdistpackage.families.bloom import BLOOM
from torchdistpackage.families.codegen import CODEGEN
from torchdistpackage.families.falcon import FALCON, REFINED_WEB
from torchdistpackage.families.gpt2 import GPT2
from torchdistpackage.families.gpt_neox import GPT_NEOX
from torchdistpackage.families.opt import OPT
from torchdistpackage.families.t5 import T5
from torchdistpackage.families.table import Family
from torchdistpackage.families.written import written

FAMILIES: dict[str, Family] = {
    **written("llama", "mistral", "qwen2", "qwen3", "gemma2"),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "falcon": FALCON,
    "opt": OPT,
    "bloom": BLOOM,
}
"""Causal language models whose tables list every parameter: used by `model.hf` and
`tensor_parallel`.
"""

SPLIT_ALONE: dict[str, Family] = {
    **written("gemma", "mixtral"),
    "codegen": CODEGEN,
    "RefinedWeb": REFINED_WEB,
    "RefinedWebModel": REFINED_WEB,
    "bert": BERT,
    "t5": T5,
}
"""Families whose tables list split layers by name suffix; only `tensor_parallel` uses them."""
