"""The formats of other libraries that checkpoints are converted to and from, a row each. No torch.

A row determines the values of `tdp checkpoint export --to` and `import --from`, the functions they
call, and the table of docs/checkpoints.md (scripts/docs).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchdistpackage.text import markdown_table


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """One format.

    write: "module:function" that writes a `TensorSource` to a path; "" if none does.
    read: "module:function" that reads a `TensorSource` from a path; "" if none does.
    is_model: the export is of a run's model, as by `tdp export`; `write` is "" then.
    target, source: the texts in docs/checkpoints.md about what `export` writes and `import` reads.
    """

    name: str
    write: str = ""
    read: str = ""
    is_model: bool = False
    target: str = ""
    source: str = ""


_FILES = "torchdistpackage.checkpoint.formats.files"
_DCP = "torchdistpackage.checkpoint.formats.dcp"

FORMATS: Mapping[str, FormatSpec] = {
    spec.name: spec
    for spec in (
        FormatSpec(
            "torch",
            write=f"{_FILES}:write_torch",
            read=f"{_FILES}:read_torch",
            target="a `.pt` file: `model`, `optimizer`, `step`, `tokens`",
            source="a `.pt` file; only tensors and plain values are read",
        ),
        FormatSpec(
            "safetensors",
            write=f"{_FILES}:write_safetensors_file",
            read=f"{_FILES}:read_safetensors",
            target="one file with whole tensors",
            source="a file, or all those in a folder",
        ),
        FormatSpec(
            "dcp",
            write=f"{_DCP}:write_dcp",
            read=f"{_DCP}:read_dcp",
            target="a folder that `torch.distributed.checkpoint.load` reads",
            source="a folder of `torch.distributed.checkpoint`",
        ),
        FormatSpec(
            "hf",
            is_model=True,
            target="as `tdp export`: weights in the type of the checkpoint, float32 unless "
            "`precision.weights` is another; `tdp export --dtype folder` writes "
            "[that of the folder](hugging_face.md#export)",
        ),
        FormatSpec(
            "hf-trainer",
            read="torchdistpackage.train.hf_trainer:read_hf_trainer",
            source="a folder `checkpoint-N` of transformers' Trainer or trl, with the state of "
            "AdamW, for a run of `model.hf`",
        ),
        FormatSpec(
            "suffix",
            read=f"{_FILES}:read_suffixed",
            source="the files of `get_mp_ckpt_suffix`, named by any one of them",
        ),
    )
}
TARGETS = tuple(name for name, spec in FORMATS.items() if spec.write or spec.is_model)
"""Formats that a checkpoint can be exported to."""
SOURCES = tuple(name for name, spec in FORMATS.items() if spec.read)
"""Formats that a checkpoint can be imported from."""


def page_rows() -> str:
    """Return the table of docs/checkpoints.md."""
    head = ("format", "`export RUN TARGET --to` it makes", "`import SOURCE RUN --from` it reads")
    return markdown_table(head, ((f"`{x.name}`", x.target, x.source) for x in FORMATS.values()))
