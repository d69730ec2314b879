"""Build a transformers model from its settings without memory, and draw its initial weights.

transformers, of the extra `hf`, is imported on first use. Code that comes with a folder
(trust_remote_code) is never run.

Initial weights are made by transformers' own modules, the same under every layout. A block is made
whole on the CPU, in float32, and drawn from a generator of its own, seeded by its path; so is every
module outside of the blocks. A rank that asks for one parameter after another holds one block at a
time.
"""

import copy
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchdistpackage.comm.random import seed_from
from torchdistpackage.config.head_tasks import HEAD_TASKS, SCORE, WITHOUT_HEAD, ModelHead
from torchdistpackage.config.hugging_face import with_earlier_rope
from torchdistpackage.config.mtp import DEPTH, without_mtp
from torchdistpackage.config.packages import is_before, too_old
from torchdistpackage.errors import ConfigError, NotAvailableError
from torchdistpackage.families.table import Family, block_of
from torchdistpackage.models.transformers_mtp import add_mtp
from torchdistpackage.models.transformers_rope import keep_lengths_apart
from torchdistpackage.tools.undisturbed import keep_random_states

ALONE = threading.RLock()
"""Lock under which one thread at a time makes a model, if threads are ranks.

Meanwhile transformers imports parts of itself, which threads cannot do concurrently, and sets the
process's default dtype."""
_REFUSALS = (ValueError, KeyError, TypeError, AssertionError, ImportError, AttributeError)
"""Errors that transformers 4 raises for settings that make no model."""


def settings_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that the installed transformers raises for settings that are no
    model.
    """
    try:
        from huggingface_hub.errors import StrictDataclassError  # of the configs of transformers 5
    except ImportError:
        return _REFUSALS
    return (*_REFUSALS, StrictDataclassError)


def check_packages(*packages: str) -> None:
    """Raise NotAvailableError if transformers, or one of `packages`, is missing or too old."""
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


def known_settings(config_dict: Mapping[str, Any], head: ModelHead | None = None) -> Any:
    """Return the settings of a config.json as transformers has them, with its defaults for what is
    left out. head: in place of the one for the next token.

    Raises:
        NotAvailableError: transformers is not there.
        ConfigError: it has no such model, none with this head or of text from token to token, or
            refuses the settings.
    """
    check_packages()
    from transformers import CONFIG_MAPPING, __version__

    family = config_dict.get("model_type")
    with ALONE:
        if not isinstance(family, str) or family not in CONFIG_MAPPING:
            raise ConfigError(
                f"model_type is {family!r}, which transformers {__version__} does not know"
                f"{_own_code(config_dict)}; a newer one may. A model of your own is named by "
                f"model.target"
            )
        config = _settings(config_dict)
        kind = class_of(config, head)
        if kind is None and head is not None:
            raise ConfigError(
                f"model_type is {family!r}, and transformers {__version__} has no class "
                f"{_ending(head)} of that type, which data.name={head.task.name} trains; use the "
                f"folder of another model"
            )
        if kind is None:
            raise ConfigError(
                f"model_type is {family!r}, and transformers {__version__} has no causal language "
                f"model of that type; use the folder of one, or model.target{other_tasks(config)}"
            )
        if problem := _unbuildable(config, kind):
            raise ConfigError(problem)
    return config


def class_of(config: Any, head: ModelHead | None = None) -> Any:
    """Return transformers' class of a causal language model with these settings, or of a model with
    this head; None: there is none.
    """
    kind = auto_class(head)._model_mapping.get(type(config), None)
    return kind[0] if isinstance(kind, tuple) else kind


def auto_class(head: ModelHead | None) -> Any:
    """Return the class of transformers that makes models of this head."""
    import transformers

    return getattr(transformers, f"AutoModel{'ForCausalLM' if head is None else head.task.ending}")


def _ending(head: ModelHead) -> str:
    return f"...{head.task.ending or 'Model'}"


def other_tasks(config: Any) -> str:
    """Return the values of data.name that train an encoder class with these settings, as text."""
    tasks = [x.name for x in HEAD_TASKS.values() if class_of(config, ModelHead(x)) is not None]
    if not tasks:
        return ""
    return (
        f". For texts with labels, or to compare, there are data.name {', '.join(tasks)} and "
        f"{WITHOUT_HEAD.name}"
    )


def settings_of(model: Any) -> dict[str, Any]:
    """Return the config.json contents of a causal language model of transformers.

    A class that is made of one section of its settings keeps that section alone, whose model_type
    has no causal language model; it is put back where config.json has it.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings: dict[str, Any] = model.config.to_diff_dict()
    if type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return settings
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name == type(model).__name__ and family in CONFIG_MAPPING:
            sections = getattr(CONFIG_MAPPING[family], "sub_configs", {})
            if sections.get("text_config") is type(model.config):
                return {"model_type": family, "text_config": settings}
    return settings


