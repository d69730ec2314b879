"""The models that a configuration can name: one line each. No torch."""

from torchdistpackage.config.model_section import ModelSection
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.lazy import resolve
from torchdistpackage.models.gpt_spec import GPTSpec
from torchdistpackage.models.model_spec import ModelSpec, ModelUse

MODELS: dict[str, type[ModelSpec]] = {
    "gpt": GPTSpec,
}

TRANSFORMERS = "torchdistpackage.models.transformers_spec:TransformersSpec"
"""The model of a transformers folder.

Its families are loaded only if needed, because that takes a tenth of a plan's start."""


def model_of(section: ModelSection) -> type[ModelSpec] | None:
    """Return the kind of model that a model section describes; None: the user's own."""
    if section.hf is not None:
        return resolve(TRANSFORMERS)
    return None if section.name is None else model(section.name)


def spec_of(config: RunConfig) -> ModelSpec | None:
    """Return the model that the model, data and parallel sections describe together; None: the
    user's own.

    Raises:
        LayoutError, ConfigError: they describe no model.
    """
    if (kind := model_of(config.model)) is None:
        return None
    return kind.of_section(config.model.model_dump(), ModelUse.of(config))


def model(name: str) -> type[ModelSpec]:
    """Return the kind of model called `name`.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name not in MODELS:
        raise ConfigError(
            f"there is no model {name!r}; the names are {', '.join(MODELS)}, "
            f"or give your own with model.target"
        )
    return MODELS[name]
