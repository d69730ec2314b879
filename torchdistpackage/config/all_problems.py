"""Collect the problems that the separate checks of a run find, and report them all at once.

A check is skipped if it reads a key that is already known to be wrong, because it would complain
about a default or crash. The report names the skipped checks.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torchdistpackage.config.check import touches
from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.config.load import SECTION_NAMES, Draft
from torchdistpackage.errors import ConfigError, LayoutError, ScheduleError, TopologyError

T = TypeVar("T")
WHOLE_FILE = SECTION_NAMES
"""The keys of a check that reads all sections of a run."""
_REFUSALS = (ConfigError, LayoutError, ScheduleError, TopologyError)


class ProblemCollector:
    """The problems of one run; those of its file come first.

    draft: the run as it was read. source: its name in the report.
    """

    def __init__(self, draft: Draft, source: str) -> None:
        self._bad, self._source = draft.bad, source
        self._errors: list[Exception] = []
        self._left_out: list[str] = []
        self._notes: list[str] = []
        if draft.problems:
            self._errors.append(ConfigErrors(source, draft.problems))

    def run(self, name: str, keys: Sequence[str], check: Callable[[], T]) -> T | None:
        """Return the result of a check, or None if it is skipped or refuses the run.

        Args:
            name: what it checks, for the report.
            keys: the keys and sections that it reads.
            check: raises ConfigError, LayoutError, ScheduleError or TopologyError.
        """
        if touches(tuple(keys), self._bad):
            self._left_out.append(name)
            return None
        try:
            return check()
        except _REFUSALS as error:
            self._errors.append(error)
            return None

    def note(self, text: str) -> None:
        """Add a line to the end of the report. It is printed only if something is wrong."""
        self._notes.append(text)

    def finish(self) -> None:
        """Raise all problems as one error that names the skipped checks.

        Raises:
            ConfigError: several checks have refused the run; of one check, its own error.
        """
        if not self._errors:
            return
        error = self._errors[0]
        if len(self._errors) > 1:
            problems = dict.fromkeys(x for error in self._errors for x in _problems(error))
            error = ConfigErrors(self._source, problems)
        left_out = " and ".join(self._left_out)
        notes = [f"not checked until this is mended: {left_out}"] if left_out else []
        for note in (*notes, *self._notes):
            error.add_note(note)
        raise error


def _problems(error: Exception) -> Sequence[Problem]:
    if isinstance(error, ConfigErrors):
        return error.problems
    return [Problem("", None, "", str(error))]
