"""A bench as pictures: bandwidth by size for each axis, and the matrix of pairs. No torch.

matplotlib is an optional extra and is loaded late; `require` loads it before anything is
measured. No display and no global state of pyplot is involved.
"""

from pathlib import Path

from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.report import ISOLATED, BenchReport
from torchdistpackage.harness.bench.table import size
from torchdistpackage.harness.operations import COLLECTIVES

_MARKERS = "osD^vP*X"
_TICKS = 16


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


def require() -> None:
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
    axes.set_title(f"pairs, both ways at once, {size(report.pairs.size_bytes)}")
