"""Export a checkpoint of a run to another library's format, in one process.

The pieces of each parameter are joined from whichever files hold them, so the run may have had any
layout. Memory holds one parameter and the tensors of one output file at a time.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from torchdistpackage.checkpoint.commit import damage, latest
from torchdistpackage.checkpoint.formats.source import checkpoint_source
from torchdistpackage.checkpoint.manifest import Manifest, read_manifest
from torchdistpackage.config.head_tasks import ModelHead
from torchdistpackage.config.hugging_face import FILE, config_file
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.lazy import resolve
from torchdistpackage.models.hugging_face_folder import (
    SHARD_BYTES,
    copy_companions,
    new_folder,
    write_folder,
)
from torchdistpackage.models.hugging_face_layout import Source
from torchdistpackage.models.model_spec import ModelSpec
from torchdistpackage.models.sentence_transformers_folder import add_sentence_transformers
from torchdistpackage.run_files import CHECKPOINTS
from torchdistpackage.train.weight_averages import average_name

_ROUND = "torchdistpackage.models.transformers_lora:round_weights"
EXPORTED = "hf"
"""Folder in the run folder for the model at the end of the run."""


def export_run(
    run: Path,
    model: ModelSpec,
    config: RunConfig,
    like: str | None,
    beat: Callable[[], None] = lambda: None,
) -> Path:
    """Write the newest checkpoint of a run to its folder `EXPORTED`, replacing an older export.

    config: of the run. like: the folder or config.json that the run began with, if any. beat: see
    `export_checkpoint`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or the folder cannot be written.
    """
    path, folder = latest(run / CHECKPOINTS), run / EXPORTED
    if path is None:
        raise CheckpointError(f"{run} has no complete checkpoint; train it up to a save first")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier end of this run
    if like is not None and not config_file(like).is_file():
        like = None  # gone since the run began
    export_checkpoint(path, model, folder, like=like, beat=beat)
    return complete(folder, config, model)


def complete(folder: Path, config: RunConfig, model: ModelSpec) -> Path:
    """Add the files that another library for models of this run reads beside transformers' files.
    Adapters alone are for peft.

    Raises:
        DataError: the tokenizer of the run is gone.
    """
    if config.data.is_embedding and (folder / FILE).is_file():
        add_sentence_transformers(folder, config, model.shape.dim)
    return folder


def export_checkpoint(
    path: str | Path,
    model: ModelSpec,
    folder: str | Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    like: str | Path | None = None,
    beat: Callable[[], None] = lambda: None,
    averages: bool = False,
) -> Path:
    """Write the weights of the checkpoint folder `path` as `write_folder` does; return `folder`.

    dtype: torch's name of the weights' type; default: the checkpoint's. beat: called after each
    file and parameter that has been read. averages: write the averages of the weights.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, or has no averages, or
            `folder` is not empty.
        LayoutError: transformers has no such model.
    """
    path = Path(path)
    if problem := damage(path, checksums=True, on_file=beat):
        raise CheckpointError(f"{path} is damaged: {problem}; name another checkpoint")
    manifest = read_manifest(path)
    made_of = model.sources()
    layouts = model.layouts() | model.buffers()
    exported = {name: x for name, x in layouts.items() if name in made_of}
    _check_model(manifest, exported, path)
    names = {n: average_name(manifest, n, path) if averages else n for n in exported}
    dtype = dtype or manifest.tensors[next(iter(made_of))].dtype
    source, files = checkpoint_source(path), model.files()
    # what the class ignores of the folder that the run began with stays beside its weights
    kept = {} if like is None or files.ignored is None else files.ignored(config_file(like).parent)

    def whole(name: str) -> torch.Tensor:
        beat()
        if name in kept:
            with safe_open(kept[name][0], framework="pt") as opened:
                return opened.get_tensor(name)
        return source.read(names[name])

    return write_folder(
        folder,
        model.config_json(dtype, like),
        {**made_of, **{key: (Source(key, shape),) for key, (_, shape) in kept.items()}},
        whole,
        getattr(torch, dtype),
        shard_bytes=shard_bytes,
        like=like,
        files=files,
    )


def export_merged(
    path: str | Path,
    model: ModelSpec,
    base: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    like: str | Path | None = None,
    averages: bool = False,
    head: ModelHead | None = None,
) -> Path:
    """Write the model of folder `base` with a checkpoint's adapters merged in, like peft's
    `merge_and_unload`. Adapters over 4-bit weights are added to the dequantized weights.
    transformers and peft hold the full model in memory.

    dtype: of the weights; default: that of `base`. like: a folder whose tokenizer is kept.
    averages: as `export_checkpoint`. head: of the run.

    Raises:
        CheckpointError: as `export_checkpoint`, or `base` cannot be read.
    """
    import transformers
    from peft import PeftModel

    ending, classes = "ForCausalLM", dict[str, Any]()
    if head is not None:
        ending, classes = head.task.ending, head.settings()
        # transformers takes keywords as they are, where it reads numbers from a file
        classes["id2label"] = {int(i): name for i, name in classes["id2label"].items()}
    auto: Any = getattr(transformers, f"AutoModel{ending}")
    with new_folder(folder) as written:
        adapters = written / "adapters"
        export_checkpoint(path, model, adapters, like=base, averages=averages)
        try:
            base_model = auto.from_pretrained(base, dtype="auto", local_files_only=True, **classes)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{base} cannot be read: {error}") from error
        if model.packed():
            resolve(_ROUND)(base_model, model.shape)
        if (vocab := model.shape.vocab) > base_model.get_input_embeddings().weight.shape[0]:
            # without a draw, as the adapters have all added rows
            base_model.resize_token_embeddings(vocab, mean_resizing=False)
        merged: Any = PeftModel.from_pretrained(base_model, str(adapters)).merge_and_unload()
        shutil.rmtree(adapters)
        if dtype is not None:
            merged = merged.to(getattr(torch, dtype))
        merged.save_pretrained(written, max_shard_size=shard_bytes)
        copy_companions(like or base, written)
    return Path(folder)


def _check_model(manifest: Manifest, layouts: Mapping[str, Layout], path: Path) -> None:
    if problems := manifest.differences({n: layout.shape for n, layout in layouts.items()}):
        raise CheckpointError(
            f"{path} is of another model than its run's resolved.yaml describes: {problems}"
        )
