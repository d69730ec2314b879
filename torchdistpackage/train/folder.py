"""The run folder: where it is, and who makes room for it. No torch."""

from pathlib import Path

from torchdistpackage.config.schema import RunConfig

RESOLVED = "resolved.yaml"


def run_folder(config: RunConfig) -> Path:
    """`run.dir` / `run.name`."""
    return Path(config.run.dir) / config.run.name


def prepare_folder(config: RunConfig, resume: str) -> Path:
    """Make the run folder and return it. With `--resume never` an earlier one is renamed first."""
    folder = run_folder(config)
    if resume == "never" and folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder
