"""Refuse runs that need more than a model can do, before a rank starts. No torch.

Rules that need no shape are in config/rules_model.py.
"""

from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.rules_pipeline import num_stages
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import CheckpointError, LayoutError
from torchdistpackage.models.model_spec import ModelSpec, ModelUse


def refuse_model(model: ModelSpec, config: RunConfig, source: str) -> None:
    """Refuse what this model cannot do, weights of another, and a folder that it cannot become.

    Raises:
        ConfigError: lists all of it, in the order of the lines of `source`.
    """
    use = ModelUse.of(config, num_stages(config))
    problems = [config.problem(*refusal) for refusal in model.refusals(use)]
    folder, key = config.model.initial_folder, "model.hf" if config.model.hf else "model.weights"
    if folder is not None:
        try:
            model.check_weights(folder)
        except (CheckpointError, LayoutError) as error:
            problems.append(config.problem(key, str(error)))
    dims = config.train.embedding.matryoshka_dims
    if config.data.is_embedding and dims and max(dims) > model.shape.dim:
        text = (
            f"{max(dims)} is more than the {model.shape.dim} dimensions of an embedding; use up to "
            f"{model.shape.dim}"
        )
        problems.append(config.problem("train.embedding.matryoshka_dims", text))
    if config.checkpoint.export is not None:
        try:
            model.sources()
        except LayoutError as error:
            problems.append(config.problem("checkpoint.export", str(error)))
    if problems:
        raise ConfigErrors(source, sorted(problems, key=lambda problem: problem.line or 0))
