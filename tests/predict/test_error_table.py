"""The page of published steps is up to date, and its rows are what it says they are."""

from pathlib import Path

import pytest

from torchdistpackage.predict.devices import DEVICES
from torchdistpackage.predict.error_table import (
    MISSED,
    compare,
    kendall_tau,
    misses_bar,
    rankings,
    readme_sentence,
    table,
    token_seconds,
)
from torchdistpackage.predict.fitting import fit
from torchdistpackage.predict.published import ROWS, SOURCES, is_checked

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predicted_steps.md"


def test_the_page_is_what_the_rows_and_the_model_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"\n{table()}\n## Our own runs\n" in text, "run scripts/docs"
    readme = PAGE.parents[1].joinpath("README.md").read_text(encoding="utf-8")
    assert f"\n{readme_sentence()}\n!" in readme, "run scripts/docs"


def test_the_picture_has_a_mark_for_each_row() -> None:
    text = PAGE.with_name("pictures").joinpath("predicted_steps.svg").read_text(encoding="utf-8")
    marks = {f"{x.row.number}: {x.row.title}, {x.row.device}, {x.error:+.1%}" for x in compare()}
    missing = [x for x in marks if f"<title>{x}</title>" not in text]
    assert not missing, "run scripts/docs"


def test_the_page_lists_the_check_rows_that_miss_a_bar_and_no_others() -> None:
    assert {x.row.number for x in compare() if misses_bar(x)} == MISSED.keys()
    text = PAGE.read_text(encoding="utf-8").partition("Missed by check rows")[2]
    assert not [why for why in MISSED.values() if why not in text]


def test_layouts_of_one_model_are_ranked_as_published() -> None:
    groups = rankings()
    assert sum(len(rows) == 4 for rows in groups.values()) == 6, "those of eight B200"
    pairs = [len(rows) * (len(rows) - 1) // 2 for rows in groups.values()]
    taus = [kendall_tau(token_seconds(rows)) for rows in groups.values()]
    assert sum(n * tau for n, tau in zip(pairs, taus, strict=True)) / sum(pairs) >= 0.9


def test_every_row_has_a_source_a_device_and_a_number_of_its_own() -> None:
    numbers = [row.number for row in ROWS]
    assert len(set(numbers)) == len(numbers)
    assert {row.source for row in ROWS} == {*SOURCES}
    assert {row.device for row in ROWS} <= {*DEVICES}
    steps = {name: sum(row.device == name for row in ROWS) for name in DEVICES}
    assert all(number >= 2 for name, number in steps.items() if name != "h100-pcie"), steps
    assert all(bool(row.assumed) == bool(row.unassumed) for row in ROWS)
    assert is_checked("a100") and not is_checked("h100-pcie")


@pytest.mark.parametrize("device", [x for x in DEVICES if DEVICES[x].is_fitted])
def test_a_device_is_fitted_on_three_rows_at_most(device: str) -> None:
    rows = {x.number.rstrip("abc") for x in ROWS if x.device == device and x.use == "fit"}
    assert 1 <= len(rows) <= 3
    assert fit(DEVICES[device])[0] == DEVICES[device].fit
