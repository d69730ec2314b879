"""What the registry knows of a model that is a folder of transformers. No torch."""

from torchdistpackage.models import transformers_folder, transformers_layout
from torchdistpackage.models.registry import Model

TRANSFORMERS = Model(
    transformers_layout.shape_of_section,
    transformers_layout.pieces,
    transformers_layout.layouts,
    transformers_layout.piece_costs,
    transformers_layout.piece_parameters,
    transformers_layout.flops_per_token,
    "torchdistpackage.models.transformers_model:stage",
    transformers_folder.open_folder,
    "torchdistpackage.models.transformers_model:load_weights",
    transformers_layout.refusals,
    transformers_layout.goes_with,
    sources=transformers_folder.sources,
    config_json=transformers_folder.config_json,
    files=transformers_folder.files,
)
