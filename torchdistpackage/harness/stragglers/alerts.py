"""What is said of stragglers from window to window: each once, and again when it is over. No torch.

One rule: a reader of the log sees changes. A straggler that stays is not repeated, and one that is
not clear is told when two windows in a row have found it.
"""

from collections.abc import Sequence

from torchdistpackage.harness.stragglers.find import Straggler
from torchdistpackage.topology.mesh import Mesh

QUIET_WINDOWS = 2
"""After this many windows without it a straggler is over."""
CHANGE = 2.0
"""A straggler whose delay grew or fell by this factor is told again."""


class Alerts:
    """Remembers what was told. `mesh` and the `hosts`, by rank, are for the words."""

    def __init__(self, mesh: Mesh, hosts: Sequence[str]):
        self._mesh, self._hosts = mesh, hosts
        self._reported: dict[tuple[int, str], Straggler] = {}
        self._quiet: dict[tuple[int, str], int] = {}
        self._before: set[tuple[int, str]] = set()

    def alerts(self, found: Sequence[Straggler]) -> list[str]:
        """Lines about what is new in a window whose stragglers are `found`."""
        lines: list[str] = []
        now = {(straggler.rank, straggler.phase): straggler for straggler in found}
        for key, straggler in now.items():
            self._quiet[key] = 0
            if (straggler.clear or key in self._before) and self._is_new(straggler):
                self._reported[key] = straggler
                lines.append(f"straggler: {straggler.told(self._mesh, self._hosts)}")
        self._before = set(now)
        for key in [key for key in self._reported if key not in now]:
            self._quiet[key] += 1
            if self._quiet[key] == QUIET_WINDOWS:
                over = self._reported.pop(key)
                who = over.who(self._mesh, self._hosts)
                lines.append(f"straggler over: {who}: {over.what} is as fast as that of its peers")
        return lines

    def _is_new(self, straggler: Straggler) -> bool:
        before = self._reported.get((straggler.rank, straggler.phase))
        return before is None or not 1 / CHANGE < straggler.excess_s / before.excess_s < CHANGE