def _unbuildable(config: Any, kind: Any) -> str | None:
    """Return why transformers cannot build its class `kind` from these settings, by what its
    classes ask for; None: it may.
    """
    from transformers import MODEL_MAPPING
    from transformers.utils import is_timm_available

    names: Mapping[str, Any] = getattr(config, "sub_configs", None) or {}
    inner = {name: x for name in names if (x := getattr(config, name, None)) is not None}
    config_class = getattr(kind, "config_class", None)
    section = next((name for name, x in inner.items() if type(x) is config_class), None)
    if section not in (None, "text_config") and type(config) is not config_class:
        return (
            f"{kind.__name__} is made of {config_class.__name__}, and config.json of model_type "
            f"{config.model_type!r} has these settings in {section}, from which transformers does "
            f"not take them; use model.target"
        )
    for name, x in inner.items():
        tower = MODEL_MAPPING.get(type(x), None)
        if getattr(tower, "__name__", "") == "TimmWrapperModel" and not is_timm_available():
            return (
                f"{kind.__name__} has a TimmWrapperModel ({name}), which needs the package timm; "
                f"pip install timm"
            )
    return None


def _own_code(config_dict: Mapping[str, Any]) -> str:
    named = config_dict.get("auto_map")
    if not isinstance(named, Mapping):
        return ""
    return (
        f", and the code that its auto_map names ({', '.join(map(str, named.values()))}) is not run"
    )


