"""The methods that keep experts equally busy, one row each. No torch.

The values of `balance` and of the key, the router's loss, its state with layout, initial value and
update, the checks against one process, and the table of docs/expert_parallel.md (scripts/docs)
follow from a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torchdistpackage.text import markdown_table


@dataclass(frozen=True, slots=True)
class BalanceSpec:
    """One balance of experts.

    loss: "module:function" of the loss without its coefficient, 1 if balanced, as
        `balance_of_sequences` of parallel/expert/balance.py; "" adds none.
    by_hand: the same loss in one process, of all sequences, as tests compare it; "module:function"
        as `loss_of_sequences` of parallel/expert/reference.py.
    state: name of a parameter of the router with a number for each expert; it gets no gradient, is
        in checkpoints and starts at zero. "" has none.
    move: "module:function" of the state after a step, as `moved_bias` beside that loss.
    shifts_scores: the state is added to the scores for the choice of experts alone.
    does: its words in the text of model.moe.balance.
    what, over: its row of docs/expert_parallel.md.
    """

    name: str
    loss: str = ""
    by_hand: str = ""
    state: str = ""
    move: str = ""
    shifts_scores: bool = False
    does: str = ""
    what: str = ""
    over: str = ""

    def __post_init__(self) -> None:
        if bool(self.state) != bool(self.move) or (self.shifts_scores and not self.state):
            raise ValueError(f"{self.name}: state needs move, and shifts_scores needs both")
        if bool(self.loss) != bool(self.by_hand):
            raise ValueError(f"{self.name}: loss and by_hand go together")


_LOSSES = "torchdistpackage.parallel.expert.balance"
_BY_HAND = "torchdistpackage.parallel.expert.reference"

BALANCES: Mapping[str, BalanceSpec] = {
    spec.name: spec
    for spec in (
        BalanceSpec(
            "aux_loss",
            loss=f"{_LOSSES}:balance_of_sequences",
            by_hand=f"{_BY_HAND}:loss_of_sequences",
            does="adds a loss for each sequence",
            what="Switch's loss: experts x sum of (share of choices x mean score); 1 when balanced",
            over="each sequence",
        ),
        BalanceSpec(
            "global_aux_loss",
            loss=f"{_LOSSES}:balance_of_batch",
            by_hand=f"{_BY_HAND}:loss_of_batch",
            state="last_load",
            move=f"{_LOSSES}:counted_load",
            does="one for the global batch",
            what="the same",
            over="the global batch: by one all-reduce in each forward, or with `step_counts=True`, "
            "as in `tdp train`, the counts of the last step",
        ),
        BalanceSpec(
            "bias",
            state="expert_bias",
            move=f"{_LOSSES}:moved_bias",
            shifts_scores=True,
            does="adds no loss and shifts the scores of idle experts",
            what="no loss: a bias on each score, used only for the choice, moves by `bias_rate` in "
            "each step towards idle experts (arXiv:2408.15664)",
            over="the global batch of a step",
        ),
        BalanceSpec("none", does="does nothing"),
    )
}

WITH_LOSS = tuple(name for name, spec in BALANCES.items() if spec.loss)
"""Balances that add a loss."""


def page_rows() -> str:
    """Return the table of docs/expert_parallel.md."""
    rows = ((f"`{x.name}`", x.what, x.over) for x in BALANCES.values())
    return markdown_table(("`balance`", "what", "counted over"), rows)
