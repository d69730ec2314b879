"""Layers that predict further tokens (MTP), as folders of DeepSeek V3 and GLM 4 MoE have them.

transformers has no modules for them. Where they train, the block of the first one is one more
block of the model, behind those of its settings; `DEPTH` in the settings says how many these are.
"""

from collections.abc import Mapping
from typing import Any, cast

COUNT = "num_nextn_predict_layers"
"""Key of config.json with the number of these layers."""
DEPTH = "tdp_main_layers"
"""Key of ours, in settings with one more block: the number of blocks of the model itself."""
TRAINED = ("deepseek_v3", "glm4_moe")
"""Types of models whose layer has the form of the DeepSeek V3 report, section 2.2."""


def with_mtp(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with one more block."""
    layers = cast(int, settings["num_hidden_layers"])
    return {**settings, "num_hidden_layers": layers + 1, DEPTH: layers}


def without_mtp(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as config.json has them."""
    plain = dict(settings)
    layers = plain.pop(DEPTH, None)
    return plain if layers is None else {**plain, "num_hidden_layers": layers}


def mtp_problem(settings: Mapping[str, Any]) -> str | None:
    """Return why the layer of a model cannot train, or None."""
    family, layers = settings.get("model_type"), settings.get("num_hidden_layers")
    if family not in TRAINED:
        return (
            f"train is for {' and '.join(TRAINED)}, whose layer has the form of the DeepSeek V3 "
            f"report, and this is a model of type {family}; set model.mtp to keep or leave_out"
        )
    if settings.get(COUNT) != 1 or type(layers) is not int:
        return (
            f"train is for one layer behind the last block, and config.json has {COUNT}="
            f"{settings.get(COUNT)!r} and num_hidden_layers={layers!r}; set model.mtp to keep or "
            f"leave_out"
        )
    return None
