"""Rows that declare a balance of experts."""

from typing import Any

import pytest

from torchdistpackage.layout.balances import BalanceSpec


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"state": "drift"}, "drift: state needs move"),
        ({"shifts_scores": True}, "drift: state needs move"),
        ({"loss": "m:f"}, "drift: loss and by_hand"),
    ],
)
def test_half_a_row_is_refused_where_it_is_written(parts: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BalanceSpec("drift", **parts)
