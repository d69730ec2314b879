"""Where a bench's report goes: JSON, a cluster profile, pictures. No torch.

One rule: what could make writing fail is looked at before anything is measured.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench import plots, profile
from torchdistpackage.harness.bench.report import Report
from torchdistpackage.launch.durable import write_whole


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write, each if it is named; `plots` is a folder."""

    json: Path | None = None
    profile: Path | None = None
    plots: Path | None = None

    def check(self) -> None:
        """Raises:
        ConfigError: matplotlib is missing, or a file cannot be written there.
        """
        if self.plots is not None:
            plots.require()
        for path in filter(None, (self.json, self.profile)):
            folder = path.parent
            if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
                raise ConfigError(
                    f"{path} cannot be written; name a file in a folder that exists and is yours"
                )

    def write(self, report: Report) -> list[Path]:
        """Write them; the paths written.

        Raises:
            ConfigError: a file cannot be written, or the report gives no profile.
        """
        written: list[Path] = []

        def keep(path: Path | None, text: Callable[[], str]) -> None:
            if path is not None:
                write_whole(path, text())
                written.append(path)

        try:
            keep(self.json, lambda: json.dumps(report.as_json(), indent=1) + "\n")
            keep(self.profile, lambda: profile.dumps(profile.profile_of(report)))
            if self.plots is not None:
                written += plots.draw(report, self.plots)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
        return written


def into(folder: Path) -> Outputs:
    """All of them, in one folder; pictures where matplotlib is."""
    pictures = folder / "plots" if plots.is_there() else None
    return Outputs(folder / "bench.json", folder / "profile.json", pictures)
