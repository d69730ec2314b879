"""Decisions on which all ranks agree in a step, such as saving or stopping. No torch.

An owner registers a name and a function on every rank. Each step calls the functions as late as it
can, its one all-reduce sums their answers with the loss, and the sums come back by name with the
numbers of the step. So an agreement needs no message of its own.
"""

from collections.abc import Callable

from torchdistpackage.plan.run_plan import VOTE_ROOM


class Votes:
    """The votes of one rank. All ranks register the same names in the same order."""

    def __init__(self) -> None:
        self._ask: dict[str, Callable[[int], float]] = {}
        self.names: tuple[str, ...] = ()

    def register(self, name: str, ask: Callable[[int], float]) -> None:
        """Make every step from the next one on carry `ask(step)`, a number or a bool.

        ask: called once per step, before its all-reduce. A known name gets a new function.
        """
        self._ask[name] = ask
        self.names = tuple(self._ask)

    def cast(self, step: int) -> list[float]:
        """Return this rank's answers for `step`, padded with zeros to the reserved length."""
        answers = [float(ask(step)) for ask in self._ask.values()]
        return answers + [0.0] * (VOTE_ROOM - len(answers))
