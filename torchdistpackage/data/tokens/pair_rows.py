"""Preference pairs as rows of one length: a row has the beginning of prompt and answer.

No torch.
"""

from itertools import islice

import numpy as np

from torchdistpackage.data.tokens.token_cache import MOST_PROBLEMS, TokenizedText


def cut_pairs(text: TokenizedText, seq_len: int) -> str | None:
    """Return a note on pairs with an answer that a row of `seq_len` tokens cannot hold whole."""
    # a row has one more token, as its last target
    lengths = np.diff(text.ends, prepend=0)
    is_long = lengths > seq_len + 1
    if not (num_long := int((is_long[::2] | is_long[1::2]).sum())):
        return None
    return (
        f"{num_long:,} of {len(lengths) // 2:,} pairs are longer than a sample (data.seq_len="
        f"{seq_len}; the longest answer has, with its prompt, {lengths.max():,} tokens): the ends "
        f"of their answers are left out"
    )


def pair_problems(text: TokenizedText, seq_len: int, ahead: int = 1) -> list[str]:
    """Return problems of pairs without two different answers in a row of `seq_len` tokens.

    ahead: tokens behind the row that its targets show.

    Each names file and line; of many problems these are the first ones.
    """
    assert text.prompts is not None
    room = seq_len + ahead
    starts = text.starts
    lengths = np.diff(text.ends, prepend=0)
    no_room = text.prompts >= room
    no_room = no_room[::2] | no_room[1::2]
    both_cut = (lengths > room)[::2] & (lengths > room)[1::2]

    def problems():
        for pair in np.flatnonzero(no_room | both_cut).tolist():
            chosen, rejected = starts[2 * pair], starts[2 * pair + 1]
            where = text.origin(2 * pair)
            prompt = text.prompts[2 * pair : 2 * pair + 2].max()
            if no_room[pair]:
                yield (
                    f"{where}: a prompt of {prompt} tokens fills a sample (data.seq_len="
                    f"{seq_len}); raise data.seq_len to {prompt} or more, or remove it"
                )
            elif np.array_equal(
                text.tokens[chosen : chosen + room], text.tokens[rejected : rejected + room]
            ):
                yield (
                    f"{where}: chosen and rejected are equal in the {room} tokens of a sample "
                    f"(data.seq_len={seq_len}); raise data.seq_len, or remove it"
                )

    return list(islice(problems(), MOST_PROBLEMS))
