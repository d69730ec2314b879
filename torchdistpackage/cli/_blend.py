"""The lines of `tdp plan` about epochs and about several data sources."""

from collections.abc import Sequence

from torchdistpackage.config.check import absent_files, bytes_there
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.template_date import with_template_date
from torchdistpackage.errors import ConfigError, DataError
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.text import text_table

ALL_TOKENIZED = "torchdistpackage.data.tokens.texts:all_tokenized"
WITH_STEPS = "torchdistpackage.train.data_build:with_steps"
"""Import path of a function for runs with train.epochs, loaded late because it needs numpy and
torch."""


def with_known_steps(run: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return the run with train.steps computed from train.epochs, and a line about it.

    Steps are known only once the texts are tokenized; until then the run is returned as it is.

    Raises:
        ConfigError: the data cannot be read.
    """
    if run.train.epochs is None:
        return run, []
    run = with_template_date(run)
    passes = f"{run.train.epochs:g} passes over the data"
    if absent_files(run) or not resolve(ALL_TOKENIZED)(run):
        # texts that are here are tokenized by both
        text = "samples and steps are known after tdp data tokenize or tdp train has read the texts"
        return run, [f"{passes}: {text}"]
    try:
        with_steps: RunConfig = resolve(WITH_STEPS)(run)
    except DataError as error:
        raise ConfigError(f"data: {error}") from error
    steps = with_steps.train.steps
    number = f"{steps * run.data.global_batch:,} samples in {steps:,} steps"
    return with_steps, [f"{passes}: {number} of {run.data.global_batch:,}"]


def sources_text(plan: Plan) -> list[str]:
    """Return a table of the sources: the samples that the run reads of each, and file sizes."""
    blend, config = plan.config.data.blend, plan.config
    if not blend:
        return []
    train, total = config.train, sum(x.weight for x in blend)
    number = train.steps * config.data.global_batch
    rows: list[Sequence[object]] = [("source", "samples", "part", "holds", "MB", "path")]
    for label, weight, section in blend:
        part, size_bytes = weight / total, bytes_there(section)
        size = "" if size_bytes is None else f"{size_bytes / 1e6:,.1f}"
        row = (
            label,
            f"{round(part * number):,}" if train.epochs is None else "",
            f"{part:.1%}",
            section.name,
            size,
            section.path,
        )
        rows.append(row)
    table = text_table(rows, num_left=1, last_left=True)
    if train.epochs is not None:
        return [f"{train.epochs:g} passes over {len(blend)} sources\n{table}"]
    return [f"{number:,} samples in {train.steps:,} steps, of {len(blend)} sources\n{table}"]
