"""Turn the folder of a run, or of a transformers model, into a configuration for inference.

It resets the keys of a run that only training needs, so that the model runs on any layout. No
torch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.bounded import parse_json
from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.cli._common import ListedIn, Overrides, refusal
from torchdistpackage.config.check import old_packages
from torchdistpackage.config.data_section import EMBEDDING, DataSection
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.head_tasks import HEAD_TASKS, TOKEN, ModelHead, has_head, labels_in
from torchdistpackage.config.hugging_face import (
    ADAPTER_FILE,
    model_keys,
    read_config,
    tokenizer_file,
    vocabulary_size,
)
from torchdistpackage.config.hugging_face import FILE as CONFIG
from torchdistpackage.config.load import load, loads, override_problems
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.text_ends import template_ends
from torchdistpackage.config.yaml_loader import write
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.prompts import ByteCodec, TokenCodec, TokenizerCodec
from torchdistpackage.data.tokens.template_date import dated, needs_date, today
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import CheckpointError, ConfigError, DataError
from torchdistpackage.launch.workers import run_local
from torchdistpackage.lazy import resolve
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.registry import TRANSFORMERS, model_of, spec_of
from torchdistpackage.models.sentence_transformers_folder import read_sentence_transformers
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.run_files import CHECKPOINTS, RESOLVED
from torchdistpackage.topology.mesh import DEFAULT_ORDER
from torchdistpackage.train.inference_request import (
    RankRefusal,
    Request,
    TrainedWeights,
)

RANK_MAIN = "torchdistpackage.train.inference:rank_main"
PRELOAD = ("torch", "torch.distributed", "numpy", "safetensors.torch", RANK_MAIN.partition(":")[0])

Target = Annotated[
    Path,
    typer.Argument(metavar="RUN_OR_FOLDER", help="Folder of a run or of a transformers model."),
]
Changes = Overrides
Pipe = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Number of pipeline stages; default: the run's."),
]
Tensor = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Number of tensor-parallel ranks; default: the run's."),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Checkpoint folder step_NNNNNN; default: the latest."),
]
Averages = Annotated[
    bool, typer.Option("--ema", help="Take the averages of the weights (optim.ema_decay).")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder with a tokenizer.json; default: that of the run or model."
    ),
]

_FORWARD_KEYS: Mapping[str, object] = {
    "parallel.order": f"[{', '.join(DEFAULT_ORDER)}]",
    **dict.fromkeys(("parallel.sequence_parallel", "parallel.tp_comm_overlap"), "false"),
    "parallel.zero": 0,
    "precision.weights": "float32",
    "pipeline.schedule": "1f1b",
    "pipeline.partition": "cost",
    "parallel.zero_group": "null",
    **dict.fromkeys(("pipeline.chunks", "pipeline.file", "pipeline.costs"), "null"),
    "train.accumulate": 1,
    "train.recompute": "none",
    "train.distill": "{}",
    **dict.fromkeys(("train.memory_gb", "train.profile.steps", "launch.local.procs"), "null"),
}
"""Keys that only training needs, with neutral values; weights and losses do not depend on them."""
_NO_POSITIONS = 1024
"""Window in tokens for a model whose config.json names no number of positions."""
_STOPS_IN = ("generation_config.json", "config.json")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A folder to take a model from.

    run_config: the configuration of the run, or one that was made for the transformers folder.
    """

    path: Path
    run_config: RunConfig
    is_run: bool
    checkpoint: Path | None = None
    averages: bool = False

    @property
    def weights(self) -> TrainedWeights:
        named = None if self.checkpoint is None else str(self.checkpoint)
        if not self.is_run:
            return TrainedWeights()
        return TrainedWeights(str(self.path), named, self.averages)

    @property
    def window(self) -> int:
        """Return how many tokens the model takes at once; for `model.target` data.seq_len."""
        model = spec_of(self.run_config)
        return self.run_config.data.seq_len if model is None else model.shape.num_positions

    def tokenizer(self, folder_of_option: Path | None) -> Path | None:
        """Return the tokenizer's folder; None if there is none, or tokens are bytes."""
        folder = folder_of_option or self.run_config.data.tokenizer
        return None if folder is None else Path(folder)

    def tokenizer_problems(self, folder: Path) -> list[str]:
        """Return why this tokenizer does not fit this model."""
        vocab = self.run_config.model.vocab
        try:
            num_ids = vocabulary_size(tokenizer_file(folder))
        except DataError as error:
            return [f"{error} (or name another with --tokenizer FOLDER)"]
        if num_ids <= vocab or model_of(self.run_config.model) is None:
            return []
        return [
            f"the tokenizer {folder} has {num_ids} ids, but the model has a vocabulary of {vocab}; "
            f"give the tokenizer that the model was trained with (--tokenizer FOLDER)"
        ]

    @property
    def has_bytes(self) -> bool:
        return self.run_config.data.has_bytes

    @property
    def _own_weights(self) -> list[str]:
        """Return overrides that remove the initial weights, which may be gone, from the keys.

        The checkpoint has all weights of a run, except with adapters, which need those they adapt.
        """
        model = self.run_config.model
        if model.hf is not None and model.initial_folder is not None and not model.lora.target:
            return [f"model.hf={quoted(Path(model.hf) / CONFIG)}"]
        return [] if model.hf is not None else ["model.weights=null"]

    def problems(self) -> list[str]:
        """Return what is wrong with the requested checkpoint."""
        if self.averages and not self.is_run:
            return [f"--ema: {self.path} is not a run, so it has no averages; remove --ema"]
        if self.checkpoint is not None and not self.is_run:
            return [
                f"--checkpoint {self.checkpoint}: {self.path} is not a run; remove --checkpoint"
            ]
        if self.checkpoint is not None and not self.checkpoint.is_dir():
            return [f"--checkpoint {self.checkpoint}: there is no such folder"]
        if self.is_run and self.checkpoint is None and latest(self.path / CHECKPOINTS) is None:
            text = "has no complete checkpoint; train with checkpoint.save_every until it saves one"
            return [f"{self.path} {text}"]
        return []

    def config(self, keys: Mapping[str, object], changes: Sequence[str]) -> RunConfig:
        """Return the configuration for this layout.

        Args:
            keys: keys to set.
            changes: overrides of the user, which win over `keys`.

        Raises:
            ConfigError: a change is wrong, or, unless a launcher started this, the layout does
                not fit the model.
        """
        overridden = {change.partition("=")[0].strip() for change in changes}
        every = {**_FORWARD_KEYS, **keys}
        overrides = [f"{key}={value}" for key, value in every.items() if key not in overridden]
        rendezvous = detect(os.environ)
        world_size = None if rendezvous.source == "alone" else rendezvous.world_size
        if self.is_run:
            overrides = [*self._own_weights, *overrides]
            config = load(self.path / RESOLVED, [*overrides, *changes], world_size)
        else:
            text = _yaml_of(self.path)
            config = loads(text, str(self.path), [*overrides, *changes], world_size)
        if needs_date(config):  # never for a run, which has recorded its date
            config = dated(config, today())
        if world_size is None:
            make_plan(config, local_procs(config), str(self.path))
            if old := old_packages(config):
                raise ConfigErrors(str(self.path), old)
        return config


