"""The output files of a bench: JSON, a cluster profile, pictures. No torch.

Everything that could make writing fail is tried before anything is measured, and a later failure of
one file does not affect the others. matplotlib is an optional extra; no display and no global state
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

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.errors import ConfigError
from torchdistpackage.files import atomic_write
from torchdistpackage.harness.bench.picture import picture
from torchdistpackage.harness.bench.profile import dumps
from torchdistpackage.harness.bench.report import BenchReport, Pairs
from torchdistpackage.harness.bench.request import ISOLATED, Request
from torchdistpackage.text import size_text

_MARKERS = "osD^vP*X"
_TICKS = 16


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files to write, or None for each; `plots` is a folder, `picture` an SVG."""

    json: Path | None = None
    profile: Path | None = None
    plots: Path | None = None
    picture: Path | None = None

    def check(self, request: Request) -> None:
        """Try every output; `plots` is created.

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
            if wrong := missing_matplotlib():
                raise ConfigError(f"plots need {wrong}, or measure without --plots")
            with _writing(self.plots, "name a folder that is yours, or a new one in it"):
                self.plots.mkdir(parents=True, exist_ok=True)
                _try(self.plots)
        for path in filter(None, (self.json, self.profile, self.picture)):
            with _writing(path, "name a file in a folder that exists and is yours"):
                if path.is_dir():
                    raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
                _try(path.parent)

    def write(self, report: BenchReport) -> tuple[list[Path], list[str]]:
        """Write each file independently of the others; return the paths, and the errors."""
        written: list[Path] = []
        problems: list[str] = []
        makers: list[tuple[Path | None, Callable[[Path], list[Path]]]] = [
            (self.json, lambda path: _file(path, _json(report))),
            (self.profile, lambda path: _file(path, dumps(report.profile()))),
            (self.plots, lambda path: draw(report, path)),
            (self.picture, lambda path: _file(path, picture(report))),
        ]
        for path, make in makers:
            if path is not None:
                try:
                    with _writing(path, "the figures stand above"):
                        written += make(path)
                except ConfigError as error:
                    problems.append(str(error))
        return written, problems


def _json(report: BenchReport) -> str:
    return json.dumps(report.model_dump(mode="json"), indent=1) + "\n"


def _file(path: Path, text: str) -> list[Path]:
    atomic_write(path, text)
    return [path]


def into(folder: Path, request: Request) -> Outputs:
    """Return outputs that put all results of `request` into one folder, with pictures where
    matplotlib is installed.
    """
    pictures = None if missing_matplotlib() else folder / "plots"
    lines = folder / "profile.json" if request.gives_lines else None
    return Outputs(folder / "bench.json", lines, pictures, folder / "bench.svg")


def _try(folder: Path) -> None:
    """Write a test file in `folder`, because permissions do not reveal /proc, a full disk or a
    quota.
    """
    with NamedTemporaryFile(dir=folder, prefix=".tdp-") as file:
        file.write(b"\n")


@contextmanager
def _writing(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {advice}") from error


# -- pictures -----------------------------------------------------------------------------


def missing_matplotlib() -> str:
    """Return why nothing can be drawn, or "" if matplotlib is installed and works."""
    try:
        import matplotlib
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except Exception as error:  # an installation that is broken raises whatever it likes
        why = str(error).strip().partition("\n")[0]
        return (
            f"matplotlib, which cannot be imported ({type(error).__name__}: {why}); "
            'pip install "torchdistpackage[plot]"'
        )
    return ""


def draw(report: BenchReport, folder: Path) -> list[Path]:
    """Write `bandwidth.<axis>.png` for each axis and `pairs.png`; the paths written."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def save(name: str, figure: Figure) -> None:
        written.append(folder / name)
        figure.savefig(written[-1])

    for axis in dict.fromkeys(row.axis for row in report.rows):
        figure = Figure(figsize=(11, 5), layout="constrained")
        _bandwidth(report, axis, figure)
        save(f"bandwidth.{axis}.png", figure)
    if report.pairs is not None:
        figure = Figure(figsize=(7, 6), layout="constrained")
        _heat_map(report, report.pairs, figure)
        save("pairs.png", figure)
    return written


def _bandwidth(report: BenchReport, axis: str, figure) -> None:
    """Draw bandwidth by size: a colour for each operation, dashes for groups at once."""
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


def _heat_map(report: BenchReport, pairs: Pairs, figure) -> None:
    number = len(report.hosts)
    cells = [[float("nan")] * number for _ in range(number)]
    for a, b in pairs.times:
        cells[a][b] = cells[b][a] = pairs.busbw_bytes_per_s((a, b)) / 1e9
    axes = figure.subplots()
    image = axes.imshow(cells)
    figure.colorbar(image, label="GB/s, each way")
    ticks = range(0, number, -(-number // _TICKS))
    axes.set(xlabel="rank", ylabel="rank", xticks=ticks, yticks=ticks)
    axes.set_title(f"pairs, both ways at once, {size_text(pairs.size_bytes)}")
