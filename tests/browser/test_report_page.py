"""A report in a real browser: opened without a network, drawn, readable, used by keyboard."""

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.report.folders import BEGAN_S, write_run
from torchdistpackage.report.page import write_report

PICTURES = os.environ.get("TDP_SCREENSHOTS")
"""A folder to leave screenshots in."""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "gpt_small", steps=10_000, lr=0.0005)]
    write_report(runs, folder / "report.html", BEGAN_S)
    return folder / "report.html"


def opened(browser: Any, path: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page, said = context.new_page(), list[str]()
    page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda r: said.append(r.url) if r.url.startswith("http") else None)
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn")
    page.wait_for_function("!document.querySelector('.chart:not(:has(.main-svg))')")
    return page, said


def num_colours(picture: bytes) -> int:
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    return len(image.getcolors(1 << 24) or [])


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_every_chart_is_drawn_offline_and_fits(browser, page_file, width: int, scheme: str):
    page, said = opened(browser, page_file, width, scheme)
    boxes = page.query_selector_all(".chart")
    assert len(boxes) >= 10
    for box in boxes:
        # a plain background has one colour, a frame with text has some; lines have many shades
        name = box.get_attribute("id")
        assert num_colours(box.screenshot()) > 20, f"{name} is empty"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    size = "parseFloat(getComputedStyle(x).fontSize)"
    texts = f"[...document.querySelectorAll('p, td, h2')].map(x => {size})"
    assert min(page.evaluate(texts)) >= 12
    ink, back = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert contrast(ink, back) > 7
    assert said == []
    if PICTURES and width == 1200:
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=Path(PICTURES) / f"report_{scheme}.png")
    page.context.close()


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG 2.1, of two colours as rgb(r, g, b)."""

    def luminance(text: str) -> float:
        parts = [int(x) / 255 for x in text[text.index("(") + 1 : -1].split(",")[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_table_is_filtered_sorted_and_scrolled_by_keyboard(browser, page_file):
    page, said = opened(browser, page_file, 1200, "light")
    rows = "#t-config-gpt_small-rows tbody tr:not([hidden])"
    page.focus("#t-saves .scroll")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"
    page.focus("#t-saves th button")
    before = page.inner_text("#t-saves-rows tbody tr td")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.inner_text("#t-saves-rows tbody tr td") != before
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "complete"
    assert page.locator(rows).count() > 0 and said == []
    page.context.close()


def test_a_page_follows_a_change_to_dark(browser, page_file):
    page, said = opened(browser, page_file, 800, "light")
    ink = "document.querySelector('#loss').layout.font.color"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    limit = time.monotonic() + 20
    while page.evaluate(ink) == light and time.monotonic() < limit:
        page.wait_for_timeout(50)
    assert page.evaluate(ink) != light and said == []
    page.context.close()
