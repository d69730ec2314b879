"""The keys of metrics.jsonl, one row each. No torch.

A value comes from one of four places. `read` takes it from the numbers of a step, which are equal
on all ranks. `ask` measures it on each rank, and the step's one all-reduce adds up the answers, so
it costs no message and `tdp plan` counts its bytes. `StepLog.write` (train/log.py) adds step,
tokens and flops_per_s. The loop or a callback notes all others (`loop.log.note`). From a row follow
the key, its text on the log line, and the table of docs/logging.md (scripts/docs).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchdistpackage.text import markdown_table


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """One key of a row of metrics.jsonl.

    name: the key. One that ends in `...` stands for several, of which `read` returns a mapping.
    unit, meaning: its row of docs/logging.md.
    always: each step has the key, with null where there is no value; else it is left out then.
    read: the value from a `StepResult`.
    ask: this rank's number of a step, from the `Loop` and the step.
    reduce: how the ranks' numbers become the value.
    line: its text on the log line, from a `StepResult`, whose `measured` has what was asked; ""
        shows nothing. Keep the line within 80 columns.
    """

    name: str
    unit: str
    meaning: str
    always: bool = False
    read: Callable[[Any], Any] | None = None
    ask: Callable[[Any, int], float] | None = None
    reduce: Literal["sum", "mean"] = "sum"
    line: Callable[[Any], str] | None = None


def _imbalances(result: Any) -> Mapping[str, float]:
    return {name: load.imbalance for name, load in result.experts.items()}


def _dropped_shares(result: Any) -> Mapping[str, float]:
    loads = result.experts
    if not any(load.dropped for load in loads.values()):
        return {}
    return {name: load.dropped_share for name, load in loads.items()}


def _experts_text(result: Any) -> str:
    worst = result.expert_imbalance
    return "" if worst is None else f"experts {worst:.1f}x"


VALUES = (
    LoggedValue("step", "", "number of the step, from 1", always=True),
    LoggedValue(
        "experts",
        "numbers",
        "with experts: by layer the busiest expert's choices over the mean",
        read=_imbalances,
        line=_experts_text,
    ),
    LoggedValue(
        "experts_dropped",
        "numbers",
        "with `capacity_factor`: by layer the share of choices that found no place, in steps that "
        "have such",
        read=_dropped_shares,
    ),
    LoggedValue(
        "rewards/...",
        "",
        "with [preference pairs](preference.md), as `logps/...`: means over the pairs of the step, "
        "by trl's names; after a validation `eval_rewards/...`. With a [head](heads.md) "
        "`accuracy` and others, and `eval_accuracy`",
        read=lambda result: result.task,
    ),
    LoggedValue(
        "accuracy",
        "share, 0 to 1",
        "with [texts to compare](embedding.md): of anchors nearest to their own positive; after a "
        "validation also `eval_recall@1`, `eval_ndcg@10` and more",
    ),
    LoggedValue(
        "kd_loss",
        "nats per token",
        "with a [teacher](distill.md): mean divergence from it, and as `ce_loss` the cross entropy "
        "beside it",
    ),
    LoggedValue(
        "loss",
        "nats per token",
        "mean over the tokens of the global batch; a loss of your own has its own unit, and that "
        "of pairs is a mean over these",
        always=True,
        read=lambda result: result.loss,
    ),
    LoggedValue(
        "grad_norm",
        "nats per token",
        "2-norm of the gradient over all parameters, before clipping",
        always=True,
        read=lambda result: result.grad_norm,
    ),
    LoggedValue("lr", "", "learning rate of the step", always=True, read=lambda result: result.lr),
    LoggedValue(
        "time_s",
        "s",
        "duration of the step; on a GPU measured on its stream",
        always=True,
        read=lambda result: result.time_s,
    ),
    LoggedValue(
        "tokens_per_s",
        "tokens/s",
        "tokens of the step, over all ranks, divided by `time_s`; with a loss or data of your own "
        "the terms that the loss counts, which the log calls samples if they are no more than "
        "`data.global_batch`; with preference pairs these, here and in `tokens`",
        always=True,
        read=lambda result: result.tokens_per_s,
    ),
    LoggedValue(
        "bubble",
        "share, 0 to 1",
        "part of the step in which ranks computed nothing, averaged over all ranks; `null` where "
        "it was not measured",
        always=True,
        read=lambda result: result.bubble,
    ),
    LoggedValue("tokens", "tokens", "seen since the first step of the run", always=True),
    LoggedValue(
        "flops_per_s",
        "FLOP/s",
        "model FLOPs of the step over all ranks, without recomputation, divided by `time_s`; "
        "`null` for a model of your own",
        always=True,
    ),
    LoggedValue("val_loss", "nats per token", "after a validation: its loss"),
    LoggedValue(
        "eval_loss", "nats per token", "after a validation, with `data.eval`: of each set by name"
    ),
    LoggedValue(
        "best_step",
        "",
        "after a validation, with `train.early_stop`: step of the best value so far",
    ),
    LoggedValue("perplexity", "", "with it: of the validation (`val`) and of each set"),
    LoggedValue(
        "unigram",
        "nats per token",
        "after a validation on bytes without `model.loss`: loss of a table of single bytes on the "
        "same data, to compare with",
    ),
    LoggedValue("bigram", "nats per token", "the same of a table of byte pairs"),
    LoggedValue(
        "predicted_s",
        "s",
        "in the first row of a start, where it is known: [predicted](predicted_steps.md) duration "
        "of a step",
    ),
    LoggedValue("sources", "shares", "with `data.sources`: of the step's samples, by source"),
    LoggedValue("epochs", "passes", "with `data.sources`: over the data of each source so far"),
    LoggedValue(
        "skipped",
        "steps",
        "left out so far because of a NaN or infinite value; only once there was one "
        "([precision](precision.md))",
    ),
    LoggedValue(
        "pipeline", "text", "with a pipeline, every `log.every` steps: causes of the bubble"
    ),
    LoggedValue(
        "dead_experts",
        "text",
        "experts that no token chose in the last 10 x `log.every` steps, if there are any",
    ),
    LoggedValue(
        "stragglers",
        "text",
        "slow ranks, in the steps that report one ([stragglers](stragglers.md))",
    ),
)
"""All logged values, in the order of a row; values that callbacks note follow them."""

ASKED = {value.name: value.ask for value in VALUES if value.ask is not None}
"""Functions that return this rank's number, by name of the value."""


def logged(result: Any) -> dict[str, Any]:
    """Return the part of a row that comes from a `StepResult`."""
    row: dict[str, Any] = {}
    for value in VALUES:
        if value.name in result.measured:
            row[value.name] = result.measured[value.name]
        elif value.read is not None:
            content = value.read(result)
            if value.name.endswith("..."):
                row |= content
            elif value.always or (content is not None and content != {}):
                row[value.name] = content
    return row


def reduced(votes: Mapping[str, float], num_ranks: int) -> dict[str, float]:
    """Return the requested values from the sums of the ranks' votes."""
    return {
        value.name: votes[value.name] / (num_ranks if value.reduce == "mean" else 1)
        for value in VALUES
        if value.ask is not None and value.name in votes
    }


def line_texts(result: Any) -> list[str]:
    """Return the texts of the log line, in the order of the rows."""
    texts = [value.line(result) for value in VALUES if value.line is not None]
    return [text for text in texts if text]


def page_rows() -> str:
    """Return the table of docs/logging.md: first what each step has."""
    ordered = sorted(VALUES, key=lambda value: not value.always)
    rows = ((f"`{x.name}`", x.unit, x.meaning) for x in ordered)
    return markdown_table(("key", "unit", "value"), rows)
