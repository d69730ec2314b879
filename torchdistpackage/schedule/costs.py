"""How long the actions of a schedule take, stage by stage.

Any unit will do; only ratios change an order. Costs come from a guess, a file or a measured run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One number a stage in each tuple.

    forward: an F. backward: a B. input, weight: an I and a W, which together may cost more than
    the B that they replace. message: to bring the stage's output to the next, or a
    gradient back from there, when the two are on different ranks.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    message: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = {
            name: len(getattr(self, name))
            for name in ("forward", "backward", "input", "weight", "message")
        }
        if len(set(lengths.values())) != 1 or not self.forward:
            raise ScheduleError(f"costs need one number a stage in each row, not {lengths}")
        lowest = min(min(getattr(self, name)) for name in lengths)
        if lowest < 0:
            raise ScheduleError(f"a cost is {lowest:g}; use numbers of zero or more")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        input: float = 1.0,
        weight: float = 1.0,
        message: float = 0.0,
        backward: float | None = None,
    ) -> Self:
        """All stages alike; backward defaults to input + weight."""
        whole = input + weight if backward is None else backward
        return cls(*((x,) * num_stages for x in (forward, whole, input, weight, message)))

    @classmethod
    def of(cls, costs: "Costs", num_stages: int) -> "StageCosts":
        """`costs` stage by stage.

        Of kinds, I and W default to halves of B, B to their sum, a message is the dearest named.

        Raises:
            ScheduleError: they are of another number of stages.
        """
        if isinstance(costs, StageCosts):
            if len(costs.forward) != num_stages:
                raise ScheduleError(
                    f"costs of {len(costs.forward)} stages cannot time a schedule of {num_stages}"
                )
            return costs
        whole = costs.get(ActionKind.B, costs.get(ActionKind.I, 0.0) + costs.get(ActionKind.W, 0.0))
        messages = [cost for kind, cost in costs.items() if kind.is_message]
        return StageCosts.uniform(
            num_stages,
            costs.get(ActionKind.F, 0.0),
            costs.get(ActionKind.I, whole / 2),
            costs.get(ActionKind.W, whole / 2),
            max(messages, default=0.0),
            whole,
        )

    def of_action(self, action: Action) -> float:
        """Of a computation; for messages see `over_link`."""
        match action.kind:
            case ActionKind.F:
                return self.forward[action.stage]
            case ActionKind.B:
                return self.backward[action.stage]
            case ActionKind.I:
                return self.input[action.stage]
            case _:
                return self.weight[action.stage]

    def over_link(self, stage: int, other: int) -> float:
        """Of a message between two neighbouring stages, either way."""
        return self.message[min(stage, other)]


Costs = Mapping[ActionKind, float] | StageCosts
"""By kind, the same for all stages (kinds left out cost nothing), or stage by stage."""
