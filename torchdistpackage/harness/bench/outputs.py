"""The files of a bench: JSON, a cluster profile, pictures. No torch.

What could make writing fail is tried before anything is measured, and what fails later all the
same takes nothing else with it. matplotlib is an optional extra, and no display and no global state
of pyplot is involved.
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
from torchdistpackage.harness.bench import profile
from torchdistpackage.harness.bench.report import ISOLATED, BenchReport, size_text
from torchdistpackage.harness.bench.request import Request
from torchdistpackage.harness.operations import COLLECTIVES
from torchdistpackage.launch.files import atomic_write

_MARKERS = "osD^vP*X"
_TICKS = 16


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
            require_matplotlib()
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
        save(self.plots, lambda p: draw(report, p))
        return written, problems


def into(folder: Path, request: Request) -> Outputs:
    """All that `request` gives, in one folder; pictures where matplotlib is."""
    pictures = None if what_is_wrong() else folder / "plots"
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


# -- pictures -----------------------------------------------------------------------------


def what_is_wrong() -> str:
    """Why nothing can be drawn, "" where matplotlib is there and works."""
    try:
        import matplotlib
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "matplotlib":
            return "matplotlib, which is not installed; pip install 'torchdistpackage[plot]'"
        return f"matplotlib, which cannot be imported ({error}); install it again"
    except Exception as error:  # an installation that is broken raises whatever it likes
        why = str(error).strip().partition("\n")[0]
        return (
            f"matplotlib, which cannot be imported ({type(error).__name__}: {why}); install it "
            f"again"
        )
    return ""


def require_matplotlib() -> None:
    """Raises:
    ConfigError: matplotlib is not installed, or cannot be imported.
    """
    if wrong := what_is_wrong():
        raise ConfigError(f"plots need {wrong}, or measure without --plots")


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Write `bandwidth.<axis>.png` for each axis and `pairs.png`; the paths written."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for axis in dict.fromkeys(row.axis for row in report.rows):
        figure = Figure(figsize=(11, 5), layout="constrained")
        _bandwidth(report, axis, figure)
        written.append(folder / f"bandwidth.{axis}.png")
        figure.savefig(written[-1])
    if report.pairs is not None:
        figure = Figure(figsize=(7, 6), layout="constrained")
        _heat_map(report, figure)
        written.append(folder / "pairs.png")
        figure.savefig(written[-1])
    return written


def _bandwidth(report: BenchReport, axis: str, figure) -> None:
    """Colour is the operation, dashes are groups that are busy together, a marker the rest."""
    axes = figure.subplots()
    rows = [row for row in report.rows if row.axis == axis]
    colours = {name: f"C{i}" for i, name in enumerate(COLLECTIVES)}
    markers = list(dict.fromkeys((row.link, row.dtype) for row in rows))
    for kind in dict.fromkeys((row.operation, row.link, row.mode, row.dtype) for row in rows):
        same = [r for r in rows if (r.operation, r.link, r.mode, r.dtype) == kind]
        points = sorted((r.size_bytes, r.busbw_bytes_per_s / 1e9) for r in same)
        operation, link, mode, dtype = kind
        axes.plot(
            *zip(*points, strict=True),
            color=colours[operation],
            linestyle="solid" if mode == ISOLATED else "dashed",
            marker=_MARKERS[markers.index((link, dtype)) % len(_MARKERS)],
            label=" ".join(kind),
        )
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    axes.set_title(f"{axis}: {report.backend}, {len(report.hosts)} ranks, {report.date}")
    axes.grid(True, which="both", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")


def _heat_map(report: BenchReport, figure) -> None:
    assert report.pairs is not None
    number = len(report.hosts)
    cells = [[float("nan")] * number for _ in range(number)]
    for a, b, time_s in report.pairs.times:
        cells[a][b] = cells[b][a] = report.pairs.busbw_bytes_per_s(time_s) / 1e9
    axes = figure.subplots()
    image = axes.imshow(cells)
    figure.colorbar(image, label="GB/s, each way")
    ticks = range(0, number, -(-number // _TICKS))
    axes.set(xlabel="rank", ylabel="rank", xticks=ticks, yticks=ticks)
    axes.set_title(f"pairs, both ways at once, {size_text(report.pairs.size_bytes)}")