def source_of(path: Path, checkpoint: Path | None, averages: bool = False) -> ModelSource:
    """Return the model of a run folder or a transformers folder.

    Raises:
        ConfigError: it is neither, or its configuration is wrong.
    """
    if (path / RESOLVED).is_file():
        # the folder of initial weights may be gone by now; resolved.yaml has all sizes
        config = load(path / RESOLVED, ["model.weights=null"])
        return ModelSource(path, config, True, checkpoint, averages)
    if (path / CONFIG).is_file():
        return ModelSource(path, loads(_yaml_of(path), str(path)), False, checkpoint, averages)
    if (path / ADAPTER_FILE).is_file():
        raise ConfigError(
            f"{path}: it has peft's {ADAPTER_FILE}, of adapters without their model; write both "
            f"with tdp export --merge, or name the folder of the run"
        )
    why = f"it has neither {RESOLVED} nor {CONFIG}" if path.is_dir() else "there is no such folder"
    raise ConfigError(f"{path}: {why}; name the folder of a run or of a transformers model")


def find_source(
    command: str,
    path: Path,
    checkpoint: Path | None,
    changes: Sequence[str],
    problems: list[str],
    averages: bool = False,
) -> ModelSource:
    """Return `source_of(path, checkpoint, averages)`; add what is wrong with the checkpoint to
    `problems`.

    Raises:
        ConfigErrors: there is no such model; lists `problems` and mistakes in `changes` too.
    """
    with ListedIn(problems):
        source = source_of(path, checkpoint, averages)
        problems += source.problems()
        return source
    problems += map(str, override_problems(changes))
    raise refusal(command, problems)


