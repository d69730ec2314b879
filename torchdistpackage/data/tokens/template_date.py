"""The date that chat templates write as today's: one for a run. No torch.

It is the date of the run's first start. resolved.yaml keeps it, so that a resume a day later trains
on the same ids.
"""

from datetime import date
from pathlib import Path

from torchdistpackage.config.chat_templates import folder_writes_date
from torchdistpackage.config.load import load
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError
from torchdistpackage.run_files import RESOLVED


def today() -> str:
    """Return today's date in the format of data.template_date."""
    return date.today().isoformat()


def with_template_date(config: RunConfig, resume: str = "auto") -> RunConfig:
    """Return the run with data.template_date, if its chat templates write a date.

    The first of these that has a date gives it: the configuration, the run's earlier start, the run
    whose checkpoint `resume` names, today.
    """
    if not needs_date(config):
        return config
    runs = [] if resume == "never" else [config.run.folder]
    if resume not in ("auto", "never"):
        runs.append(Path(resume).parent.parent)
    dates = (recorded for run in runs if (recorded := _recorded(run)) is not None)
    return dated(config, next(dates, today()))


def needs_date(config: RunConfig) -> bool:
    """Return whether chat templates of the run write a date that its configuration leaves open."""
    data = config.data
    open_ = data.template_date is None and data.tokenizer is not None
    return open_ and folder_writes_date(data.tokenizer or "")


def dated(config: RunConfig, day: str) -> RunConfig:
    """Return the run with this date."""
    data = config.data.model_copy(update={"template_date": day})
    return config.model_copy(update={"data": data})


def _recorded(run: Path) -> str | None:
    file = run / RESOLVED
    try:
        return load(file, ["model.weights=null"]).data.template_date if file.is_file() else None
    except (ConfigError, OSError):  # an older version had other keys
        return None
