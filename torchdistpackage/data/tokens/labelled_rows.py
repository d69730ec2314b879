"""Rows with labels for a head: a class, several, a number, or a class for each word. No torch.

A label is one int64, as targets are: the number of a class, a bit for each of several classes, or
the bits of a float64, and no number has the bits of `IGNORE`.
"""

import math
import struct
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

from torchdistpackage.config.head_tasks import ModelHead
from torchdistpackage.data.tokens.documents import (
    AnswerPair,
    Document,
    Reader,
    TextSource,
    is_unicode,
)
from torchdistpackage.errors import DataError

IGNORE = -100
"""The label of a word that does not count."""
MARGIN = "margin"
_SHOWN = 8
"""Largest number of classes that an error lists."""


def number_bits(value: float) -> int:
    """Return the bits of a finite float64 as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", value + 0.0))[0])


def label_text(label: int, head: ModelHead) -> str:
    """Return a label as a row has it: the name of its class, or names, or its number."""
    if not head.task.has_classes:
        return f"{struct.unpack('<d', struct.pack('<q', label))[0]:g}"
    if head.multi_label:
        return "+".join(x for i, x in enumerate(head.labels) if label >> i & 1) or "none"
    return head.labels[label]


class LabelReader:
    """Reads rows with labels from a source. read_texts: the function that reads the texts of a
    row."""

    def __init__(self, source: TextSource, read_texts: Reader):
        self._source, self._read = source, read_texts

    def __call__(self, value: dict[str, Any], where: str) -> Document | AnswerPair:
        """Return the document, or the pair, of one row with its labels.

        Raises:
            DataError: the text or the label is missing or wrong; it names the row.
        """
        head, field = self._source.head, self._source.label_field
        assert head is not None
        if head.is_pairs:
            pair = self._read(value, where)
            margin = value.get(MARGIN)
            margin = _number(0.0 if margin is None else margin, where, MARGIN)
            return AnswerPair(*(x._replace(labels=(margin,)) for x in cast(AnswerPair, pair)))
        if field not in value:
            raise DataError(
                f"{where}: no field {field!r}; there are {', '.join(value) or 'none'} "
                f"(data.label_field)"
            )
        label = value[field]
        if head.is_of_tokens:
            return self._words(value, label, where)
        document = cast(Document, self._read(value, where))
        if not head.has_classes:
            return document._replace(labels=(_number(label, where, field),))
        if not self._source.multi_label:
            return document._replace(labels=(self._class(label, where),))
        if not isinstance(label, list):
            raise DataError(
                f"{where}: {field} is a {_kind(label)}; with data.multi_label it is a list of "
                f"classes"
            )
        classes = {self._class(x, where) for x in cast(list[object], label)}
        return document._replace(labels=(sum(1 << x for x in classes),))

    def _words(self, value: dict[str, Any], labels: object, where: str) -> Document:
        """Return a text of words with a space between each two, and the class of each word."""
        field, label_field = self._source.field, self._source.label_field
        words = value.get(field)
        if not (isinstance(words, list) and isinstance(labels, list)):
            name = field if not isinstance(words, list) else label_field
            raise DataError(
                f"{where}: {name} is a {_kind(value.get(name))}; it has to be a list, with one "
                f"entry for each word (data.field, data.label_field)"
            )
        words, labels = cast(list[object], words), cast(list[object], labels)
        if len(words) != len(labels) or not words:
            raise DataError(
                f"{where}: {len(words)} words in {field}, but {len(labels)} labels in "
                f"{label_field}; give one label for each word"
            )
        texts = list[str]()
        for number, text in enumerate(words, 1):
            if not isinstance(text, str) or not text.strip():
                raise DataError(
                    f"{where}: word {number} of {field} is {text!r}, which is no "
                    "word; write a text that is not empty"
                )
            texts.append(is_unicode(text, f"{where}: word {number} of {field}"))
        starts = accumulate((len(x) + 1 for x in texts[:-1]), initial=0)
        spans = tuple((at, at + len(x)) for at, x in zip(starts, texts, strict=True))
        classes = tuple(IGNORE if x in (None, IGNORE) else self._class(x, where) for x in labels)
        return Document(" ".join(texts), labels=classes, words=spans)

    @cached_property
    def _classes(self) -> Mapping[str, int]:
        return {name: number for number, name in enumerate(self._source.labels)}

    def _class(self, label: object, where: str) -> int:
        """Return the number of a class, which a text names, or a number where no name is one."""
        names = self._source.labels
        if isinstance(label, str | int):
            name = label if isinstance(label, str) else str(label).lower()
            if name in self._classes:
                return self._classes[name]
            by_number = not any(x.isdecimal() for x in names)
            if isinstance(label, int) and by_number and 0 <= label < len(names):
                return int(label)
        shown = ", ".join(names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (
            len(names) > _SHOWN
        )
        raise DataError(
            f"{where}: {self._source.label_field} is {label!r}, which is not one of the "
            f"{len(names)} classes ({shown}); correct it, or name it in data.labels"
        )


def _number(value: object, where: str, field: str) -> int:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return number_bits(float(value))
    raise DataError(f"{where}: {field} is {value!r}; write a finite number")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
