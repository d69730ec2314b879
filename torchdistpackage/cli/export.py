"""`tdp export`: write the trained weights of a run as a folder that transformers loads."""

import re
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.cli._common import ListedIn, refusal, wrap_on_terminal
from torchdistpackage.config.head_of_run import head_of
from torchdistpackage.config.hugging_face import config_file, read_config, taken
from torchdistpackage.config.load import load
from torchdistpackage.config.yaml_loader import read
from torchdistpackage.lazy import resolve
from torchdistpackage.models.hugging_face_layout import folder_dtype
from torchdistpackage.models.registry import model_of, spec_of
from torchdistpackage.run_files import CHECKPOINTS, RESOLVED

EXPORT = "torchdistpackage.train.export:export_checkpoint"
MERGE = "torchdistpackage.train.export:export_merged"
COMPLETE = "torchdistpackage.train.export:complete"
TARGETS = ("hf",)
DTYPES = ("float32", "bfloat16", "float16", "float64", "folder")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to create.")],
    to: Annotated[
        str, typer.Option(metavar="hf", help="Format to write: hf, that of Hugging Face.")
    ] = "hf",
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Checkpoint folder step_NNNNNN; default: the latest."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DTYPES),
            help="Type of the exported weights; folder: the type of the model folder that the run "
            "started from. Default: as trained, or with --merge as in that folder.",
        ),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Largest size of one file of weights, such as 500MB."),
    ] = "5GB",
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Add the adapters (model.lora) into the weights of their layers."
        ),
    ] = False,
    ema: Annotated[
        bool,
        typer.Option("--ema", help="Export the averages of the weights (optim.ema_decay)."),
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Copy tokenizer and settings from this folder; default: model.weights or "
            "model.hf.",
        ),
    ] = None,
) -> None:
    """Export the latest checkpoint for transformers or peft.

    A run with adapters (model.lora) writes the adapters alone, for peft, or with --merge the whole
    model.
    """
    problems: list[str] = []
    if to not in TARGETS:
        problems.append(f"--to {to} is unknown; use {', '.join(TARGETS)}")
    if dtype is not None and dtype not in DTYPES:
        problems.append(f"--dtype {dtype} is unknown; use one of {', '.join(DTYPES)}")
    size = re.fullmatch(r"(\d{1,15})\s*([KMG]B)?", shard_size.strip(), re.IGNORECASE)
    if size is None or int(size[1]) == 0:
        problems.append(f"--shard-size {shard_size}: write a number and KB, MB or GB, as in 500MB")
    if problem := taken(folder):
        problems.append(problem)
    if like is not None:
        with ListedIn(problems):
            read_config(like)
    resolved, config, path = run / RESOLVED, None, checkpoint
    if not resolved.is_file():
        problems.append(f"{run}: there is no {RESOLVED}; name the folder of a run")
    else:
        with ListedIn(problems):
            # the folder of initial weights may be gone by now; resolved.yaml has all sizes
            config = load(resolved, ["model.weights=null"])
        path = checkpoint or latest(run / CHECKPOINTS)
        if path is None:
            text = "has no complete checkpoint; train with checkpoint.save_every until it saves one"
            problems.append(f"{run} {text}")
    if checkpoint is not None and not checkpoint.is_dir():
        problems.append(f"--checkpoint {checkpoint}: there is no such folder")
    if config is not None and model_of(config.model) is None:
        problems.append(
            f"{run}: its model was built by model.target, so its weights have no names in "
            f"transformers; use tdp checkpoint export"
        )
    base = None if config is None else config.model.hf
    if merge and config is not None and not config.model.lora.target:
        problems.append(f"--merge: {run} has no adapters (model.lora); remove --merge")
    like_run = _begun_with(resolved) if config is not None else None
    if dtype == "folder" and config is not None:
        dtype = None if like_run is None else folder_dtype(like_run)
        if dtype is None:
            problems.append(
                f"--dtype folder: the model folder that {run} started from is missing or names no "
                f"type; use one of {', '.join(DTYPES[:-1])}"
            )
    if problems or size is None or config is None or path is None:
        raise refusal("tdp export", problems)
    model = spec_of(config)
    assert model is not None
    written: Any = resolve(MERGE if merge else EXPORT)(
        path,
        model,
        *((base,) if merge else ()),
        folder,
        **({"head": head_of(config)} if merge else {}),
        dtype=dtype,
        shard_bytes=int(size[1]) * _UNITS[(size[2] or "").upper()],
        like=like or like_run,
        averages=ema,
    )
    resolve(COMPLETE)(written, config, model)
    files = sorted(x.name for x in Path(written).glob("*.safetensors"))
    named = "config.json" if merge else model.files().config
    packing = config.model.lora.packing
    if merge and packing is not None:
        named += (
            f"; adapters were added to the {packing.bits}-bit values of {len(model.packed())} "
            "weights, with which they were trained"
        )
    typer.echo(f"{path} -> {written}: {len(files)} files of weights, {named}")
    if (day := config.data.template_date) is not None:
        text = (
            f"its chat template wrote the date {day} in training; pass data.template_date={day} to "
            f"tdp generate and tdp eval of this folder, or they write today's date"
        )
        typer.echo(wrap_on_terminal(text))


def _begun_with(resolved: Path) -> str | None:
    """Return the folder that the run's weights or model came from, if it still exists."""
    keys = read(resolved.read_text(encoding="utf-8"), str(resolved)).value
    section = cast(dict[str, Any], keys).get("model") if isinstance(keys, dict) else None
    names = (section.get("weights"), section.get("hf")) if isinstance(section, dict) else ()
    for name in names:
        if isinstance(name, str) and config_file(name).is_file():
            return name
    return None
