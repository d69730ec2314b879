"""`tdp reference`: write the log-probabilities of the reference of preference pairs to a file."""

import os
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli import _inference as inference
from torchdistpackage.cli._common import PROCS, Config, ListedIn, Overrides, World, refusal
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.plan.refusals import refuse_here
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.plan.user_code import code_folder
from torchdistpackage.train.inference_request import ReferenceRequest

_COMMAND = "tdp reference"


def reference(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="File to write.")
    ] = None,
    procs: World = None,
) -> None:
    """Write the log-probabilities of the reference of preference pairs to a file.

    Runs that name the file in train.dpo.reference hold no reference model and skip its forwards.
    The file serves any layout, batch size and loss of the same data and reference.
    """
    problems: list[str] = []
    if out is None:
        problems.append("there is no file to write; give -o FILE, such as reference.safetensors")
    elif not out.absolute().parent.is_dir():
        problems.append(f"-o {out}: there is no folder {out.absolute().parent}; make it first")
    changes = [*(overrides or ()), *([] if procs is None else [f"{PROCS}={procs}"])]
    rendezvous = detect(os.environ)
    is_alone = rendezvous.source == "alone"
    run: RunConfig | None = None
    with ListedIn(problems):
        run = load(config, changes, None if is_alone else rendezvous.world_size)
        dpo = run.train.dpo.model_copy(update={"reference": None})
        run = run.model_copy(update={"train": run.train.model_copy(update={"dpo": dpo})})
        if not run.has_reference:
            what = f"data.name={run.data.name} and train.dpo.loss={run.train.dpo.loss}"
            problems.append(f"{config} has no reference: {what}; name one with pairs and a loss")
        if run.data.is_unpaired or run.data.sources:
            problems.append(
                f"{config}: only pairs of one file or folder (data.path) have rows that do not "
                f"depend on the step"
            )
    if problems or run is None or out is None:
        raise refusal(_COMMAND, problems)
    run = with_template_date(run)
    if is_alone:
        make_plan(run, local_procs(run), config)
        refuse_here(run, config, code_folder(os.environ))
    source = inference.ModelSource(Path(config), run, is_run=False)
    numbers: dict[str, int] = inference.on_ranks(source, run, ReferenceRequest(str(out)))
    if rendezvous.rank == 0:
        counts = ", ".join(f"{number:,} rows of {name}" for name, number in numbers.items())
        typer.echo(f"wrote {out}: log-probabilities of {counts}")
        typer.echo(f"next: tdp train {config} train.dpo.reference={out}")
