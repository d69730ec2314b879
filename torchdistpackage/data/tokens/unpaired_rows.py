"""Labelled answers as rows of one length. No torch."""

from itertools import islice

import numpy as np

from torchdistpackage.data.tokens.token_cache import MOST_PROBLEMS, TokenizedText


def answer_problems(text: TokenizedText, seq_len: int) -> list[str]:
    """Return problems of answers that have no token in a row of `seq_len` tokens. Each names file
    and line; of many problems these are the first ones.
    """
    assert text.prompts is not None
    problems = (
        f"{text.origin(answer)}: a prompt of {text.prompts[answer]} tokens fills a sample "
        f"(data.seq_len={seq_len}); raise data.seq_len to {text.prompts[answer]} or more, or "
        f"remove it"
        for answer in np.flatnonzero(text.prompts >= seq_len + 1).tolist()
    )
    return list(islice(problems, MOST_PROBLEMS))


def cut_answers(text: TokenizedText, seq_len: int) -> str | None:
    """Return a note on answers that a row of `seq_len` tokens cannot hold whole."""
    lengths = np.diff(text.ends, prepend=0)
    # a row has one more token, as its last target
    if not (num_long := int((lengths > seq_len + 1).sum())):
        return None
    return (
        f"{num_long:,} of {len(lengths):,} answers are, with their prompts, longer than a sample "
        f"(data.seq_len={seq_len}; the longest has {lengths.max():,} tokens): their ends are left "
        f"out"
    )
