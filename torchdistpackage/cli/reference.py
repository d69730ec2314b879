"""`tdp reference`: write log-probabilities of the reference of pairs, or a teacher, to a file."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli import _inference as inference
from torchdistpackage.cli._blend import WITH_STEPS
from torchdistpackage.cli._common import PROCS, Config, ListedIn, Overrides, World, refusal
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import DataError
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.logits_file import LogitsSize, logits_identity, size_of
from torchdistpackage.plan.refusals import refuse_here
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.plan.teacher import teacher_config
from torchdistpackage.plan.user_code import code_folder
from torchdistpackage.train.inference_request import LogitsRequest, ReferenceRequest, Request

_COMMAND = "tdp reference"
_TOP_K = 64


def reference(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="File to write.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help=f"Tokens that are kept of a teacher's distribution; default {_TOP_K}.",
        ),
    ] = None,
    procs: World = None,
) -> None:
    """Write the log-probabilities of a reference or a teacher to a file.

    Runs on pairs that name the file in train.dpo.reference hold no reference model and skip its
    forwards. The file serves any layout, batch size and loss of the same data and reference.

    Of a run with train.distill.teacher the file has the teacher's K most likely tokens at every
    position. Runs that name it in train.distill.logits hold no teacher. The file serves any layout
    of the same data, seed and global batch.
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
        run = _without_file(load(config, changes, None if is_alone else rendezvous.world_size))
        problems += _problems(config, run, top_k)
    if problems or run is None or out is None:
        raise refusal(_COMMAND, problems)
    run = with_template_date(run)
    if is_alone:
        make_plan(run, local_procs(run), config)
        refuse_here(run, config, code_folder(os.environ))
    request: Request = ReferenceRequest(str(out))
    key, config_path = "train.dpo.reference", run
    if run.train.distill.is_on:
        size = _size(run, out, top_k or _TOP_K)
        if rendezvous.rank == 0:
            samples, tokens, k = size.shape
            gb = f"{size.num_bytes / 1e9:,.3g} GB"
            typer.echo(f"{out} takes {gb}: {samples:,} samples of {tokens:,} tokens, {k} of each")
        request = LogitsRequest(str(out), logits_identity(run), size)
        key, config_path = "train.distill.logits", teacher_config(run)
    source = inference.ModelSource(Path(config), run, is_run=False)
    numbers: dict[str, int] = inference.on_ranks(source, config_path, request)
    if rendezvous.rank == 0:
        rows = "samples" if run.train.distill.is_on else "rows"
        counts = ", ".join(f"{number:,} {rows} of {name}" for name, number in numbers.items())
        typer.echo(f"wrote {out}: log-probabilities of {counts}")
        typer.echo(f"next: tdp train {config} {key}={out}")


def _without_file(run: RunConfig) -> RunConfig:
    """Return the run with its reference or teacher itself, in place of a file."""
    dpo = run.train.dpo.model_copy(update={"reference": None})
    distill = run.train.distill.model_copy(update={"logits": None})
    train = run.train.model_copy(update={"dpo": dpo, "distill": distill})
    return run.model_copy(update={"train": train})


def _problems(config: str, run: RunConfig, top_k: int | None) -> list[str]:
    """Return why the file of this run cannot be written."""
    if (options := run.train.distill).is_on:
        problems: list[str] = []
        if options.beta > 0:
            problems.append(
                f"{config}: train.distill.beta={options.beta:g} needs the teacher's probabilities "
                f"of all tokens, which no file has; set it to 0, or train beside the teacher"
            )
        if (top_k or _TOP_K) > run.model.vocab:
            problems.append(
                f"--top-k {top_k or _TOP_K} is more than the vocabulary of {run.model.vocab}; "
                f"lower it"
            )
        return problems
    problems = []
    if top_k is not None:
        problems.append(f"--top-k {top_k}: {config} has no train.distill.teacher; remove it")
    if not run.has_reference:
        has = f"data.name={run.data.name} and train.dpo.loss={run.train.dpo.loss}"
        problems.append(
            f"{config} has no reference model ({has}); name a file whose loss needs one, or set "
            "train.distill.teacher"
        )
    if run.data.is_unpaired or run.data.sources:
        problems.append(
            f"{config}: only pairs of one file or folder (data.path) have rows that do not depend "
            "on the step; set data.path, without data.sources"
        )
    return problems


def _size(run: RunConfig, out: Path, top_k: int) -> LogitsSize:
    """Return the size of the file.

    Raises:
        ConfigErrors: the data cannot be read, or the disk has less room.
    """
    try:
        with_steps: RunConfig = resolve(WITH_STEPS)(run)
    except DataError as error:
        raise refusal(_COMMAND, [f"data: {error}"]) from error
    size = size_of(with_steps, top_k)
    free = shutil.disk_usage(out.absolute().parent).free
    if size.num_bytes > free:
        text = (
            f"-o {out} takes {size.num_bytes / 1e9:,.3g} GB, but its disk has {free / 1e9:,.3g} GB "
            f"free; lower --top-k ({top_k}) or train.steps ({with_steps.train.steps:,})"
        )
        raise refusal(_COMMAND, [text])
    return size
