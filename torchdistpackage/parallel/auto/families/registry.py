"""The families whose plan is known, by the `model_type` of their configuration."""

from collections.abc import Callable, Sequence
from typing import Any

from torchdistpackage.parallel.auto.families.bert import get_bert_config
from torchdistpackage.parallel.auto.families.bloom import get_bloom_config
from torchdistpackage.parallel.auto.families.codegen import get_codegen_config
from torchdistpackage.parallel.auto.families.falcon import get_refined_web_config
from torchdistpackage.parallel.auto.families.gpt2 import get_gpt2_config
from torchdistpackage.parallel.auto.families.gpt_neox import get_gpt_neox_config
from torchdistpackage.parallel.auto.families.llama import get_llama_config
from torchdistpackage.parallel.auto.families.mixtral import get_mixtral_config
from torchdistpackage.parallel.auto.families.opt import get_opt_config
from torchdistpackage.parallel.auto.families.t5 import get_t5_config
from torchdistpackage.parallel.auto.rules import Config

PREDEFINED_CONFIGS: dict[str, Callable[[Any, Sequence[Any]], Config]] = {
    "gpt2": get_gpt2_config,
    "bloom": get_bloom_config,
    "t5": get_t5_config,
    "bert": get_bert_config,
    "gpt_neox": get_gpt_neox_config,
    "codegen": get_codegen_config,
    "falcon": get_refined_web_config,
    "RefinedWeb": get_refined_web_config,
    "RefinedWebModel": get_refined_web_config,
    "opt": get_opt_config,
    "mixtral": get_mixtral_config,
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
        get_llama_config,
    ),
}
"""model_type -> plan of (configuration, devices)."""


def plan_for(module: Any, num: int) -> Config | None:
    """The plan for `num` shards of a module that has a family's `config`, such as with adapters."""
    return find_plan(getattr(module, "config", None), num) if num > 1 else None


def find_plan(model_config: Any, num: int) -> Config | None:
    """The plan for `num` shards of a model with this configuration; None where none is known.

    Raises:
        LayoutError: the family is known, but this model cannot be split over so many.
    """
    get = PREDEFINED_CONFIGS.get(getattr(model_config, "model_type", None) or "")
    return None if get is None or num < 2 else get(model_config, range(num))
