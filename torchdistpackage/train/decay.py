"""Choose the parameters with weight decay: matrices, but no norm or bias.

A norm is recognised by the class of the module that holds the parameter, or by its name if a model
keeps the weight as its own parameter; a bias by its name. So the biases of all experts, stored as
one matrix, and the norm of each head, also one matrix, do not decay.
"""

import re

from torch import Tensor, nn

_NORM_CLASS = re.compile(r"norm(\d+d|1p|gated|fp32)?$", re.I)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)
_NORM = re.compile(r"(^|_)(layer|rms)?_?norm\d*(_|$)", re.I)
_BIAS = re.compile(r"(^|_)bias(es)?\d*(_|$)", re.I)
_MATRICES = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)


def decays(name: str, parameter: Tensor, module: nn.Module) -> bool:
    """Return whether weight decay applies to `parameter`, named `name` in `module`.

    name: its full name in the model.
    """
    if parameter.dim() < 2 or any(_BIAS.search(part) for part in name.split(".")):
        return False
    path, _, last = name.rpartition(".")
    is_norm = isinstance(module, _NORMS) or _NORM_CLASS.search(type(module).__name__)
    if is_norm or _NORM.search(last):
        return False
    is_named = _NORM.search(path.rpartition(".")[2]) is not None
    return not is_named or isinstance(module, _MATRICES)


def decaying(model: nn.Module) -> set[str]:
    """Return the names of the parameters of `model` that weight decay applies to."""
    return {
        name
        for name, parameter in model.named_parameters()
        if decays(name, parameter, model.get_submodule(name.rpartition(".")[0]))
    }
