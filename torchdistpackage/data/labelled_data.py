"""Rows with labels for a head, as samples of one row each, or two of a pair of answers.

A row is one text, cut or padded to one length. Its padding follows it, so in a decoder no token
of the text attends to it; encoders are told where it begins (`position_ids`) and mask it. The
target of a text stands at its last token that is not padding, which is where transformers pools in
decoders; those of words stand at their first tokens. All others are `IGNORE`.
"""

import numpy as np
import numpy.typing as npt

from torchdistpackage.data.preference_data import PreferenceDataset
from torchdistpackage.data.tokens.pair_rows import pair_problems
from torchdistpackage.data.tokens.split import DocumentSplit, split_rows
from torchdistpackage.data.tokens.token_cache import TokenizedText


class LabelledDataset(PreferenceDataset):
    """Rows of `seq_len` tokens with a label each, or one of each word; see `PreferenceDataset`.

    padding: the token that fills a row; transformers pools at the last token that is another one;
        None: 0
    fills it, and the last token of a text is the one.
    """

    def __init__(
        self,
        text: TokenizedText,
        *,
        vocab: int,
        seq_len: int,
        global_batch: int,
        val_fraction: float,
        masks_padding: bool = False,
        padding: int | None,
        of_tokens: bool = False,
    ):
        self._padding, self._of_tokens = padding, of_tokens
        super().__init__(
            text,
            vocab=vocab,
            seq_len=seq_len,
            global_batch=global_batch,
            val_fraction=val_fraction,
            masks_padding=masks_padding,
        )

    def _split(self, val_fraction: float) -> DocumentSplit:
        return split_rows(self.text, val_fraction)

    def _problems(self) -> list[str]:
        return []

    def _fill(
        self, document: int, ids: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]
    ) -> int:
        text = self.text
        assert text.labels is not None
        begin = int(text.ends[document - 1]) if document else 0
        where = slice(begin, min(int(text.ends[document]), begin + self.seq_len))
        tokens = text.tokens[where].astype(np.int64)
        ids[:] = self._padding or 0
        ids[: len(tokens)] = tokens
        if self._of_tokens:
            targets[: len(tokens)] = text.labels[where]
        else:
            targets[last_token(tokens, self._padding)] = text.labels[document]
        return len(tokens)


class RewardDataset(LabelledDataset):
    """Rows of pairs, row 2 i chosen and row 2 i + 1 rejected, both with the margin of the pair."""

    def _split(self, val_fraction: float) -> DocumentSplit:
        return PreferenceDataset._split(self, val_fraction)

    def _problems(self) -> list[str]:
        return pair_problems(self.text, self.seq_len, ahead=0)


def last_token(tokens: npt.NDArray[np.int64], padding: int | None) -> int:
    """Return the position of the last token that is not padding, 0 if all are."""
    if padding is None:
        return len(tokens) - 1
    positions = np.flatnonzero(tokens != padding)
    return int(positions[-1]) if len(positions) else 0
