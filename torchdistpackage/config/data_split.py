"""Split tokens between training and validation, and say when there are too few. No torch."""

import math


def split_at_end(num_tokens: int, val_fraction: float) -> tuple[int, int]:
    """Return the numbers of tokens for training and validation, which gets the end."""
    num_val = round(num_tokens * val_fraction)
    return num_tokens - num_val, num_val


def too_few_tokens(
    split: str, number: int, seq_len: int, *, of: str = "", total: int | None = None
) -> str | None:
    """Return a message if `number` tokens do not fill one sample of a split, else None.

    of: place of the tokens, for the message. total: number of tokens of both splits, if they are
    cut from one file.
    """
    needed = seq_len + 1
    if number >= needed:
        return None
    remedies = ["use more text"]
    if number > 1:
        remedies.append(f"set data.seq_len to {number - 1} or less")
    if split == "val" and total is None:
        remedies.append("raise data.val_fraction")
    elif split == "val" and total:
        fraction = math.ceil(needed / total * 1000) / 1000
        if fraction <= 0.5 and split_at_end(total, fraction)[0] >= needed:
            remedies.append(f"raise data.val_fraction to {fraction:g} or more")
    return (
        f"the {split} split has {number:,} tokens{of}, but one sample takes {needed:,} "
        f"(data.seq_len={seq_len} and the next token); {', or '.join(remedies)}"
    )
