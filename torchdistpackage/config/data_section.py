"""The data section of the YAML file: the data for training and validation, and their format.

`DATA` has a row for each value of `data.name`: a format of files, or another kind of source. The
values of the keys, the reader, the refusals and the table of docs/data.md (scripts/docs) follow
from the row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field

from torchdistpackage.config import types as k
from torchdistpackage.config.cached_datasets import CACHED, CACHED_KIND, CachedName
from torchdistpackage.config.head_tasks import HEAD_TASKS, HeadTask
from torchdistpackage.config.types import Expected, NamedSection, Section
from torchdistpackage.text import markdown_table

PREFERENCE, UNPAIRED = "preference", "unpaired_preference"
"""The value of data.name for JSON lines with a preferred and a rejected answer each."""
EMBEDDING = "embedding"
"""The value of data.name for JSON lines with an anchor, its positive and negatives each."""


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A value of data.name.

    path: what data.path names; "" for a source that reads no file.
    ids: "module:function" of the token ids where there is no tokenizer, a `Corpus`. It is called
        with `val_fraction`, `path` if there is one, and `keys` as keywords. "" needs a tokenizer.
    reader: "module:class" of the `FileReader` of its texts; "" for data that no tokenizer reads.
    is_bytes: without a tokenizer the ids are bytes of texts.
    has_rows: files hold rows with fields, of which data.field names the one with the text.
    suffix: of its files: a file of this suffix is of this kind, where no name is given, and a
        folder gives these alone; "" reads all.
    in_blend: it may be one of several sources.
    keys: keys of the data section that have an effect with such data alone, besides data.field.
    task: "module:function" of the `TaskLoss` of a run on such data, called with its `StagedModel`
        before training; "" for data whose tokens are predicted.
    row_names: the name of each sequence of a sample, "" for one that needs none; hard negatives
        follow.
    document, needs: its row of docs/data.md.
    """

    name: str
    path: Literal["", "file", "file or folder"] = ""
    ids: str = ""
    reader: str = ""
    is_bytes: bool = False
    has_rows: bool = False
    suffix: str = ""
    in_blend: bool = False
    keys: tuple[str, ...] = ()
    task: str = ""
    row_names: tuple[str, ...] = ("",)
    document: str = ""
    needs: str = ""


_CORPUS = "torchdistpackage.data.corpus"
_READERS = "torchdistpackage.data.tokens.documents"
_ANSWERS = ("chosen", "rejected")

DATA: Mapping[str, DataSpec] = {
    spec.name: spec
    for spec in (
        DataSpec(
            "python_stdlib",
            ids=f"{_CORPUS}:python_stdlib",
            is_bytes=True,
            document="the sources of Python's standard library",
        ),
        DataSpec(
            "text",
            path="file or folder",
            ids=f"{_CORPUS}:text",
            reader=f"{_READERS}:TextFiles",
            is_bytes=True,
            in_blend=True,
            document="a file, UTF-8",
        ),
        DataSpec(
            "jsonl",
            path="file or folder",
            reader=f"{_READERS}:JsonLines",
            has_rows=True,
            suffix=".jsonl",
            in_blend=True,
            document="a line, a JSON object with a text under `data.field`",
        ),
        DataSpec(
            "parquet",
            path="file or folder",
            reader=f"{_READERS}:ParquetRows",
            has_rows=True,
            suffix=".parquet",
            in_blend=True,
            document="a row, with a text in the column `data.field`",
            needs='`pip install "torchdistpackage[parquet]"`',
        ),
        DataSpec(
            CACHED_KIND,
            path="file or folder",
            reader="torchdistpackage.data.tokens.arrow_rows:ArrowRows",
            has_rows=True,
            suffix=".arrow",
            in_blend=True,
            document="a row of Hugging Face `datasets`: a folder of `save_to_disk` or a data "
            "set in its cache, with a text in the column `data.field`",
            needs='`pip install "torchdistpackage[parquet]"`',
        ),
        DataSpec(
            "tokens",
            path="file",
            ids=f"{_CORPUS}:tokens",
            suffix=".bin",
            in_blend=True,
            keys=("dtype",),
            document="none: a binary file of token ids of type `data.dtype`",
        ),
        DataSpec(
            PREFERENCE,
            path="file or folder",
            reader=f"{_READERS}:JsonLines",
            suffix=".jsonl",
            task="torchdistpackage.train.build:preference_task",
            row_names=_ANSWERS,
            document="a line of prompt, chosen and rejected answer: see "
            "[preference pairs](preference.md)",
        ),
        DataSpec(
            UNPAIRED,
            path="file or folder",
            reader=f"{_READERS}:JsonLines",
            suffix=".jsonl",
            task="torchdistpackage.train.build:unpaired_task",
            row_names=("", "mismatched"),
            document="a line of prompt, completion and label: see "
            "[answers that were called good or bad](preference.md#kto)",
        ),
        DataSpec(
            EMBEDDING,
            path="file or folder",
            reader=f"{_READERS}:JsonLines",
            suffix=".jsonl",
            keys=("num_negatives",),
            task="torchdistpackage.train.build:embedding_task",
            row_names=("anchor", "positive"),
            document="a line of anchor, positive and negatives: see [embeddings](embedding.md)",
            needs="`model.hf`",
        ),
        *(
            DataSpec(
                task.name,
                path="file or folder",
                reader=f"{_READERS}:JsonLines",
                has_rows=not task.is_pairs,
                suffix=".jsonl",
                keys=task.keys,
                task="torchdistpackage.train.build:head_task",
                row_names=_ANSWERS if task.is_pairs else ("",),
                document=f"a line with {'two answers' if task.is_pairs else 'a text and a label'}: "
                "see [heads](heads.md)",
                needs="`model.hf`",
            )
            for task in HEAD_TASKS.values()
        ),
    )
}

