"""Decisions on which all ranks agree in a step, such as to save or to stop. No torch.

An owner registers a name and a function on every rank. Each step asks the functions as late as it
can, its one all-reduce sums their answers with the loss, and the sums come back by name with the
numbers of the step. So agreeing costs no message of its own.
"""

from collections.abc import Callable

from torchdistpackage.plan.run_plan import VOTE_ROOM


class Votes:
    """The votes of one rank. All ranks register the same names in the same order."""

    def __init__(self) -> None:
        self._ask: dict[str, Callable[[int], float]] = {}
        self.names: tuple[str, ...] = ()

    def register(self, name: str, ask: Callable[[int], float]) -> None:
        """Let every step from the next one on carry `ask(step)`, a number or a bool.

        ask: called once a step, before its all-reduce. A name that is known gets a new function.
        """
        self._ask[name] = ask
        self.names = tuple(self._ask)

    def cast(self, step: int) -> list[float]:
        """Return this rank's answers for `step`, and zeros up to the room that is kept."""
        answers = [float(ask(step)) for ask in self._ask.values()]
        return answers + [0.0] * (VOTE_ROOM - len(answers))
