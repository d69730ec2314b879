"""`tdp export`: the trained weights of a run, as a folder that transformers loads."""

import re
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.cli._common import ListedIn, refusal, wrap_on_terminal
from torchdistpackage.config.hugging_face import config_file, read_config, taken
from torchdistpackage.config.load import load
from torchdistpackage.config.yaml_loader import read
from torchdistpackage.lazy import resolve
from torchdistpackage.models.hugging_face_layout import folder_dtype
from torchdistpackage.models.registry import model_of, spec_of
from torchdistpackage.run_files import CHECKPOINTS, RESOLVED

EXPORT = "torchdistpackage.train.export:export_checkpoint"
MERGE = "torchdistpackage.train.export:export_merged"
TARGETS = ("hf",)
DTYPES = ("float32", "bfloat16", "float16", "float64", "folder")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "": 1}


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to create.")],
    to: Annotated[str, typer.Option(metavar="hf", help="Format: hf, of Hugging Face.")] = "hf",
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder step_NNNNNN; default: the latest.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DTYPES),
            help="Type of the weights; folder: that of the folder that the run began with; "
            "default: as trained, with --merge the folder's.",
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum size of a file, such as 500MB.")
    ] = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Add adapters to the weights that they are for.")
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Copy tokenizer and settings from here; default: model.weights or model.hf.",
        ),
    ] = None,
) -> None:
    """Export the latest checkpoint for transformers or peft, adapters merged or apart."""
    problems: list[str] = []
    if to not in TARGETS:
        problems.append(f"--to {to}: weights can be written for {', '.join(TARGETS)}")
    if dtype is not None and dtype not in DTYPES:
        problems.append(f"--dtype {dtype}: use {', '.join(DTYPES)}")
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
            # its folder of weights may be gone since: all sizes are in the file
            config = load(resolved, ["model.weights=null"])
        path = checkpoint or latest(run / CHECKPOINTS)
        if path is None:
            problems.append(f"{run} has no complete checkpoint; let it save one first")
    if checkpoint is not None and not checkpoint.is_dir():
        problems.append(f"--checkpoint {checkpoint}: there is no such folder")
    if config is not None and model_of(config.model) is None:
        problems.append(f"{run}: model.target built its model, whose names only it knows")
    base = None if config is None else config.model.hf
    if merge and config is not None and not config.model.lora.target:
        problems.append(f"--merge: {run} has no adapters (model.lora); leave it out")
    like_run = _begun_with(resolved) if config is not None else None
    if dtype == "folder" and config is not None:
        dtype = None if like_run is None else folder_dtype(like_run)
        if dtype is None:
            problems.append(
                f"--dtype folder: {run} began with no folder that is still there and names a type; "
                f"name one of {', '.join(DTYPES[:-1])}"
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
        dtype=dtype,
        shard_bytes=int(size[1]) * _UNITS[(size[2] or "").upper()],
        like=like or like_run,
    )
    files = sorted(x.name for x in Path(written).glob("*.safetensors"))
    named = "config.json" if merge else model.files().config
    if merge and model.packed():
        named += (
            f"; adapters were added to the values of {len(model.packed())} weights in 4 bits, over "
            f"which they were trained"
        )
    typer.echo(f"{path} -> {written}: {len(files)} files of weights, {named}")
    if (day := config.data.template_date) is not None:
        text = (
            f"its chats were written with the date {day}; tdp generate and tdp eval of the folder "
            f"write it too with data.template_date={day}, and else today's"
        )
        typer.echo(wrap_on_terminal(text))


def _begun_with(resolved: Path) -> str | None:
    """What the run's weights or model came from, if it is still there."""
    found = read(resolved.read_text(encoding="utf-8"), str(resolved)).value
    section = cast(dict[str, Any], found).get("model") if isinstance(found, dict) else None
    names = (section.get("weights"), section.get("hf")) if isinstance(section, dict) else ()
    for name in names:
        if isinstance(name, str) and config_file(name).is_file():
            return name
    return None
