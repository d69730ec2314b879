"""Samples for contrastive training: a sample is an anchor, its positive and hard negatives, a row
each.

A row is one text, cut or padded to one length. The padding follows it, so in a decoder no token
of the text attends to it; encoders are told where it begins (`position_ids`) and mask it. Its
targets say which of its positions are tokens, and which text it is, as ranks of the last stage see
no ids.
"""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchdistpackage.data.preference_data import PreferenceDataset
from torchdistpackage.data.source import IGNORE, Split
from torchdistpackage.data.tokens.split import DocumentSplit, split_groups
from torchdistpackage.data.tokens.token_cache import MOST_PROBLEMS, TokenizedText

_FIRST, _LAST, _BITS = 1, 2, 2


class RowTokens(NamedTuple):
    """The positions of rows (N, S), bool each: tokens that are not padding, the first and the last
    one of a row. texts: (N,) a number for each different text, negative for a row that is none.
    """

    tokens: Tensor
    first: Tensor
    last: Tensor
    texts: Tensor

    @classmethod
    def of_targets(cls, targets: Tensor) -> "RowTokens":
        """Read the targets (N, S) of rows, or of slices of them: `texts` is right where a rank has
        one of the tokens.
        """
        tokens = targets != IGNORE
        return cls(
            tokens,
            tokens & (targets & _FIRST > 0),
            tokens & (targets & _LAST > 0),
            (targets >> _BITS).amax(1),
        )


class EmbeddingDataset(PreferenceDataset):
    """Rows of `seq_len` tokens; rows i R to i R + R - 1 are sample i, the anchor first; see
    `PreferenceDataset`. R: `rows_per_sample`, 2 and the number of hard negatives.
    """

    def _split(self, val_fraction: float) -> DocumentSplit:
        return split_groups(self.text, val_fraction)

    def _problems(self) -> list[str]:
        empty = np.flatnonzero(np.diff(self.text.ends, prepend=0) == 0)[:MOST_PROBLEMS].tolist()
        return [f"{self.text.origin(x)}: a text has no token; remove the line" for x in empty]

    def _fill_row(
        self,
        split: Split,
        seed: int,
        number: int,
        ids: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
    ) -> int:
        text, (sample, side) = self.text, divmod(number, self.rows_per_sample)
        document = self.rows_per_sample * self._unit(split, seed, sample) + side
        begin = int(text.ends[document - 1]) if document else 0
        end = int(text.ends[document])
        tokens = text.tokens[begin : min(end, begin + self.seq_len)].astype(np.int64)
        is_cut = end - begin > self.seq_len
        if is_cut and text.eos is not None and text.tokens[end - 1] == text.eos:
            tokens[-1] = text.eos  # as tokenizers cut a text before they add its end
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=7).digest()
        ids[: len(tokens)] = tokens
        targets[: len(tokens)] = int.from_bytes(digest, "little") << _BITS
        targets[0] |= _FIRST
        targets[len(tokens) - 1] |= _LAST
        return len(tokens)


def cut_texts(text: TokenizedText, seq_len: int) -> str | None:
    """Return a note on texts that a row of `seq_len` tokens cannot hold whole, or None."""
    lengths = np.diff(text.ends, prepend=0)
    if not (num_long := int((lengths > seq_len).sum())):
        return None
    return (
        f"{num_long:,} of {len(lengths):,} texts are longer than a sample (data.seq_len={seq_len}; "
        f"the longest has {lengths.max():,} tokens): their ends are left out"
    )