KINDS = tuple(name for name, spec in DATA.items() if spec.in_blend)
"""Kinds of files that hold documents or token ids."""
ROWS = tuple(name for name, spec in DATA.items() if spec.has_rows)
"""Kinds whose files hold rows with fields; `data.field` names the field with the text."""
KIND_OF_SUFFIX = {spec.suffix: name for name, spec in DATA.items() if spec.in_blend and spec.suffix}
SUFFIX_OF_KIND = {name: spec.suffix for name, spec in DATA.items() if spec.suffix}
"""Suffix of the files that are read from a folder, by kind; text has none."""
OWN_KEYS = tuple(dict.fromkeys(key for spec in DATA.values() for key in spec.keys))
"""Keys that only some values of data.name use."""
DataName = Annotated[str, *k.one_of(DATA)] | None
FileKind = Annotated[str, *k.one_of(KINDS)] | None


def page_rows() -> str:
    """Return the table of docs/data.md."""
    rows = ((f"`{x.name}`", x.document, x.needs) for x in DATA.values())
    return markdown_table(("name", "one document is", "needs"), rows)


PAIRS = "prompt+completion"
"""The value of data.field that stands for two fields; the prompt does not count in the loss."""
CHAT_FIELDS = ("messages", "conversations")
"""Values of data.field that mean chats, in any of the known formats of a chat."""


class SourceSection(Section):
    """One of several sources of training data."""

    path: k.PathOrNull = Field(
        default=None, description="File or folder of this source, as in data.path."
    )
    weight: k.NotNegative = Field(
        default=1.0,
        description="Weight of this source. Its share of the samples is its weight divided by the "
        "sum of all weights.",
    )
    name: FileKind = Field(
        default=None,
        description="Format of this source's files; null: by their suffix, else data.name.",
    )
    field: k.TextFieldOrNull = Field(
        default=None,
        description="Field or column of this source that holds the text; null: data.field.",
    )
    label: k.LabelOrNull = Field(
        default=None,
        description="Name of this source in the log and in metrics.jsonl; null: the file's name "
        "without its suffix.",
    )


Sources = Annotated[
    tuple[SourceSection, ...],
    k.Listed,
    Expected(f"a list of mappings with {', '.join(SourceSection.model_fields)}"),
]


def source_labels(sources: Sequence[SourceSection]) -> list[str]:
    """Return the label of each source; sources with equal file names are numbered."""
    labels: list[str] = []
    for index, source in enumerate(sources):
        label = source.label or PurePath((source.path or "").removeprefix(CACHED)).stem
        labels.append(f"{label}-{index}" if source.label is None and label in labels else label)
    return labels


def changed_shares(
    earlier: Sequence[SourceSection], now: Sequence[SourceSection]
) -> dict[str, tuple[float, float]]:
    """Return the sources whose share of the samples changed: label -> (share before, share now).

    A source that is missing on one side has share 0 there.
    """
    (old, new) = (
        {
            label: source.weight / (sum(x.weight for x in sources) or 1.0)
            for label, source in zip(source_labels(sources), sources, strict=True)
        }
        for sources in (earlier, now)
    )
    shares = {label: (old.get(label, 0.0), new.get(label, 0.0)) for label in {**old, **new}}
    return {label: x for label, x in shares.items() if not math.isclose(*x)}


