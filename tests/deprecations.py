"""What libraries call deprecated of our own calls: an error in tests, or a line of a report.

transformers says so in its log, others warn; here both become warnings, and in tests these are
errors. With versions that nobody chose (`./scripts/test --versions newest`) `TDP_DEPRECATIONS`
names a file, to which each is written with the call that caused it.

The ranks of the tests import this file too, before they are forked.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = os.environ.get("TDP_DEPRECATIONS", "")
CATEGORIES = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
FILTERS = ",".join(["error", *(f"default::{c.__name__}" for c in CATEGORIES if REPORT)])
"""As Python's -W has them."""


def write(category: type[Warning], message: object, call: str) -> None:
    """One line of the report."""
    if REPORT and issubclass(category, CATEGORIES):
        text = f"{call}: {category.__name__}: {' '.join(str(message).split())[:300]}\n"
        with Path(REPORT).open("a", encoding="utf-8") as report:
            report.write(text)


def our_call() -> str:
    """The innermost line of ours on the stack, as file:line."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        inside = path.is_relative_to(ROOT) and ".venv" not in path.relative_to(ROOT).parts[0]
        if inside and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "no line of ours"


class _LogOfDeprecations(logging.Handler):
    """Warns of what a library logs as deprecated."""

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecated" in (text := record.getMessage()):
            warnings.warn(text, FutureWarning, stacklevel=2)


def watch() -> None:
    """Hear the log of transformers, and in a rank write what is shown nowhere."""
    logging.getLogger("transformers").addHandler(_LogOfDeprecations(logging.WARNING))
    if REPORT:
        shown = warnings.showwarning

        def show(message, category, filename, lineno, file=None, line=None):
            write(category, message, our_call())
            shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show


watch()
