"""The kinds of mistakes that a difference points to, and the sentence for each in a report.

A finding carries the kind, so that a program can ask for it; people read the sentence.
"""

from typing import Literal

Stage = Literal[
    "start",
    "samples",
    "forward",
    "loss",
    "gradient",
    "random",
    "buffer",
    "norm",
    "precision",
    "update",
    "state",
    "resume",
    "error",
]
"""The part of a run in which a difference was seen first."""

CAUSES: dict[str, str] = {
    "initial weights": (
        "initial weights that a rank draws from a state of its own, or a wrong shard"
    ),
    "order of data": "data that depend on the number of ranks, or on what was asked before",
    "same samples": "ranks that read the same samples",
    "labels": "labels that are shifted, or masked, after the sequence was cut",
    "updated weights": "an optimizer that steps before all micro-batches of a step are done",
    "stale activations": "a buffer that another micro-batch takes before its content was used",
    "message changed": "a message whose memory is freed, or written, before it has been sent",
    "sum is missing": "parts of a sum that nobody adds up over the ranks",
    "added on every rank": "what belongs to a sum once is added on every rank, as a bias",
    "norm over a shard": "a norm over a part of the channels or of the batch",
    "mask or positions": "a mask, or positions, of the wrong part of the sequence",
    "statistics of a rank": (
        "something that is computed over the samples of one rank, as batch statistics"
    ),
    "wrong sum": "a part of a sum that is missing, or that is added more than once",
    "uneven means": "means of parts with unequal counts, whose mean is not that of the whole",
    "loss of a shard": "a loss that is computed over a rank's columns, or counts what ranks share",
    "other targets": (
        "a loss that compares a micro-batch with the targets of another one, or leaves one out"
    ),
    "auxiliary loss": "an auxiliary loss that is scaled by the number of ranks or micro-batches",
    "scaled loss": "a sum where the mean belongs, or one divided twice",
    "not reached": "a parameter that no backward reaches on this rank",
    "gradient not summed": "a gradient that nobody sums",
    "gradient summed": "a gradient that is summed where the mean belongs",
    "gradient divided": "a gradient that is divided twice",
    "wrong backward": (
        "a hook, or a function of your own, whose backward is not that of its forward"
    ),
    "dropout alike": "dropout drawn alike for different samples",
    "dropout alike on shards": "dropout drawn alike for different parts",
    "dropout apart": "dropout drawn apart for what tensor ranks hold alike",
    "buffer": "a buffer that is not reduced over the ranks",
    "norm": "a norm over a part of the parameters, or with replicas counted twice",
    "update": "an optimizer or a clipping that computes over a part, as by a norm of its own",
    "weight decay": "weight decay of a parameter that has none, or twice of one that has",
    "learning rate": "a learning rate, or a schedule, that steps by ranks or micro-batches",
    "step after a resume": "a step counter that is not restored, or not saved",
    "data after a resume": "a loader that begins anew, or elsewhere, when a run is resumed",
    "random state after a resume": "a random state that is not restored, or on one rank alone",
    "state after a resume": "an optimizer state that is not restored, or is that of another shard",
    "weights after a resume": "weights that are not restored, or an update that needs more",
    "accumulation": "micro-batches that are not added up, or are divided by their number",
    "recompute": "a recomputed forward that draws anew, or computes otherwise",
    "compiled": "a compiled graph that computes otherwise, or leaves out a gradient",
    "precision": "numbers that the code rounds to fewer bits than the run asks for",
    "loaded elsewhere": "a save that another layout loads into the wrong shard, or not at all",
    "optimizer state": "a state that an optimizer computes over a shard as if it were whole",
}
"""Kind of a mistake -> the usual cause, as a report says it."""
