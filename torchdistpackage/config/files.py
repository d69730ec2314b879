"""Files that a run reads, looked for before anything is started or queued."""

from pathlib import Path

from torchdistpackage.config.errors import Problem
from torchdistpackage.config.schema import RunConfig


def absent_files(config: RunConfig, source: str) -> list[Problem]:
    """What the data section names and is not there. source: of the configuration, for the text."""
    named = {"data.path": config.data.path, "data.tokenizer": config.data.tokenizer}
    return [
        Problem(source, None, key, f"{path} is not there, seen from {Path.cwd()}")
        for key, path in named.items()
        if path is not None and not Path(path).exists()
    ]
