"""The data section of the YAML file: what is read for training and validation, and how."""

from pathlib import PurePath
from typing import Annotated, NamedTuple, Self

from pydantic import Field

from torchdistpackage.config import types as k
from torchdistpackage.config.types import Expected, NamedSection, Section

KINDS = ("text", "jsonl", "parquet", "tokens")
"""What files hold, as data.name calls it."""
ROWS = ("jsonl", "parquet")
"""Those whose files hold rows with fields, of which `data.field` names one."""
KIND_OF_SUFFIX = {".jsonl": "jsonl", ".parquet": "parquet", ".bin": "tokens"}

PREFERENCE = "preference"
"""Pairs of answers, of which one is preferred, as JSON lines."""

CHAT_FIELDS = ("messages", "conversations")
"""Values of data.field by which rows are chats, whichever of the known kinds each is."""

SUFFIX_OF_KIND = {"jsonl": ".jsonl", "parquet": ".parquet", PREFERENCE: ".jsonl"}
"""Of the files of a folder that are read."""


class SourceSection(Section):
    """One of several sources of training data."""

    path: k.PathOrNull = Field(default=None, description="File or folder, as data.path.")
    weight: k.NotNegative = Field(
        default=1.0, description="Its part of all samples is weight over the sum of all weights."
    )
    name: k.FileKind = Field(
        default=None, description="What it holds; null: by its suffix, else data.name."
    )
    field: k.TextFieldOrNull = Field(default=None, description="As data.field; null: that one.")
    label: k.LabelOrNull = Field(
        default=None, description="Its name in log and metrics; null: that of the file."
    )


Sources = Annotated[
    tuple[SourceSection, ...],
    k.Listed,
    Expected(f"a list of mappings with {', '.join(SourceSection.model_fields)}"),
]
ITEMS: dict[str, type[Section]] = {"data.sources": SourceSection}
"""Keys that are lists of sections -> what each is."""


class WeightedSource(NamedTuple):
    """A source of several. section: as if it were the only one."""

    label: str
    weight: float
    section: "DataSection"


class DataSection(NamedSection):
    """The training data: one of our sources, or your own by import path."""

    name: k.DataName = Field(default="python_stdlib", description="Our source; not with target.")
    path: k.PathOrNull = Field(
        default=None,
        description="File or folder of text, JSON lines, parquet or pairs; file of token ids.",
    )
    sources: Sources = Field(
        default=(),
        description="Several sources in place of path: {path, weight, name, field, label} each.",
    )
    tokenizer: k.PathOrNull = Field(
        default=None, description="Folder with tokenizer.json; null: the tokens of text are bytes."
    )
    field: k.TextField = Field(
        default="text",
        description="Field or column; with prompt+completion or messages prompts are masked.",
    )
    bos: k.TextEnd = Field(
        default="auto",
        description="Begin-of-text token before each document; auto: as the tokenizer adds it.",
    )
    eos: k.TextEnd = Field(
        default="auto",
        description="End-of-text token behind each document; auto: if the tokenizer has one.",
    )
    template_date: k.DateOrNull = Field(
        default=None,
        description="The date that a chat template writes as today's; null: the day of the run's "
        "first start, which resolved.yaml records if the template asks for it.",
    )
    cache: k.PathOrNull = Field(
        default=None, description="Folder of tokenized texts; null: tokens in run.dir."
    )
    document_masks: bool = Field(
        default=False, description="No token attends to another document; needs tokenizer."
    )
    packing: k.Packing = Field(
        default="auto",
        description="wrapped: a document goes on in the next sample; whole: it is not cut if it "
        "fits; auto: whole where prompts are masked.",
    )
    dtype: k.TokenDtype = Field(default="uint16", description="Type of the ids of tokens.")
    target: k.ImportPath = Field(
        default=None, description="Your data, pkg.module:build; not with name."
    )
    args: k.FreeForm = Field(default_factory=dict, description="Keyword arguments of target.")
    seq_len: k.Count = Field(default=128, le=k.MAX_LENGTH, description="Tokens in one sample.")
    global_batch: k.Count = Field(
        default=32, le=1 << 24, description="Samples in a step, over all ranks."
    )
    val_fraction: k.UpToHalf = Field(
        default=0.05, description="Part kept for validation, unless val_path has it."
    )
    val_path: k.PathOrNull = Field(
        default=None, description="File or folder to validate on; null: val_fraction of the data."
    )
    eval: k.EvalSets = Field(
        default_factory=dict,
        description="Further files or folders to evaluate on at each validation, by name.",
    )

    @property
    def has_bytes(self) -> bool:
        """Whether a token is a byte of a text."""
        names = [x.section.name for x in self.blend] if self.sources else [self.name]
        return self.tokenizer is None and {*names} <= {"python_stdlib", "text"}

    @property
    def is_preference(self) -> bool:
        """Whether samples are pairs of answers."""
        return self.name == PREFERENCE

    @property
    def rows_per_sample(self) -> int:
        """Sequences that one sample is: of a pair the chosen one and the rejected one."""
        return 2 if self.is_preference else 1

    @property
    def blend(self) -> tuple[WeightedSource, ...]:
        """The sources, with a label each."""
        found: list[WeightedSource] = []
        for index, source in enumerate(self.sources):
            label = source.label or PurePath(source.path or "").stem
            if source.label is None and label in (x.label for x in found):
                label = f"{label}-{index}"
            section = self.reading(source.path or "", source.name, source.field)
            found.append(WeightedSource(label, source.weight, section))
        return tuple(found)

    @property
    def parts(self) -> "dict[str, DataSection]":
        """By the key of its path, the section of each file or folder, as if there were no other."""
        if self.target is not None:
            return {}
        parts = {f"data.sources[{i}].path": x.section for i, x in enumerate(self.blend)}
        parts = parts or {"data.path": self}
        kept = 0.0 if self.val_path is not None else self.val_fraction
        return {key: x.model_copy(update={"val_fraction": kept}) for key, x in parts.items()}

    @property
    def val_part(self) -> "DataSection | None":
        """The section of val_path, all of which is for validation."""
        return None if self.val_path is None else self._evaluated(self.val_path)

    @property
    def eval_parts(self) -> "dict[str, DataSection]":
        """The sections of eval, by the names there."""
        return {name: self._evaluated(path) for name, path in self.eval.items()}

    @property
    def all_parts(self) -> "dict[str, DataSection]":
        """`parts`, and those that only validations read, by the keys of their paths."""
        val = {} if self.val_part is None else {"data.val_path": self.val_part}
        return self.parts | val | {f"data.eval.{n}": x for n, x in self.eval_parts.items()}

    def _evaluated(self, path: str) -> "DataSection":
        return self.reading(path).model_copy(update={"val_fraction": 1.0})

    def reading(self, path: str, name: str | None = None, field: str | None = None) -> Self:
        """The section that reads this file or folder alone, with what the keys say of all."""
        kind = name or (PREFERENCE if self.is_preference else None)
        kind = kind or KIND_OF_SUFFIX.get(PurePath(path).suffix)
        kind = kind or (self.name if self.name in KINDS else "text")
        return self.model_copy(
            update={
                "name": kind,
                "path": path,
                "sources": (),
                "tokenizer": None if kind == "tokens" else self.tokenizer,
                "field": (field or self.field) if kind in ROWS else "text",
            }
        )
