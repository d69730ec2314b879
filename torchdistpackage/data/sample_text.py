"""Samples as text for people: which tokens are trained, where documents begin, what is padding.

It reads the tensors of a batch alone, so it shows the samples of every source of data.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from torchdistpackage.data.source import IGNORE, DataBatch
from torchdistpackage.data.tokens.prompts import TokenCodec

_UNFINISHED = "\ufffd"


class SampleMarks(NamedTuple):
    """Marks before and after trained tokens, uncounted tokens, and headings."""

    trained: tuple[str, str]
    ignored: tuple[str, str]
    heading: tuple[str, str]


PLAIN = SampleMarks(("{+", "+}"), ("", ""), ("", ""))
"""The marks of added words in `git diff --word-diff`."""
_RESET = "\x1b[0m"
COLOURED = SampleMarks(("\x1b[32m", _RESET), ("\x1b[2m", _RESET), ("\x1b[1m", _RESET))
"""Green for trained tokens, dim for the others, bold for headings."""


class SampleDocument(NamedTuple):
    """Consecutive tokens of a row that belong to one document.

    labels: for each token None where it does not count, True where it is trained as a next token,
    and else its target. num_padding: tokens of padding behind it.
    """

    ids: list[int]
    labels: list[int | bool | None]
    num_padding: int


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of a batch. documents: empty where the inputs are not token ids.

    num_positions, num_trained: positions of the row, and those whose target counts; trained_tokens
    is about them. target: the target of a row as a whole, such as a class.
    """

    documents: list[SampleDocument]
    num_positions: int
    num_trained: int
    num_padding: int
    target: str | None

    @property
    def summary(self) -> str:
        """Return the counts of this row, for a heading."""
        facts = [f"target {self.target}"] if self.target is not None else []
        if self.documents and self.target is None:
            facts.append(trained_share(self.num_trained, self.num_positions))
        if self.documents:
            number = len(self.documents)
            facts.append(f"{number} document{'s' * (number > 1)}")
        if self.num_padding:
            facts.append(f"{self.num_padding} of padding")
        return ", ".join(facts)


def trained_share(num_trained: int, num_positions: int) -> str:
    """Return how many of the positions are trained."""
    share = num_trained / max(num_positions, 1)
    return f"{num_trained:,} of {num_positions:,} tokens trained ({share:.1%})"


def sample_rows(batch: DataBatch) -> Iterator[SampleRow]:
    """Yield the rows of a batch.

    Targets of the shape of the inputs belong to tokens: to the next one if all that count are the
    next ids, else to the token in their own position. Trailing ids 0 that do not count are padding.
    """
    inputs, targets, positions = batch
    has_ids = inputs.dim() == 2 and not inputs.is_floating_point()
    for_tokens = has_ids and targets.shape == inputs.shape
    counts = targets != IGNORE
    are_next = for_tokens and bool((targets[:, :-1] == inputs[:, 1:])[counts[:, :-1]].all())
    for row in range(len(inputs)):
        target = None if for_tokens else str(targets[row].tolist())[:80]
        if not has_ids:
            shape = f"{tuple(inputs.shape[1:])} of {inputs.dtype}"
            yield SampleRow([], inputs[row].numel(), 0, 0, f"{target}, inputs {shape}")
            continue
        ids: list[int] = inputs[row].tolist()
        labels = _labels(ids, targets[row].tolist() if for_tokens else None, are_next=are_next)
        number = _num_padding(inputs[row], counts[row] if for_tokens else None)
        starts = [] if positions is None else _starts(positions[row], len(ids) - number)
        documents = list(_documents(ids, labels, starts, number))
        trained = int(counts[row].sum()) if for_tokens else 0
        yield SampleRow(documents, inputs.shape[1], trained, number, target)


