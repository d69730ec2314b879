"""Which documents only validation sees: by a hash of their text, or the end of a single one.

No torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchdistpackage.config.data_split import split_at_end, too_few_tokens
from torchdistpackage.data.tokens.token_cache import TokenizedText

PAIR = "pair"


class SplitPart(NamedTuple):
    """documents: which are in it. starts, lengths: of what is read of each of all documents."""

    documents: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths[self.documents].sum())


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSplit:
    """What each side reads. is_cut: training reads the beginning of a text and validation the end.
    has_prompts: of the documents, which are never cut. unit: what documents are called; a pair
    makes a sample whatever its length.
    """

    parts: dict[str, SplitPart]
    is_cut: bool
    has_prompts: bool
    unit: str = "document"

    @property
    def note(self) -> str | None:
        """What to say of a text that is cut."""
        if not self.is_cut:
            return None
        number, total = self.parts["val"].num_tokens, sum(p.num_tokens for p in self.parts.values())
        return (
            f"the data are one document, so it is cut: its last {number:,} of {total:,} tokens are "
            f"for validation (data.val_fraction)"
        )

    def problems(self, seq_len: int) -> Iterator[str]:
        """What to say of sides that do not fill a sample of `seq_len` tokens."""
        total = sum(part.num_tokens for part in self.parts.values()) if self.is_cut else None
        for split, part in self.parts.items():
            if self.has_prompts and not len(part.documents):
                yield (
                    f"the {split} split has no {self.unit}: there is only one, and with prompts it "
                    f"is not cut; use more {self.unit}s"
                )
                continue
            if self.unit == PAIR:
                continue
            of = f" in {len(part.documents):,} documents" if not self.is_cut else ""
            if self.is_cut and split == "val":
                of = ", the end of the only document"
            if text := too_few_tokens(split, part.num_tokens, seq_len, of=of, total=total):
                yield text


def split_documents(text: TokenizedText, val_fraction: float) -> DocumentSplit:
    """The same for the same texts and fraction; 1: all documents are for validation, 0: none.

    Equal documents are on one side, unless there is no other text: then each is cut near its end,
    but for those with prompts.
    """
    starts, lengths, every = text.starts, np.diff(text.ends, prepend=0), np.arange(len(text.ends))
    has_prompts = text.prompts is not None
    if val_fraction in (0, 1):
        only = {"val" if val_fraction else "train": SplitPart(every, starts, lengths)}
        return DocumentSplit(only, False, has_prompts)
    in_val = _in_val(text.places, val_fraction)
    if in_val.any() or has_prompts:
        train, val = (SplitPart(every[side], starts, lengths) for side in (~in_val, in_val))
        return DocumentSplit({"train": train, "val": val}, False, has_prompts)
    # all are equal, and so are their lengths
    num_train, num_val = split_at_end(int(lengths[0]), val_fraction)
    train = SplitPart(every, starts, np.full_like(lengths, num_train))
    val = SplitPart(every, starts + num_train, np.full_like(lengths, num_val))
    return DocumentSplit({"train": train, "val": val}, True, has_prompts)


def split_pairs(text: TokenizedText, val_fraction: float) -> DocumentSplit:
    """The same of pairs of documents, whose numbers are those of lines."""
    lines = replace(
        text,
        ends=text.ends[1::2],
        places=text.places[::2],
        lines=text.lines[::2],
        documents_per_line=1,
    )
    return replace(split_documents(lines, val_fraction), unit=PAIR)


def _in_val(places: npt.NDArray[np.float64], val_fraction: float) -> npt.NDArray[np.bool_]:
    """By their hash; with few documents at least one on each side, where there are two texts."""
    in_val = places < val_fraction
    if not in_val.any():
        in_val = places == places.min()
    if in_val.all():
        in_val = places != places.max()
    return in_val