def share_text(share: float) -> str:
    """Return a source's share of the samples as text."""
    return f"{share:.1%} of the samples"


class WeightedSource(NamedTuple):
    """One source of a blend. section: the data section as if this were the only source."""

    label: str
    weight: float
    section: "DataSection"


class DataSection(NamedSection):
    """The training and validation data: files, or your own source by import path."""

    name: DataName = Field(
        default="python_stdlib",
        description="Kind of data: the sources of Python's standard library, files of text, jsonl, "
        "parquet or arrow, token ids (tokens), answers, in pairs (preference) or labelled "
        "(unpaired_preference), texts to compare (embedding), or rows with labels for a head "
        "(classification, regression, token_classification, reward). Leave it out with target.",
    )
    path: k.PathOrNull = Field(
        default=None,
        description="File or folder to read; for tokens a file. datasets:NAME is a data set in the "
        "cache of Hugging Face datasets. python_stdlib needs none.",
    )
    sources: Sources = Field(
        default=(),
        description="List of several sources instead of path, each a mapping with path, weight, "
        "name, field and label. Samples are drawn from them in the proportion of their weights.",
    )
    tokenizer: k.PathOrNull = Field(
        default=None,
        description="Folder with a tokenizer.json, as transformers saves it; null: each byte of a "
        "text is a token.",
    )
    field: k.TextField = Field(
        default="text",
        description="Field or column that holds the text. With prompt+completion or messages only "
        "the answers count in the loss.",
    )
    bos: k.TextEnd = Field(
        default="auto",
        description="Whether each document starts with a begin-of-text token; auto: as the "
        "tokenizer's template does it.",
    )
    eos: k.TextEnd = Field(
        default="auto",
        description="Whether each document ends with an end-of-text token; auto: if the tokenizer "
        "has one.",
    )
    template_date: k.DateOrNull = Field(
        default=None,
        description="Date that a chat template writes as today's, if it asks for one. null: the "
        "day of the run's first start, which resolved.yaml records.",
    )
    cache: k.PathOrNull = Field(
        default=None,
        description="Folder in which tokenized texts are kept for later runs; null: the folder "
        "tokens in run.dir.",
    )
    streaming: bool = Field(
        default=False,
        description="Train while texts are tokenized: files are read in blocks of about 8 MiB, "
        "whose order is drawn anew in each epoch, and documents are shuffled within a block. Set "
        "it for files that take minutes to tokenize. Needs data.tokenizer and data.val_path.",
    )
    document_masks: bool = Field(
        default=False,
        description="Let each token attend to tokens of its own document only. Needs "
        "data.tokenizer.",
    )
    packing: k.Packing = Field(
        default="auto",
        description="How documents fill samples: wrapped cuts at every seq_len tokens, and the "
        "rest of a document starts the next sample; whole cuts no document that fits in a sample; "
        "none gives each document, or chat, a sample of its own, with padding behind it; auto: "
        "whole if prompts are masked, else wrapped.",
    )
    dtype: k.TokenDtype = Field(
        default="uint16", description="Type of the token ids in the file of name: tokens."
    )
    num_negatives: k.CountOrZero = Field(
        default=0,
        le=1 << 10,
        description="Number of hard negatives of each line of name: embedding.",
    )
    labels: k.Labels = Field(
        default=(),
        description="Names of the classes of a head, in order, or their number; empty: those that "
        "the folder of model.hf names.",
    )
    label_field: k.FieldName = Field(
        default="label",
        description="Field of a line that holds its label: the name or number of a class, a list "
        "of them with multi_label or token_classification, a number for regression.",
    )
    multi_label: bool = Field(
        default=False,
        description="Whether a text may have any number of classes, each of which is decided on "
        "its own.",
    )
    class_weights: k.ClassWeights = Field(
        default=(),
        description="Weight of each class in the loss, as torch's CrossEntropyLoss takes them, or "
        "with multi_label the weight of its positive labels (pos_weight). Empty: all are equal.",
    )
    center_rewards: k.NotNegative = Field(
        default=0.0,
        description="Factor of the squared sum of both rewards of a pair in the loss, which keeps "
        "rewards around 0 (trl's center_rewards_coefficient).",
    )
    target: k.ImportPath = Field(
        default=None,
        description="Import path of your function that makes the data, such as pkg.module:build; "
        "replaces name.",
    )
    args: k.FreeForm = Field(
        default_factory=dict, description="Keyword arguments for the function of target."
    )
    seq_len: k.Count = Field(
        default=128, le=k.MAX_LENGTH, description="Number of tokens in one sample."
    )
    global_batch: k.Count = Field(
        default=32,
        le=1 << 24,
        description="Number of samples in one step, over all ranks together. With preference "
        "pairs it counts pairs.",
    )
    val_fraction: k.UpToHalf = Field(
        default=0.05,
        description="Share of the data that is kept for validation; not used if val_path is set.",
    )
    val_path: k.PathOrNull = Field(
        default=None, description="File or folder to validate on; null: val_fraction of the data."
    )
    eval: k.EvalSets = Field(
        default_factory=dict,
        description="Further files or folders to evaluate at each validation, by name, such as "
        "{code: code.jsonl}.",
    )

    @property
    def has_bytes(self) -> bool:
        """Return whether the tokens are the bytes of texts."""
        sections = [x.section for x in self.blend] if self.sources else [self]
        specs = [x.spec for x in sections]
        return self.tokenizer is None and all(x is not None and x.is_bytes for x in specs)

    @property
    def spec(self) -> DataSpec | None:
        """Return the row of data.name; None for the user's own data."""
        return None if self.name is None else DATA[self.name]

    @property
    def is_preference(self) -> bool:
        """Return whether samples are compared or labelled answers."""
        return self.name in (PREFERENCE, UNPAIRED)

    @property
    def is_unpaired(self) -> bool:
        """Return whether samples are labelled answers."""
        return self.name == UNPAIRED

    @property
    def is_embedding(self) -> bool:
        """Return whether samples are texts to compare."""
        return self.name == EMBEDDING

    @property
    def head(self) -> HeadTask | None:
        """Return the task whose head is trained, or None."""
        return HEAD_TASKS.get(self.name or "")

    @property
    def is_pairs(self) -> bool:
        """Return whether a sample is a chosen and a rejected answer."""
        return self.spec is not None and self.spec.row_names == _ANSWERS

    @property
    def rows_per_sample(self) -> int:
        """Return the number of sequences in a sample, 1 of texts."""
        return len(self.row_names)

    @property
    def row_names(self) -> tuple[str, ...]:
        """Return the name of each sequence in a sample; "" for a sequence without a name."""
        names = ("",) if self.spec is None else self.spec.row_names
        return (*names, *(f"negative {i + 1}" for i in range(self.num_negatives)))

    @property
    def blend(self) -> tuple[WeightedSource, ...]:
        """Return the sources with their labels."""
        blend: list[WeightedSource] = []
        for label, source in zip(source_labels(self.sources), self.sources, strict=True):
            section = self.reading(source.path or "", source.name, source.field)
            blend.append(WeightedSource(label, source.weight, section))
        return tuple(blend)

    @property
    def parts(self) -> "dict[str, DataSection]":
        """Return the section of each source of training data, by the key of its path.

        Each section is as if its source were the only one.
        """
        if self.target is not None:
            return {}
        parts = {f"data.sources[{i}].path": x.section for i, x in enumerate(self.blend)}
        parts = parts or {"data.path": self}
        val_fraction = 0.0 if self.val_path is not None else self.val_fraction
        return {
            key: x.model_copy(update={"val_fraction": val_fraction}) for key, x in parts.items()
        }

    @property
    def val_part(self) -> "DataSection | None":
        """Return a section that reads val_path, entirely for validation."""
        return None if self.val_path is None else self._evaluated(self.val_path)

    @property
    def eval_parts(self) -> "dict[str, DataSection]":
        """Return a section for each set of data.eval, by name."""
        return {name: self._evaluated(path) for name, path in self.eval.items()}

    @property
    def all_parts(self) -> "dict[str, DataSection]":
        """Return `parts` and the sections that only validation reads, by the key of the path."""
        val = {} if self.val_part is None else {"data.val_path": self.val_part}
        return self.parts | val | {f"data.eval.{n}": x for n, x in self.eval_parts.items()}

    def _evaluated(self, path: str) -> "DataSection":
        return self.reading(path).model_copy(update={"val_fraction": 1.0, "streaming": False})

    def reading(self, path: str, name: str | None = None, field: str | None = None) -> Self:
        """Return a section that reads only this file or folder, with the same other keys."""
        kind = name or (self.name if self.spec is not None and self.spec.task else None)
        kind = kind or (CACHED_KIND if CachedName.of(path) else None)
        kind = kind or KIND_OF_SUFFIX.get(PurePath(path).suffix)
        kind = kind or (self.name if self.name in KINDS else "text")
        return self.model_copy(
            update={
                "name": kind,
                "path": path,
                "sources": (),
                "tokenizer": self.tokenizer if DATA[kind].reader else None,
                "field": (field or self.field) if kind in ROWS else "text",
            }
        )
