"""What a text has to say, without its sentences: names, keys and numbers, in their order."""

import re


def tells(text: object, *facts: str) -> bool:
    """Whether a line of `text` has all `facts`, each soon after the one before it."""
    return re.search(facts_pattern(*facts), str(text)) is not None


def facts_pattern(*facts: str) -> str:
    """Return the pattern of `facts` in their order, for `match` of pytest.raises.

    A number at an end of a fact is whole: "4 ranks" is not in "14 ranks".
    """
    assert facts
    return ".{0,120}?".join(rf"(?<!\d){re.escape(fact)}(?!\d)" for fact in facts)
