"""YAML of bounded size and depth, apart from bounded.py because `tdp jobs` loads no YAML.

Values are counted while they are composed, before any is built, so a few hundred bytes of
aliases cost no more than their refusal.
"""

from typing import Any, cast

import yaml

MAX_NODES = 20_000
"""Values and keys of one YAML file, each use of an alias counted in full."""
MAX_DEPTH = 50
"""Largest number of lists and mappings inside each other."""


class BoundError(yaml.MarkedYAMLError):
    """A YAML text goes over a bound. why: which; mark: where."""

    def __init__(self, why: str, mark: Any) -> None:
        super().__init__(problem=why, problem_mark=mark)


class BoundedLoader(yaml.SafeLoader):
    """Composes at most MAX_NODES nodes, MAX_DEPTH deep; an alias counts as one here."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        event: Any = cast(Any, self).peek_event()
        if self._nodes > MAX_NODES:
            raise BoundError(f"it has more than {MAX_NODES:,} values and keys", event.start_mark)
        if self._depth > MAX_DEPTH:
            why = f"values are nested too deeply, more than {MAX_DEPTH} levels"
            raise BoundError(why, event.start_mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1