def _settings(config_dict: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        prepared = without_mtp(config_dict)
        if is_before("transformers", "5"):
            prepared = with_earlier_rope(prepared)
        config = CONFIG_MAPPING[config_dict["model_type"]].from_dict(prepared)
    except settings_errors() as error:
        raise refused(error) from error
    config.use_cache = False
    return config


def refused(error: Exception) -> ConfigError:
    """Return the error for settings from which transformers makes no model."""
    return ConfigError(f"transformers refuses the config.json of model.hf: {error!r}")


def build_options(dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the options for building a model. In float64 experts use plain matmuls, since torch
    has no grouped ones for it.
    """
    dtype = dtype or torch.get_default_dtype()
    plain = dtype == torch.float64 and not is_before("transformers", "5")
    return {"dtype": dtype} | ({"experts_implementation": "eager"} if plain else {})


def on_meta(
    config_dict: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    constructed: "Constructed | None" = None,
    head: ModelHead | None = None,
) -> Any:
    """Return the full model of a config.json, with its parameters on the meta device and its
    buffers made.

    constructed: collects the values that constructors make. head: in place of the one for the next
    token; its logits are those of every position.

    Raises:
        NotAvailableError: transformers is not there.
        ConfigError: it refuses these settings.
    """
    check_packages()
    with ALONE:
        layers = config_dict.get(DEPTH)
        config = _settings(config_dict)
        if layers is not None:
            config.num_hidden_layers = layers + 1
        try:
            # a parameter that its constructor sets later is then known by its NaN
            unset = nullcontext() if constructed is None else unset_is_nan()
            with parameters_on_meta(constructed), unset:
                model = auto_class(head).from_config(config, **build_options(dtype))
                if layers is not None:
                    add_mtp(model, layers)
        except settings_errors() as error:
            raise refused(error) from error
    if dtype == torch.float64:
        for parameter in model.parameters():
            # XLNet makes some in float32 whatever the default; from_pretrained casts them
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    keep_lengths_apart(model)
    if head is not None and scores_positions(model, head):
        score_all_positions(model)
    if constructed is not None:
        constructed.name(model)
    return model


def scores_positions(model: Any, head: ModelHead) -> bool:
    """Return whether the head of `model` is a layer on each position.

    transformers then takes the last position that is not padding, as in all decoders. Encoders pool
    by themselves.
    """
    return head.task.is_of_sequence and isinstance(getattr(model, SCORE, None), nn.Linear)


def score_all_positions(model: Any) -> None:
    """Make a model with a head for sequences return the logits of every position.

    transformers pools them at the last token that is not padding, which only the ids show: a stage
    without the ids, or with a part of the sequence, could not. Here the targets say which it is.
    """

    def forward(self: Any, input_ids: Tensor | None = None, **more: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        base = getattr(self, self.base_model_prefix)
        hidden = base(input_ids=input_ids, **more).last_hidden_state
        return SequenceClassifierOutput(logits=self.score(hidden))

    # a class, as a stage is a copy of the model with other modules
    kind: Any = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})


@contextmanager
def parameters_on_meta(constructed: "Constructed | None" = None) -> Iterator[None]:
    """Put the parameters of modules made in the block on the meta device. Buffers stay, because
    their values would be lost.
    """
    thread = threading.get_ident()  # the hook is called in all of them

    def moved(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return parameter
        on_meta_device = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        if constructed is not None:
            constructed.keep(on_meta_device, parameter)
        return on_meta_device

    handle = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def unset_is_nan() -> Iterator[None]:
    """Let memory that nobody set, as that of `torch.empty`, hold NaN in the block."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# -- what parameters start as --------------------------------------------------------------------


class Constructed:
    """The values that constructors gave to small parameters before these moved to the meta device,
    by name.

    Of one that only its constructor gives a value there is no other way to know it.
    """

    MOST = 1 << 20

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._of: dict[nn.Parameter, Tensor] = {}

    def keep(self, meta: nn.Parameter, value: Tensor) -> None:
        if value.numel() <= self.MOST:
            # a copy, as the parameter loses its memory; float32 whatever the default dtype is
            self._of[meta] = value.detach().float().clone()

    def name(self, model: nn.Module) -> None:
        """Store the values under the names of `model`, the owner of the parameters."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in self._of:
                self.values[name] = self._of[parameter]


def _conv1d() -> type:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


class ModuleDraws:
    """The parameters of one config.json, drawn block by block from a run's seed.

    given: the config.json; family: of it; head: see `on_meta`.
    """

    def __init__(
        self, config_dict: Mapping[str, Any], family: Family, head: ModelHead | None = None
    ):
        self._family = family
        self._constructed = Constructed()
        self._model = on_meta(config_dict, torch.float32, self._constructed, head)
        # blocks may share a module, as all of OpenAI's first GPT share an activation
        self._paths = dict(self._model.named_modules(remove_duplicate=False))
        self._now: tuple[str, int, dict[str, Tensor]] = ("", 0, {})

    def parameter(self, name: str, seed: int) -> Tensor:
        """Return the whole parameter of this global name, float32 on the CPU.

        Raises:
            ConfigError: neither the module's constructor nor transformers gives it a value.
        """
        block = block_of(self._family.blocks, name).removesuffix(".")
        path = block or name.rpartition(".")[0]
        if self._now[:2] != (path, seed):
            with ALONE, keep_random_states(), torch.no_grad():
                torch.manual_seed(seed_from(seed, path))
                self._now = path, seed, self._drawn(path, is_deep=bool(block))
        value = self._now[2][name]
        if value.isnan().any():
            constructed = self._constructed.values.get(name)
            if constructed is None or constructed.isnan().any():
                raise ConfigError(
                    f"{self._family.class_name} gives {name} no initial value; name a folder with "
                    f"weights as model.hf"
                )
            value = constructed
        return value

    def _drawn(self, path: str, is_deep: bool) -> dict[str, Tensor]:
        """Return the parameters of the module at `path` by global name, with those of the modules
        inside it if `is_deep`.
        """
        module = copy.deepcopy(self._paths[path]) if is_deep else copy.copy(self._paths[path])
        module._parameters = dict(module._parameters)
        inside = dict(module.named_modules()) if is_deep else {"": module}
        for part in inside.values():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    value = torch.full(parameter.shape, torch.nan)
                    part._parameters[key] = nn.Parameter(value, parameter.requires_grad)
            if callable(reset := getattr(part, "reset_parameters", None)):
                reset()
            elif type(part) is _conv1d():
                nn.init.normal_(part.weight, std=0.02)  # as its constructor does
        for name in sorted(inside, key=lambda name: -name.count(".") - bool(name)):
            full = f"{path}.{name}" if name else path
            self._owner(full)._init_weights(inside[name])
        if not is_deep and any(
            p is not None and p.isnan().any() for p in module._parameters.values()
        ):
            self._draw_from_above(path, module)
        prefix = f"{path}." if path else ""
        return {
            f"{prefix}{name}.{key}" if name else prefix + key: p.detach()
            for name, part in inside.items()
            for key, p in part._parameters.items()
            if p is not None
        }

    def _draw_from_above(self, path: str, module: nn.Module) -> None:
        """Let the rules of the modules around `module`, at `path`, draw its parameters, as a
        pooling head draws its attention. All other parameters are on meta, where nothing is drawn.
        """
        while path:
            path, _, name = path.rpartition(".")
            around = copy.copy(self._paths[path])
            around._modules = {**around._modules, name: module}
            self._owner(path)._init_weights(around)
            module = around

    def _owner(self, path: str) -> Any:
        """Return the innermost transformers model around the module, whose rules apply to it."""
        words = path.split(".")
        for end in range(len(words), -1, -1):
            module = self._paths[".".join(words[:end])]
            if hasattr(module, "_init_weights"):
                return module
        return self._model
