"""Initial weights as transformers' own modules make them, the same under every layout.

A block is made whole on the CPU, in float32, and drawn from a generator of its own, seeded by its
path; so is every module outside of the blocks. A rank that asks for one parameter after another
holds one block at a time.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm.random import seed_from
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.table import Family, block_of
from torchdistpackage.models.transformers_meta import ALONE, Constructed, on_meta
from torchdistpackage.tools.undisturbed import keep_random_states


class ModuleDraws:
    """The parameters of one config.json, drawn block by block from a run's seed.

    given: the config.json; family: of it.
    """

    def __init__(self, given: Mapping[str, Any], family: Family):
        self._family = family
        self._constructed = Constructed()
        self._model = on_meta(given, torch.float32, self._constructed)
        self._paths = dict(self._model.named_modules())
        self._now: tuple[str, int, dict[str, Tensor]] = ("", 0, {})

    def parameter(self, name: str, seed: int) -> Tensor:
        """The whole parameter of this global name, float32 on the CPU.

        Raises:
            ConfigError: neither the module's constructor nor transformers gives it a value.
        """
        block = block_of(self._family.blocks, name).removesuffix(".")
        path = block or name.rpartition(".")[0]
        if self._now[:2] != (path, seed):
            with ALONE, keep_random_states(), torch.no_grad():
                torch.manual_seed(seed_from(seed, path))
                self._now = path, seed, self._drawn(path, whole=bool(block))
        value = self._now[2][name]
        if value.isnan().any():
            kept = self._constructed.values.get(name)
            if kept is None:
                raise ConfigError(
                    f"{self._family.class_name} gives {name} no initial value; name a folder with "
                    f"weights as model.hf"
                )
            value = kept
        return value

    def _drawn(self, path: str, whole: bool) -> dict[str, Tensor]:
        """By global name the parameters of the module at `path`, with those inside it if `whole`"""
        made = copy.deepcopy(self._paths[path]) if whole else copy.copy(self._paths[path])
        made._parameters = dict(made._parameters)
        inside = dict(made.named_modules()) if whole else {"": made}
        for part in inside.values():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    value = torch.full(parameter.shape, torch.nan)
                    part._parameters[key] = nn.Parameter(value, parameter.requires_grad)
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
        for name in sorted(inside, key=lambda name: -name.count(".") - bool(name)):
            full = f"{path}.{name}" if name else path
            self._owner(full)._init_weights(inside[name])
        if not whole and any(p is not None and p.isnan().any() for p in made._parameters.values()):
            self._draw_from_above(path, made)
        prefix = f"{path}." if path else ""
        return {
            f"{prefix}{name}.{key}" if name else prefix + key: p.detach()
            for name, part in inside.items()
            for key, p in part._parameters.items()
            if p is not None
        }

    def _draw_from_above(self, path: str, made: nn.Module) -> None:
        """Let the rules of the modules around `made`, at `path`, change its parameters, as those of
        a pooling head that draws its attention. All others are on meta, where nothing is drawn."""
        while path:
            path, _, name = path.rpartition(".")
            around = copy.copy(self._paths[path])
            around._modules = {**around._modules, name: made}
            self._owner(path)._init_weights(around)
            made = around

    def _owner(self, path: str) -> Any:
        """The innermost model of transformers that has the module, whose rules hold for it."""
        words = path.split(".")
        for end in range(len(words), -1, -1):
            module = self._paths[".".join(words[:end])]
            if hasattr(module, "_init_weights"):
                return module
        return self._model