def codec_of(
    folder: Path | None, source: ModelSource, data: DataSection, problems: list[str]
) -> TokenCodec | None:
    """Return the codec that encodes prompts as `data` encodes documents, without an end token."""
    if folder is None:
        return ByteCodec()
    if wrong := source.tokenizer_problems(folder):
        problems += wrong
        return None
    try:
        ends = TextSource("text", "", str(folder), data.field, data.bos, "off").ends
        return TokenizerCodec(folder, bos=ends.bos)
    except DataError as error:
        problems.append(str(error))
        return None


def stops_of(source: ModelSource, codec: TokenCodec | None, problems: list[str]) -> tuple[int, ...]:
    """Return the ids that end a text; for a transformers folder those that its files name."""
    for name in _STOPS_IN if not source.is_run else ():
        if not (file := source.path / name).is_file():
            continue
        try:
            ids = parse_json(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            problems.append(f"{file} cannot be read: {error}")
            continue
        if ids is not None:
            return tuple(ids if isinstance(ids, list) else [ids])
    return () if codec is None or codec.stop is None else (codec.stop,)


def _yaml_of(folder: Path) -> str:
    """Return YAML of a run whose model is that of a transformers folder.

    GPT-2 and Llama become the GPT of this package. All other models, and settings that it has no
    key for, run as transformers' own modules.

    Raises:
        ConfigError: transformers has no such model, or `tdp train` could not train it.
    """
    settings = read_config(folder)
    if has_head(settings):
        return _yaml_with_head(folder, settings)
    try:
        model_keys(settings, folder / CONFIG)
        model: dict[str, Any] = {"weights": str(folder)}
        window = settings.get("n_positions") or settings.get("max_position_embeddings")
        window = window or _NO_POSITIONS
    except ConfigError:
        model = {"hf": str(folder)}
        shape = resolve(TRANSFORMERS).of_section(model, ModelUse(_NO_POSITIONS)).shape
        window = shape.num_positions
    data: dict[str, Any] = {"name": "tokens", "path": os.devnull, "seq_len": window}
    if (folder / "tokenizer.json").is_file():
        data |= {"name": "text", "tokenizer": str(folder)}
    if (embedder := read_sentence_transformers(folder)) is not None:
        data |= {
            "name": EMBEDDING,
            "tokenizer": str(folder),
            "seq_len": min(embedder.seq_len or _NO_POSITIONS, window),
            "eos": "on" if template_ends(folder).eos else "off",
        }
        train = {"embedding": {"pooling": embedder.pooling}}
        return write({"model": {"hf": str(folder)}, "data": data, "train": train})
    return write({"model": model, "data": data})


def _yaml_with_head(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return YAML of a run whose model is that of a transformers folder with a head.

    Raises:
        ConfigError: `tdp train` could not train it.
    """
    if has_head(settings).endswith(TOKEN):
        task = HEAD_TASKS["token_classification"]
    else:
        is_class = len(labels_in(settings)) > 1
        task = HEAD_TASKS["classification" if is_class else "regression"]
    multi_label = settings.get("problem_type") == "multi_label_classification"
    use = ModelUse(_NO_POSITIONS, head=ModelHead(task, labels_in(settings), multi_label))
    model = {"hf": str(folder)}
    window = resolve(TRANSFORMERS).of_section(model, use).shape.num_positions
    data: dict[str, Any] = {"name": task.name, "path": os.devnull, "seq_len": window}
    data |= {"tokenizer": str(folder)}
    data |= {"multi_label": True} if multi_label else {}
    return write({"model": model, "data": data})


def quoted(path: str | Path) -> str:
    """Return a path in the quotes that YAML reads."""
    return json.dumps(str(path), ensure_ascii=False)


def on_ranks(source: ModelSource, config: RunConfig, request: Request) -> Any:
    """Run a request on all ranks; return the answer of rank 0, or under a launcher of this rank.

    Raises:
        ConfigError: under a launcher, the layout does not fit the model.
        CheckpointError: no rank could do it, all for the same reason.
        RankError: a rank failed.
    """
    rendezvous, args = detect(os.environ), (config, source.weights, request)
    if rendezvous.source == "alone":
        answer = run_local(RANK_MAIN, args, num_procs=local_procs(config), preload=PRELOAD)[0]
    else:
        answer = resolve(RANK_MAIN)(*args)
    if isinstance(answer, RankRefusal):
        raise CheckpointError(answer.text)
    return answer
