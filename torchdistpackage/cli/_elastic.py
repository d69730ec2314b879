"""The table of `tdp plan --nodes`: the degrees of a run on several numbers of nodes."""

import re
from collections.abc import Sequence

import typer

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.launch.slurm.job import job_shape
from torchdistpackage.plan.elastic import elastic_plan
from torchdistpackage.text import text_table

AXES = ("pipe", "data", "context", "expert", "tensor")
"""Axes, each a column of degrees."""


def node_span(nodes: str) -> range:
    """Return the numbers of nodes that `A..B` names."""
    span = re.fullmatch(r"([1-9]\d{0,4})\.\.([1-9]\d{0,4})", nodes)
    if span is None or int(span[1]) > int(span[2]):
        raise typer.BadParameter(
            f"{nodes} is not a range; write the fewest and the most nodes, such as 1..4",
            param_hint="--nodes",
        )
    return range(int(span[1]), int(span[2]) + 1)


def elastic_table(source: str, run: RunConfig, nodes: str, ranks_per_node: int | None) -> str:
    """Return for each number of nodes the degrees that a run would have, or why it cannot run."""
    span = node_span(nodes)
    per_node = ranks_per_node
    if per_node is None:
        shape = job_shape(run) if run.launch.slurm else None
        if shape is None:
            raise typer.BadParameter(
                "the file has no launch.slurm; add --ranks-per-node K", param_hint="--nodes"
            )
        per_node = shape.tasks_per_node
    rows: list[Sequence[object]] = [
        ("NODES", "RANKS", *AXES, "ACCUMULATE", "MICROBATCH", "BUBBLE", "")
    ]
    for number in span:
        world = number * per_node
        try:
            fitted = elastic_plan(run, world, source)
        except ConfigError as error:
            why = getattr(error, "problems", None)
            rows.append((number, world, *[""] * 8, str(why[0].text if why else error)))
            continue
        sizes = [getattr(fitted.config.parallel, axis) for axis in AXES]
        rounds, samples = fitted.rounds, fitted.samples_per_microbatch
        rows.append((number, world, *sizes, rounds, samples, f"{fitted.timeline.bubble:.1%}", ""))
    more = ""
    if run.launch.elastic.nodes is not None:
        more = (
            "; where a row has no degrees, the job uses the next smaller number of nodes that has "
            "some"
        )
    head = f"{run.run.name}: the same batch, samples and learning rates on {nodes} nodes{more}"
    return f"{head}\n{text_table(rows, last_left=True)}"
