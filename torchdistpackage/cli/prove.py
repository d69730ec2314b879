"""`tdp prove`: compare the layouts of a run with one process, module by module."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import Config, Overrides, wrap_on_terminal
from torchdistpackage.config.load import load
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import atomic_write, make_folder
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.certificate import certificate, certificate_path
from torchdistpackage.plan.parity_model import is_model, model_plan, with_small_copy
from torchdistpackage.plan.parity_plan import parity_run
from torchdistpackage.plan.parity_program import failing_program
from torchdistpackage.plan.refusals import refuse_here
from torchdistpackage.plan.run_plan import local_procs, make_plan, own_model_warnings
from torchdistpackage.plan.user_code import code_folder

COMPARE = "torchdistpackage.train.parity:compare_plan"

Layouts = Annotated[
    str,
    typer.Option(
        metavar="all|this|LIST",
        help="Layouts to compare: each axis alone, pairs and all; that of the run; or a list as "
        "'data=2,tensor=2;pipe=4'.",
    ),
]


def prove(config: Config, overrides: Overrides = None, *, layouts: Layouts = "all") -> None:
    """Show that a run's layouts compute what one process does.

    CONFIG is the file of a run or the folder of a transformers model. For a folder, data, pipe and
    tensor have two ranks each unless degrees are given.

    The command makes the model and the batch small, with the same classes, and trains a few steps
    in float64: in one process, and on the layouts. It compares activations, gradients, the loss,
    the gradient norm, updates, weights, optimizer states, samples and random states, also after two
    stops and resumes and after a change of layout. If all agree, it prints one line, writes a
    certificate and exits with 0. Otherwise it names the first module and axis that differ, by how
    much and the usual cause, writes a program that shows it, and exits with 1.
    """
    is_folder = is_model(config)
    if not is_folder and Path(config).is_dir():
        raise ConfigError(
            f"{config} has no config.json, so it is not a folder of a transformers model; name "
            "one, or the YAML file of a run"
        )
    with tempfile.TemporaryDirectory(prefix="tdp-prove-") as scratch:
        if is_folder:
            plan, notes = model_plan(config, overrides or [], Path(scratch))
            run = plan.config
            for note in notes:
                _say(note)
        else:
            run = load(config, list(overrides or []))
            for text in own_model_warnings(make_plan(run, local_procs(run), config)):
                _say(f"warning: {text}")
            refuse_here(run, config, code_folder(os.environ))
            small = with_template_date(run)
            if run.model.hf is not None:
                small = with_small_copy(small, Path(scratch))
            plan = make_plan(small, local_procs(small), config)
        parity_run(plan, layouts)  # refuses what cannot be compared before torch is loaded
        report = resolve(COMPARE)(plan, _say, layouts=layouts)
        path = certificate_path(run)
        if not report.is_right:
            path = path.with_suffix(".py")
            make_folder(path.parent)
            atomic_write(path, failing_program(report))
    typer.echo(wrap_on_terminal(str(report)))
    if report.is_right and not is_folder:
        certificate(run, [axes for axes, _ in report.findings]).write(path)
        _say(f"certificate: {path}")
    if not report.is_right:
        _say(f"a program that shows the first difference: python {path}")
    raise typer.Exit(0 if report.is_right else 1)


def _say(line: str) -> None:
    typer.echo(wrap_on_terminal(line), err=True)
