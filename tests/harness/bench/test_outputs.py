"""The pictures are there, one for each axis, and show what was measured. No torch."""

import pytest

from tests.harness.bench.reports import both_links, report
from torchdistpackage.harness.bench import outputs
from torchdistpackage.harness.bench.report import Pairs

pytest.importorskip("matplotlib")


def test_each_axis_has_a_picture_and_the_pairs_have_one(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    lines, images = [], []
    draw_line, draw_image = Axes.plot, Axes.imshow
    monkeypatch.setattr(Axes, "plot", lambda *a, **k: lines.append(a[1:]) or draw_line(*a, **k))
    monkeypatch.setattr(Axes, "imshow", lambda *a: images.append(a[1]) or draw_image(*a))
    rows = both_links("data", (0, 1, 2, 3), "all_reduce") + both_links("pipe", (0, 4), "p2p")
    pairs = Pairs(size_bytes=2**20, dtype="float32", times={(0, 1): 1e-3, (1, 2): 2e-3})
    written = outputs.draw(report(*rows, pairs=pairs), tmp_path / "a" / "b")
    assert [path.name for path in written] == [
        "bandwidth.data.png",
        "bandwidth.pipe.png",
        "pairs.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert len(lines) == 4  # an operation over two links, for two axes
    sizes, rates = lines[0]
    assert sizes == (2**10, 2**15, 2**20)
    assert rates == pytest.approx([row.busbw_bytes_per_s / 1e9 for row in rows[:3]])
    (cells,) = images
    assert cells[0][1] == cells[1][0] == pytest.approx(2**20 / 1e-3 / 1e9)
    assert len(cells) == 8 and cells[0][7] != cells[0][7]
