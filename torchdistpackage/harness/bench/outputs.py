"""Where a bench's report goes: JSON, a cluster profile, pictures. No torch.

One rule: what could make writing fail is tried before anything is measured, and what fails later
all the same takes nothing else with it.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EISDIR
from pathlib import Path
from tempfile import NamedTemporaryFile

from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench import plots, profile
from torchdistpackage.harness.bench.report import BenchReport
from torchdistpackage.harness.bench.request import Request
from torchdistpackage.launch.files import atomic_write


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write, each if it is named; `plots` is a folder."""

    json: Path | None = None
    profile: Path | None = None
    plots: Path | None = None

    def check(self, request: Request) -> None:
        """Try all of it; `plots` is made.

        Raises:
            ConfigError: matplotlib is missing or broken, a file cannot be written there, or
                `request` gives no profile.
        """
        if self.profile is not None and not request.gives_lines:
            raise ConfigError(
                "a profile needs times at two sizes or more for a line through them; give "
                "a range, e.g. --sizes 1KiB:4MiB:x4"
            )
        if self.plots is not None:
            plots.require()
            with _told(self.plots, "name a folder that is yours, or a new one in it"):
                self.plots.mkdir(parents=True, exist_ok=True)
                _try(self.plots)
        for path in filter(None, (self.json, self.profile)):
            with _told(path, "name a file in a folder that exists and is yours"):
                if path.is_dir():
                    raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
                _try(path.parent)

    def write(self, report: BenchReport) -> tuple[list[Path], list[str]]:
        """Write each of them, whatever becomes of the others: the paths, and what went wrong."""
        written: list[Path] = []
        problems: list[str] = []

        def save(path: Path | None, make: Callable[[Path], list[Path]]) -> None:
            if path is not None:
                try:
                    with _told(path, "the figures stand above"):
                        written.extend(make(path))
                except ConfigError as error:
                    problems.append(str(error))

        save(self.json, lambda p: _whole(p, json.dumps(report.as_json(), indent=1) + "\n"))
        save(self.profile, lambda p: _whole(p, profile.dumps(profile.profile_of(report))))
        save(self.plots, lambda p: plots.draw(report, p))
        return written, problems


def into(folder: Path, request: Request) -> Outputs:
    """All that `request` gives, in one folder; pictures where matplotlib is."""
    pictures = None if plots.what_is_wrong() else folder / "plots"
    lines = folder / "profile.json" if request.gives_lines else None
    return Outputs(folder / "bench.json", lines, pictures)


def _whole(path: Path, text: str) -> list[Path]:
    atomic_write(path, text)
    return [path]


def _try(folder: Path) -> None:
    """Write in `folder`; being allowed to says little of /proc, a full disk or a quota."""
    with NamedTemporaryFile(dir=folder, prefix=".tdp-") as file:
        file.write(b"\n")


@contextmanager
def _told(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {advice}") from error
