"""Fixtures of all tests. Torch is imported by the ranks alone, so the pure tests run without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from torchdistpackage.testing import RankPool

# On a loaded machine a deadline would be a coin toss, and a red run must be red again.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, max_examples=50
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def ranks() -> Generator[RankPool]:
    """`ranks(4).run(fn, ...)` calls fn on 4 gloo ranks that live as long as the session."""
    from torchdistpackage.testing import RankPool

    # A rank's first optimizer imports torch._dynamo, which takes seconds.
    with RankPool(preload=["pytest", "torch._dynamo"]) as pool:
        yield pool


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the small set left out."""
    items = terminalreporter.stats.get("deselected", [])
    left_out = Counter(item.path.name for item in items if item.get_closest_marker("full"))
    if left_out:
        files = ", ".join(f"{name} {number}" for name, number in left_out.items())
        terminalreporter.write_line(
            f"left out: {left_out.total()} more cases ({files}); ./scripts/test --full runs them"
        )
