"""The split of documents into training and validation: by a hash of their text.

A single document is cut, and validation reads its end. No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchdistpackage.config.data_split import split_at_end, too_few_tokens
from torchdistpackage.data.tokens.token_cache import TokenizedText

PAIR, ANSWER, GROUP, ROW = "pair", "answer", "line", "row"


class SplitPart(NamedTuple):
    """One side of a split.

    documents: numbers of its documents. starts, lengths: the tokens that it reads, by number of
    document, for all documents of the text.
    """

    documents: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths[self.documents].sum())


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSplit:
    """The documents of each side of a split.

    is_cut: training reads the beginning of each document, validation the end. has_prompts: the
    documents have prompts, so they are never cut. unit: name of a document in messages; a pair, an
    answer, a line of texts to compare or a row with a label makes a sample whatever its length.
    """

    parts: dict[str, SplitPart]
    is_cut: bool
    has_prompts: bool
    unit: str = "document"

    @property
    def note(self) -> str | None:
        """A note on a text that is cut, else None."""
        if not self.is_cut:
            return None
        number = self.parts["val"].num_tokens
        total = sum(part.num_tokens for part in self.parts.values())
        return (
            f"the data are one document, so it is cut: its last {number:,} of {total:,} tokens are "
            f"for validation (data.val_fraction)"
        )

    def problems(self, seq_len: int) -> Iterator[str]:
        """Yield a problem for each side that does not fill a sample of `seq_len` tokens."""
        total = sum(part.num_tokens for part in self.parts.values()) if self.is_cut else None
        for split, part in self.parts.items():
            if self.has_prompts and not len(part.documents):
                why = "" if self.unit in (GROUP, ROW) else "with prompts "
                yield (
                    f"the {split} split has no {self.unit}: there is only one, and {why}it is not "
                    f"cut; use more {self.unit}s"
                )
                continue
            if self.unit in (PAIR, ANSWER, GROUP, ROW):
                continue
            extent = f" in {len(part.documents):,} documents" if not self.is_cut else ""
            if self.is_cut and split == "val":
                extent = ", the end of the only document"
            if text := too_few_tokens(split, part.num_tokens, seq_len, of=extent, total=total):
                yield text


def split_documents(text: TokenizedText, val_fraction: float) -> DocumentSplit:
    """Split the documents of a text; equal texts and fractions give equal splits.

    val_fraction: 1 gives validation all documents, 0 none. Equal documents are on one side. If all
    documents are equal, each is cut near its end, unless it has a prompt.
    """
    starts = text.starts
    lengths = np.diff(text.ends, prepend=0)
    numbers = np.arange(len(text.ends))
    has_prompts = text.prompts is not None
    if val_fraction in (0, 1):
        only = {"val" if val_fraction else "train": SplitPart(numbers, starts, lengths)}
        return DocumentSplit(only, False, has_prompts)
    in_val = _in_val(text.places, val_fraction)
    if in_val.any() or has_prompts:
        train, val = (SplitPart(numbers[side], starts, lengths) for side in (~in_val, in_val))
        return DocumentSplit({"train": train, "val": val}, False, has_prompts)
    # all are equal, and so are their lengths
    num_train, num_val = split_at_end(int(lengths[0]), val_fraction)
    train = SplitPart(numbers, starts, np.full_like(lengths, num_train))
    val = SplitPart(numbers, starts + num_train, np.full_like(lengths, num_val))
    return DocumentSplit({"train": train, "val": val}, True, has_prompts)


def split_pairs(text: TokenizedText, val_fraction: float) -> DocumentSplit:
    """Split preference pairs like documents; a pair has the number of its line."""
    lines = replace(
        text,
        ends=text.ends[1::2],
        places=text.places[::2],
        lines=text.lines[::2],
        documents_per_line=1,
    )
    return replace(split_documents(lines, val_fraction), unit=PAIR)


def split_answers(text: TokenizedText, val_fraction: float) -> DocumentSplit:
    """Split labelled answers like documents; an answer makes a sample whatever its length."""
    return replace(split_documents(text, val_fraction), unit=ANSWER)


def split_groups(text: TokenizedText, val_fraction: float) -> DocumentSplit:
    """Split lines of texts to compare by their anchors; a sample has the number of its line."""
    number = text.documents_per_line
    lines = replace(
        text,
        ends=text.ends[number - 1 :: number],
        places=text.places[::number],
        lines=text.lines[::number],
        prompts=text.ends[::number],  # lines with prompts are never cut
        documents_per_line=1,
    )
    return replace(split_documents(lines, val_fraction), unit=GROUP)


def split_rows(text: TokenizedText, val_fraction: float) -> DocumentSplit:
    """Split rows with labels like documents, without cutting any."""
    # those with prompts are never cut
    return replace(split_documents(replace(text, prompts=text.ends), val_fraction), unit=ROW)


def _in_val(hashes: npt.NDArray[np.float64], val_fraction: float) -> npt.NDArray[np.bool_]:
    """Return which documents validation has, by the hashes of their texts.

    With two different texts, each side has a document, however few there are.
    """
    in_val = hashes < val_fraction
    if not in_val.any():
        in_val = hashes == hashes.min()
    if in_val.all():
        in_val = hashes != hashes.max()
    return in_val
