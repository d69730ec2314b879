"""A model of transformers from its settings, its parameters without memory.

transformers, of the extra `hf`, is imported on first use. Code that comes with a folder
(trust_remote_code) is never run.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchdistpackage.config.hugging_face import with_earlier_rope
from torchdistpackage.config.packages import is_before, too_old
from torchdistpackage.errors import ConfigError, NotAvailableError
from torchdistpackage.models.transformers_rope import keep_lengths_apart

ALONE = threading.RLock()
"""Of threads as ranks one makes a model at a time: transformers imports parts of itself meanwhile,
which threads cannot do side by side, and sets the process's default type.
"""
_REFUSALS = (ValueError, KeyError, TypeError, AssertionError, ImportError, AttributeError)
"""What transformers raises where settings are no model."""


def check_packages(*packages: str) -> None:
    """Raises NotAvailableError where transformers, or one of `packages`, is not there or too old"""
    try:
        import transformers  # noqa: F401

        if "peft" in packages:
            import peft  # noqa: F401
    except ImportError as error:
        raise NotAvailableError(
            f"model.hf needs transformers, and model.lora peft; install the extra hf: "
            f'pip install "torchdistpackage[hf]" ({error})'
        ) from error
    if old := [text for x in ("transformers", *packages) if (text := too_old(x)) is not None]:
        raise NotAvailableError(f"model.hf {'; '.join(old)}")


def known_settings(given: Mapping[str, Any]) -> Any:
    """The settings of a config.json as transformers has them, with what it leaves out.

    Raises:
        NotAvailableError: transformers is not there.
        ConfigError: it has no such model, none of text from token to token, or refuses the settings
    """
    check_packages()
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    family = given.get("model_type")
    with ALONE:
        if not isinstance(family, str) or family not in CONFIG_MAPPING:
            raise ConfigError(
                f"model_type is {family!r}, which transformers {__version__} does not know"
                f"{_own_code(given)}; a newer one may. A model of your own is named by model.target"
            )
        config = _settings(given)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"model_type is {family!r}, and transformers {__version__} has no causal language "
                f"model of that type; use the folder of one, or model.target"
            )
        if problem := _unbuildable(config):
            raise ConfigError(problem)
    return config


def _unbuildable(config: Any) -> str | None:
    """Why transformers makes no causal language model of these settings, by what its classes ask
    for; None: it may make one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
    from transformers.utils import is_timm_available

    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    names: Mapping[str, Any] = getattr(config, "sub_configs", None) or {}
    inner = {name: x for name in names if (x := getattr(config, name, None)) is not None}
    wanted = getattr(kind, "config_class", None)
    held = next((name for name, x in inner.items() if type(x) is wanted), None)
    if held not in (None, "text_config") and type(config) is not wanted:
        return (
            f"{kind.__name__} is made of {wanted.__name__}, and config.json of model_type "
            f"{config.model_type!r} has these settings in {held}, from which transformers does not "
            f"take them; use model.target"
        )
    for name, x in inner.items():
        tower = MODEL_MAPPING.get(type(x), None)
        if getattr(tower, "__name__", "") == "TimmWrapperModel" and not is_timm_available():
            return (
                f"{kind.__name__} has a TimmWrapperModel ({name}), which needs the package timm; "
                f"pip install timm"
            )
    return None


def _own_code(given: Mapping[str, Any]) -> str:
    named = given.get("auto_map")
    if not isinstance(named, Mapping):
        return ""
    return (
        f", and the code that its auto_map names ({', '.join(map(str, named.values()))}) is not run"
    )


def _settings(given: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        made = dict(given)
        if is_before("transformers", "5"):
            made = with_earlier_rope(made)
        config = CONFIG_MAPPING[given["model_type"]].from_dict(made)
    except _REFUSALS as error:
        raise refused(error) from error
    config.use_cache = False
    return config


def refused(error: Exception) -> ConfigError:
    """What to say of settings from which transformers makes no model."""
    return ConfigError(f"transformers refuses the config.json of model.hf: {error!r}")


def build_options(dtype: torch.dtype | None) -> dict[str, Any]:
    """How a model is made: in float64 with plain products of experts, as torch has no other."""
    dtype = dtype or torch.get_default_dtype()
    plain = dtype == torch.float64 and not is_before("transformers", "5")
    return {"dtype": dtype} | ({"experts_implementation": "eager"} if plain else {})


class Constructed:
    """By name the values that constructors gave to small parameters, before these moved to meta.

    Of one that only its constructor gives a value there is no other way to know it.
    """

    MOST = 1 << 20

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._of: dict[nn.Parameter, Tensor] = {}

    def keep(self, meta: nn.Parameter, value: Tensor) -> None:
        if value.numel() <= self.MOST:
            self._of[meta] = value.detach().float().clone()

    def name(self, model: nn.Module) -> None:
        """Know the values by the names of `model`, whose parameters they were."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in self._of:
                self.values[name] = self._of[parameter]


def on_meta(
    given: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    constructed: Constructed | None = None,
) -> Any:
    """The whole model of a config.json, its parameters on the meta device, its buffers made.

    constructed: is to know what constructors make.

    Raises:
        NotAvailableError: transformers is not there.
        ConfigError: it refuses these settings.
    """
    check_packages()
    from transformers import AutoModelForCausalLM

    with ALONE:
        config = _settings(given)
        try:
            with parameters_on_meta(constructed):
                model = AutoModelForCausalLM.from_config(config, **build_options(dtype))
        except _REFUSALS as error:
            raise refused(error) from error
    keep_lengths_apart(model)
    if constructed is not None:
        constructed.name(model)
    return model


@contextmanager
def parameters_on_meta(constructed: Constructed | None = None) -> Iterator[None]:
    """Modules made inside have their parameters there; of buffers the values would be lost."""
    thread = threading.get_ident()  # the hook is called in all of them

    def moved(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return parameter
        made = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        if constructed is not None:
            constructed.keep(made, parameter)
        return made

    handle = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        handle.remove()
