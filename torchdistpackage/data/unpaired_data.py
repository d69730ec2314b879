"""Labelled answers as samples of two rows each: the answer, and another answer to its prompt.

The second row has the prompt of the sample and the answer of the sample before it in the step, of
the first one that of the last: mismatched pairs, from which KTO estimates how far the model has
moved (Ethayarajh et al., arXiv:2402.01306, section 4.1), chosen as trl chooses them. So a sample
follows from the step and its number there alone. Otherwise samples are those of preference_data.

Whether an answer is desirable travels in the targets: those of an undesirable sample are all below
-100, by `with_label`.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchdistpackage.data.preference_data import PreferenceDataset
from torchdistpackage.data.source import IGNORE, Split
from torchdistpackage.data.tokens.split import DocumentSplit, split_answers
from torchdistpackage.data.tokens.token_encoder import UNDESIRABLE
from torchdistpackage.data.tokens.unpaired_rows import answer_problems

_IGNORE_UNDESIRABLE = IGNORE - 1


def with_label(targets: npt.NDArray[np.int64], is_desirable: bool) -> npt.NDArray[np.int64]:
    """Return targets that say by themselves whether their answer is desirable."""
    if is_desirable:
        return targets
    return np.where(targets == IGNORE, _IGNORE_UNDESIRABLE, _IGNORE_UNDESIRABLE - 1 - targets)


def without_label(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (plain targets (N, S), whether each row's answer is desirable (N,)) of `with_label`;
    any slice of the positions will do.
    """
    is_desirable = targets[:, 0] >= IGNORE
    plain = torch.where(targets == _IGNORE_UNDESIRABLE, IGNORE, _IGNORE_UNDESIRABLE - 1 - targets)
    return torch.where(targets >= IGNORE, targets, plain), is_desirable


class UnpairedDataset(PreferenceDataset):
    """Rows of `seq_len` tokens, row 2 i an answer and row 2 i + 1 its mismatched one; see
    `PreferenceDataset`, of which answers take the place of pairs.

    Raises:
        DataError: as there.
    """

    def _rows_per_sample(self) -> int:
        return 2

    def _split(self, val_fraction: float) -> DocumentSplit:
        return split_answers(self.text, val_fraction)

    def _problems(self) -> list[str]:
        return answer_problems(self.text, self.seq_len)

    def _fill_row(
        self,
        split: Split,
        seed: int,
        number: int,
        ids: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
    ) -> int:
        text, (sample, is_mismatched) = self.text, divmod(number, 2)
        assert text.counted is not None and text.prompts is not None
        batch = self._num_rows // 2
        first = sample // batch * batch
        other = first + (sample - first - 1) % batch if is_mismatched else sample
        question, answered = (self._unit(split, seed, x) for x in (sample, other))
        starts = text.starts
        prompt = slice(starts[question], starts[question] + text.prompts[question])
        answer = slice(starts[answered] + text.prompts[answered], text.ends[answered])
        room = self.seq_len + 1
        tokens, counts = (
            np.concatenate([x[prompt], x[answer]])[:room].astype(np.int64)
            for x in (text.tokens, text.counted)
        )
        ids[: len(tokens)] = tokens[: self.seq_len]
        targets[: len(tokens) - 1] = np.where(counts[1:] != 0, tokens[1:], IGNORE)
        answer_ids = text.counted[starts[question] + text.prompts[question]]
        targets[:] = with_label(targets, answer_ids != UNDESIRABLE)
        return min(len(tokens), self.seq_len)