def row_text(
    row: SampleRow,
    codec: TokenCodec | None,
    marks: SampleMarks,
    label_text: Callable[[int], str] = str,
) -> Iterator[str]:
    """Yield the lines of a row. codec: None writes numbers of tokens. label_text: of a label."""
    for number, document in enumerate(row.documents, 1):
        if len(row.documents) > 1:
            yield f"document {number}, {len(document.ids)} tokens:".join(marks.heading)
        text = ""
        for label, piece in _pieces(document, codec):
            around = marks.ignored if label is None else marks.trained
            # a mark on each line: a terminal's pager begins each line without colour
            shown = "\n".join(x.join(around) if x else x for x in piece.split("\n"))
            text += shown if label is None or label is True else f"{shown}/{label_text(label)}"
        yield text
        if document.num_padding:
            yield f"[{document.num_padding} tokens of padding]".join(marks.ignored)


def _labels(
    ids: list[int], targets: list[int] | None, *, are_next: bool
) -> list[int | bool | None]:
    """Return the label of each token, see `SampleDocument`; append the last target to `ids`."""
    if targets is None:
        return [None] * len(ids)
    if not are_next:
        return [None if target == IGNORE else target for target in targets]
    if targets[-1] != IGNORE:
        ids.append(targets[-1])
    return [None, *(None if x == IGNORE else True for x in targets)][: len(ids)]


def _num_padding(ids: Tensor, counts: Tensor | None) -> int:
    used = (ids != 0) if counts is None else (ids != 0) | counts
    places = used.nonzero()
    return len(ids) - (int(places[-1]) + 1 if len(places) else 0)


def _starts(positions: Tensor, stop: int) -> list[int]:
    return [int(x) for x in (positions[:stop] == 0).nonzero()]


def _documents(
    ids: list[int], labels: list[int | bool | None], starts: list[int], num_padding: int
) -> Iterator[SampleDocument]:
    stop = len(ids) - num_padding
    begins = sorted({0, *starts})
    for begin, end in zip(begins, [*begins[1:], stop], strict=True):
        padding = num_padding if end == stop else 0
        yield SampleDocument(ids[begin:end], labels[begin:end], padding)


def _pieces(
    document: SampleDocument, codec: TokenCodec | None
) -> Iterator[tuple[int | bool | None, str]]:
    """Yield (label, text) of consecutive tokens of one label."""
    shown = ""
    end = 0
    for label, group in groupby(document.labels):
        begin, end = end, end + len(list(group))
        if codec is None:
            text = " ".join(map(str, document.ids[begin:end]))
            yield label, text if begin == 0 else f" {text}"
            continue
        # decoding depends on the ids before, so decode these too
        text = codec.decode(document.ids[:end], special=True)
        if end < len(document.ids):  # a letter of which bytes are missing goes to the next piece
            text = text.rstrip(_UNFINISHED)
        yield label, _printable(text[len(shown) :])
        shown = text


def _printable(text: str) -> str:
    """Return the text without control characters, which would act on a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class SampleCounts:
    """Counts of the rows of one step, by source."""

    def __init__(self) -> None:
        self._rows, self._positions, self._trained = (Counter[str]() for _ in range(3))

    def add(self, source: str, row: SampleRow) -> None:
        """Count a row of a source."""
        self._rows[source] += 1
        self._positions[source] += row.num_positions
        self._trained[source] += row.num_trained

    def rows(self, rows_per_sample: int) -> Sequence[tuple[str, ...]]:
        """Return a table: a source, its samples, tokens, trained tokens, and the share of these
        in all trained tokens.
        """
        total = max(sum(self._trained.values()), 1)
        return [
            ("source", "samples", "tokens", "trained", "", "of all trained"),
            *(
                (
                    name,
                    f"{number // rows_per_sample:,}",
                    f"{self._positions[name]:,}",
                    f"{self._trained[name]:,}",
                    f"{self._trained[name] / max(self._positions[name], 1):.1%}",
                    f"{self._trained[name] / total:.1%}",
                )
                for name, number in self._rows.items()
            ),
        ]
