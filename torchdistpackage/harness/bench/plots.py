"""A bench as pictures: bandwidth by size for each axis, and the matrix of pairs. No torch.

matplotlib is an optional extra and is loaded late; `require` asks for it before anything is
measured. No display and no global state of pyplot is involved.
"""

from importlib.util import find_spec
from pathlib import Path

from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.report import Report
from torchdistpackage.harness.bench.table import size


def is_there() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def require() -> None:
    """Raises:
    ConfigError: matplotlib is not installed.
    """
    if not is_there():
        raise ConfigError(
            "plots need matplotlib, which is not installed; pip install 'torchdistpackage[plot]', "
            "or measure without --plots"
        )


def draw(report: Report, folder: Path) -> list[Path]:
    """Write `bandwidth.<axis>.png` for each axis and `pairs.png`; the paths written."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for axis in dict.fromkeys(row.axis for row in report.rows):
        figure = Figure(figsize=(8, 5), layout="constrained")
        _bandwidth(report, axis, figure.subplots())
        written.append(folder / f"bandwidth.{axis}.png")
        figure.savefig(written[-1])
    if report.pairs is not None:
        figure = Figure(figsize=(7, 6), layout="constrained")
        _heat_map(report, figure)
        written.append(folder / "pairs.png")
        figure.savefig(written[-1])
    return written


def _bandwidth(report: Report, axis: str, axes) -> None:
    rows = [row for row in report.rows if row.axis == axis]
    kinds = dict.fromkeys((row.operation, row.link, row.mode, row.dtype) for row in rows)
    for kind in kinds:
        same = [r for r in rows if (r.operation, r.link, r.mode, r.dtype) == kind]
        points = sorted((r.size_bytes, r.busbw_bytes_per_s / 1e9) for r in same)
        axes.plot(*zip(*points, strict=True), marker="o", label=" ".join(kind))
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    axes.set_title(f"{axis}: {report.backend}, {len(report.hosts)} ranks, {report.date}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")


def _heat_map(report: Report, figure) -> None:
    assert report.pairs is not None
    number = len(report.hosts)
    cells = [[float("nan")] * number for _ in range(number)]
    for a, b, time_s in report.pairs.times:
        cells[a][b] = cells[b][a] = report.pairs.busbw_bytes_per_s(time_s) / 1e9
    axes = figure.subplots()
    image = axes.imshow(cells)
    figure.colorbar(image, label="GB/s, each way")
    axes.set(xlabel="rank", ylabel="rank")
    axes.set_title(f"pairs, both ways at once, {size(report.pairs.size_bytes)}")
