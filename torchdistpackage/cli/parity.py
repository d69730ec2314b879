"""`tdp parity`: the layouts of a run against one process, module by module."""

import os
import tempfile
from pathlib import Path

import typer

from torchdistpackage.cli._common import Config, Overrides, wrap_on_terminal
from torchdistpackage.config.load import load
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.parity_model import is_model, model_plan, with_small_copy
from torchdistpackage.plan.parity_plan import parity_run
from torchdistpackage.plan.refusals import refuse_here
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.plan.user_code import code_folder

COMPARE = "torchdistpackage.train.parity:compare_plan"


def parity(config: Config, overrides: Overrides = None) -> None:
    """Compare the layouts of a run with one process, module by module.

    CONFIG is the file of a run, or a folder of transformers: then two ranks along data, pipe and
    tensor, or the degrees that are given.

    The model and the batch are made small, with the same classes, and trained for three steps in
    float64: each axis of the run alone, then pairs, then all. Activations, gradients, the loss, the
    gradient norm and the weights are compared. A right run prints one line and exits with 0; else
    the first module and axis that differ are named, by how much, with the usual cause, and the exit
    code is 1.
    """
    with tempfile.TemporaryDirectory(prefix="tdp-parity-") as scratch:
        if is_model(config):
            plan, notes = model_plan(config, overrides or [], Path(scratch))
            for note in notes:
                typer.echo(wrap_on_terminal(note), err=True)
        else:
            found = load(config, list(overrides or []))
            make_plan(found, local_procs(found), config)
            found = with_template_date(found)
            refuse_here(found, config, code_folder(os.environ))
            if found.model.hf is not None:
                found = with_small_copy(found, Path(scratch))
            plan = make_plan(found, local_procs(found), config)
        parity_run(plan)  # says what cannot be compared before torch is loaded
        report = resolve(COMPARE)(plan, lambda line: typer.echo(wrap_on_terminal(line), err=True))
    typer.echo(wrap_on_terminal(str(report)))
    raise typer.Exit(0 if report.is_right else 1)
