"""The plain module inside wrappers, and the names of parameters that have several."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from torchdistpackage.ddp.wrapper_state import Wrapper


def unwrap_model(model: nn.Module) -> nn.Module:
    """`model` without NaiveDDP, torch's data parallel and torch.compile, in any order."""
    while True:
        # torch.compile's wrapper is known by what it holds: importing its class takes seconds
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, Wrapper | DistributedDataParallel | DataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def aliases(module: nn.Module) -> dict[str, str]:
    """Further name -> first name, of the parameters and buffers that have several."""
    first: dict[object, str] = {}
    more: dict[str, str] = {}
    for held in (module.named_parameters, module.named_buffers):
        for name, x in held(remove_duplicate=False):
            if first.setdefault(x, name) != name:
                more[name] = first[x]
    return more
