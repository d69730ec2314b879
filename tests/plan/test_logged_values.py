"""Rows of the log from the numbers of a step."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchdistpackage.plan import logged_values
from torchdistpackage.plan.logged_values import LoggedValue, logged


@pytest.mark.parametrize(
    ("content", "row"), [(0.0, {"x": 0.0}), (False, {"x": False}), (None, {}), ({}, {})]
)
def test_a_row_lacks_a_value_only_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, content: Any, row: dict[str, Any]
) -> None:
    values = (LoggedValue("x", "", "", read=lambda result: content),)
    monkeypatch.setattr(logged_values, "VALUES", values)
    assert logged(SimpleNamespace(measured={})) == row
