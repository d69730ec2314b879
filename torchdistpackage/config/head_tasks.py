"""The tasks of `data.name` that train a head on a transformers model instead of predicting the next
token, one row each. No torch.

The transformers class, the contents of a row of a file, the loss and the table of docs/heads.md
(scripts/docs) follow from a task's row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torchdistpackage.text import markdown_table

MOST_CLASSES_OF_A_TEXT = 62
"""Largest number of classes with data.multi_label: a label stores one bit for each class in one
signed integer.
"""
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
"""Suffixes of transformers' class names with a head for a sequence and for each token."""
SCORE, CLASSIFIER = "score", "classifier"
"""Names of the head's layer in transformers' classes; peft uses the same names."""


@dataclass(frozen=True, slots=True)
class HeadTask:
    """A task with a head.

    loss: "module:function" of its `HeadLoss` (train/head_losses.py). has_classes: a label is a
    class, otherwise a number. is_pairs: a sample is a chosen and a rejected answer with one score
    each. ending: suffix of the name of transformers' class; "" for the base class without a head.
    keys: keys of the data section that only this task reads. row, formula, metrics, peer: its row
    in docs/heads.md.
    """

    name: str
    loss: str
    has_classes: bool = False
    is_pairs: bool = False
    ending: str = SEQUENCE
    keys: tuple[str, ...] = ()
    row: str = ""
    formula: str = ""
    metrics: str = ""
    peer: str = ""

    @property
    def is_of_tokens(self) -> bool:
        """Return whether each token has its own label."""
        return self.ending == TOKEN

    @property
    def is_of_sequence(self) -> bool:
        """Return whether a whole text has one label."""
        return self.ending == SEQUENCE


_LOSSES = "torchdistpackage.train.head_losses"
_OF_CLASSES = ("labels", "class_weights")

HEAD_TASKS: Mapping[str, HeadTask] = {
    task.name: task
    for task in (
        HeadTask(
            "classification",
            f"{_LOSSES}:ClassLoss",
            has_classes=True,
            keys=(*_OF_CLASSES, "label_field", "multi_label"),
            row='`{"text": "...", "label": "spam"}`',
            formula="cross entropy; with `data.multi_label` the binary one of each class",
            metrics="`accuracy`, `f1`, `f1_macro`, `auc`",
            peer="`...ForSequenceClassification`",
        ),
        HeadTask(
            "regression",
            f"{_LOSSES}:SquaredLoss",
            keys=("label_field",),
            row='`{"text": "...", "label": 3.5}`',
            formula="squared error",
            metrics="`mse`, `mae`, `pearson`, `spearman`",
            peer="`...ForSequenceClassification`, `problem_type: regression`",
        ),
        HeadTask(
            "token_classification",
            f"{_LOSSES}:ClassLoss",
            has_classes=True,
            ending=TOKEN,
            keys=(*_OF_CLASSES, "label_field"),
            row='`{"text": ["Ada", "sings"], "label": ["PER", "O"]}`',
            formula="cross entropy of the first token of each word",
            metrics="`accuracy`, `f1`, `f1_macro`, each of words",
            peer="`...ForTokenClassification`",
        ),
        HeadTask(
            "reward",
            f"{_LOSSES}:RewardLoss",
            is_pairs=True,
            keys=("center_rewards",),
            row='`{"prompt": "...", "chosen": "...", "rejected": "...", "margin": 0.5}`',
            formula="`-log sigmoid(chosen - rejected - margin)`, Bradley-Terry",
            metrics="`accuracy`, `margin`, `mean_reward`",
            peer="trl's `RewardTrainer`",
        ),
    )
}


WITHOUT_HEAD = HeadTask("embedding", loss="", ending="")
"""Base class of an encoder, whose hidden states are compared."""


def page_rows() -> str:
    """Return the table of docs/heads.md."""
    rows = ((f"`{x.name}`", x.row, x.formula, x.metrics, x.peer) for x in HEAD_TASKS.values())
    return markdown_table(("`data.name`", "a line", "loss of a sample", "logged", "as"), rows)


@dataclass(frozen=True, slots=True)
class ModelHead:
    """The head of a run. labels: class names; () without classes."""

    task: HeadTask
    labels: tuple[str, ...] = ()
    multi_label: bool = False

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs: one for each class, two if classes are unknown, or one
        number.
        """
        return (len(self.labels) or 2) if self.task.has_classes else 1

    def settings(self) -> dict[str, Any]:
        """Return the settings of a config.json that say so."""
        if not self.task.ending:
            return {}
        names = self.labels if self.task.has_classes else ("LABEL_0",)
        kind = "multi_label_classification" if self.multi_label else "single_label_classification"
        return {
            "id2label": {str(i): name for i, name in enumerate(names)},
            "label2id": {name: i for i, name in enumerate(names)},
            "problem_type": kind if self.task.has_classes else "regression",
        }


def is_head(parameter: str) -> bool:
    """Return whether the parameter with this global name belongs to the head's layer."""
    return parameter.startswith((f"{SCORE}.", f"{CLASSIFIER}."))


def has_head(settings: Mapping[str, Any]) -> str:
    """Return the class in a config.json if it has a head for sequences or tokens, else ""."""
    listed = settings.get("architectures")
    names = [str(x) for x in cast(list[object], listed)] if isinstance(listed, list) else []
    return next((x for x in names if x.endswith((SEQUENCE, TOKEN))), "")


def labels_in(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names in a config.json with a head, or () without one."""
    if not has_head(settings):
        return ()
    named = settings.get("id2label")
    if isinstance(named, Mapping):
        by_id = cast(Mapping[str, object], named)
        return tuple(str(by_id[key]) for key in sorted(by_id, key=lambda x: (len(x), x)))
    number = settings.get("num_labels", 2)  # transformers leaves out what is its default
    return tuple(f"LABEL_{i}" for i in range(number if isinstance(number, int) else 2))
