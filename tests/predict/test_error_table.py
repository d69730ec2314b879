"""The page of published steps is up to date, and its rows are what it says they are."""

from pathlib import Path

import pytest

from torchdistpackage.predict.devices import DEVICES
from torchdistpackage.predict.error_table import compare, mean_and_worst, table
from torchdistpackage.predict.published import ROWS, SOURCES, is_checked

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predicted_steps.md"
MISSED = {"45a", "45b", "46a", "46b"}
"""Check rows on fitted devices that the page names as missed."""


def test_the_page_is_what_the_rows_and_the_model_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.endswith(f"\n{table()}"), "run scripts/docs"


def test_check_rows_stay_within_their_bars_but_for_those_that_the_page_names() -> None:
    check = [each for each in compare() if each.row.use == "check"]
    fitted = [x for x in check if x.device.is_fitted and x.row.number not in MISSED]
    mean, worst = mean_and_worst(fitted)
    assert mean <= 0.05 and worst <= 0.10


def test_every_row_has_a_source_a_device_and_a_number_of_its_own() -> None:
    numbers = [row.number for row in ROWS]
    assert len(set(numbers)) == len(numbers)
    assert {row.source for row in ROWS} == {*SOURCES}
    assert {row.device for row in ROWS} <= {*DEVICES}
    assert is_checked("a100") and not is_checked("mi300x")


@pytest.mark.parametrize("device", [x for x in DEVICES if DEVICES[x].is_fitted])
def test_a_device_is_fitted_on_three_rows_at_most(device: str) -> None:
    rows = {x.number.rstrip("abc") for x in ROWS if x.device == device and x.use == "fit"}
    assert 1 <= len(rows) <= 3
