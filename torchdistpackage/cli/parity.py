"""`tdp parity`: compare the layouts of a run with one process, module by module."""

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

    CONFIG is the file of a run or the folder of a transformers model. For a folder, data, pipe and
    tensor have two ranks each unless degrees are given.

    The command makes the model and the batch small, with the same classes, and trains three steps
    in float64: with each axis of the run alone, then with two axes, then with all. It compares
    activations, gradients, the loss, the gradient norm and the weights. If all agree, it prints one
    line and exits with 0. Otherwise it names the first module and axis that differ, by how much and
    the usual cause, and exits with 1.
    """
    with tempfile.TemporaryDirectory(prefix="tdp-parity-") as scratch:
        if is_model(config):
            plan, notes = model_plan(config, overrides or [], Path(scratch))
            for note in notes:
                typer.echo(wrap_on_terminal(note), err=True)
        else:
            run = load(config, list(overrides or []))
            make_plan(run, local_procs(run), config)
            run = with_template_date(run)
            refuse_here(run, config, code_folder(os.environ))
            if run.model.hf is not None:
                run = with_small_copy(run, Path(scratch))
            plan = make_plan(run, local_procs(run), config)
        parity_run(plan)  # refuses what cannot be compared before torch is loaded
        report = resolve(COMPARE)(plan, lambda line: typer.echo(wrap_on_terminal(line), err=True))
    typer.echo(wrap_on_terminal(str(report)))
    raise typer.Exit(0 if report.is_right else 1)
