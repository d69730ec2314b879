"""The picture of a bench: a slow card or cable stands out, and dots lie on their fitted line.

No torch.
"""

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest

from tests.harness.bench.reports import both_links, report
from torchdistpackage.harness.bench.outputs import Outputs
from torchdistpackage.harness.bench.picture import picture
from torchdistpackage.harness.bench.report import BenchReport, Pairs
from torchdistpackage.report.svg import colour_between, ink_on

SVG = "{http://www.w3.org/2000/svg}"


def cluster() -> BenchReport:
    """Four nodes of four ranks, 25 GB/s between them and 100 within; rank 6's card has 5."""
    hosts = tuple(f"node{rank // 4:02d}" for rank in range(16))
    size = 2**20
    times = {}
    for a, b in combinations(range(16), 2):
        speed = 100e9 if hosts[a] == hosts[b] else 5e9 if 6 in (a, b) else 25e9
        times[a, b] = size / speed
    rows = [*both_links("data", (0, 4), "all_reduce", "p2p"), *both_links("pipe", (0, 1), "p2p")]
    made = report(*rows, pairs=Pairs(size_bytes=size, dtype="float32", times=times))
    return made.model_copy(update={"hosts": hosts})


def cells(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Of each cell its colour and what is said of it."""
    return {
        (one.attrib["data-from"], one.attrib["data-to"]): (one.attrib["fill"], one[0].text or "")
        for one in ET.fromstring(text).iter(f"{SVG}rect")
        if "data-from" in one.attrib
    }


def test_a_slow_card_is_red_between_hosts_and_named_among_ranks():
    found = cells(picture(cluster()))
    assert len(found) == 4 * 4 + 16 * 15
    slow = {pair for pair, (_, said) in found.items() if ": 5 GB/s" in said}
    between = {pair for pair in slow if pair[0].startswith("node")}
    others = ("node00", "node02", "node03")
    assert between == {(a, b) for x in others for a, b in ((x, "node01"), ("node01", x))}
    ranks = {pair for pair in slow if not pair[0].startswith("node")}
    assert len(ranks) == 2 * 12 and all("6 node01" in pair for pair in ranks)
    red, said = found["node00", "node01"]
    assert said.startswith("node00 and node01: 5 GB/s, ranks ") and said.endswith("and 6")
    assert red == colour_between(0, 0, 1) != found["node00", "node02"][0]
    assert found["node02", "node02"][0] == colour_between(1, 0, 1)


def test_dots_lie_on_the_fitted_line():
    """Times were made of one latency and one bandwidth, so the fit is exact."""
    root = ET.fromstring(picture(cluster()))
    panels = [g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}polyline") is not None]
    assert len(panels) == 4  # two axes over two links
    for panel in panels:
        lines = [one.attrib["points"] for one in panel.iter(f"{SVG}polyline")]
        points = [tuple(map(float, p.split(","))) for line in lines for p in line.split()]
        dots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in panel.iter(f"{SVG}circle")]
        assert len(dots) == 3 * len(lines)
        for x, y in dots:
            assert min(abs(x - a) + abs(y - b) for a, b in points) < 4


def test_one_host_has_its_ranks_alone_and_nothing_measured_is_no_error():
    pairs = Pairs(size_bytes=1024, dtype="float32", times={(0, 1): 1e-3})
    one = report(pairs=pairs).model_copy(update={"hosts": ("n0", "n0")})
    assert {*cells(picture(one))} == {("0 n0", "1 n0"), ("1 n0", "0 n0")}
    assert picture(report()).startswith("<svg")


def test_it_is_written_with_the_other_files(tmp_path: Path):
    written, problems = Outputs(picture=tmp_path / "links.svg").write(cluster())
    assert written == [tmp_path / "links.svg"] and problems == []
    text = written[0].read_text()
    assert not re.search(r"<script|http(?!://www.w3.org)", text) and len(text) < 150_000


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 1.0])
def test_numbers_are_read_on_their_colour(share: float):
    fill = colour_between(share, 0, 1)
    assert ink_on(fill) == ("white" if share in (0.0, 1.0) else "black")
