"""`tdp plan --profile`: the estimates of plan/estimate.py in print, and files that are refused.

No torch.
"""

from pathlib import Path

import pytest

from tests.harness.bench.reports import both_links, report
from torchdistpackage.cli.main import main
from torchdistpackage.harness.bench.profile import dumps

TINY = str(Path(__file__).parents[2] / "configs" / "gpt_tiny.yaml")


@pytest.fixture
def profile(tmp_path) -> str:
    path = tmp_path / "cluster.json"
    path.write_text(dumps(report(*both_links("data", (0, 1), "all_reduce", "p2p")).profile()))
    return str(path)


def test_each_axis_has_its_line(profile, capsys):
    assert main(["plan", TINY, "--profile", profile, "--forward-s", "0.01"]) == 0
    part = next(
        x for x in capsys.readouterr().out.split("\n\n") if x.startswith("communication of a step")
    )
    head, data, pipe, bubble = part.replace("\n" + " " * 27, " ").splitlines()
    assert head.endswith("by the profile of 2026-01-02T03:04:05+00:00 (me@n0)")
    assert data.split()[:5] == ["data", "1.98", "ms", "1", "x"] and "inside a node" in data
    assert pipe.split()[:5] == ["pipe", "2.9", "ms", "8", "x"]
    assert bubble.startswith("bubble with messages, if a forward takes 0.01 s   ")


def test_between_nodes_only_what_was_measured_there(profile, capsys):
    more = ["parallel.tensor=2", "parallel.sequence_parallel=true", "--procs", "8"]
    assert main(["plan", TINY, *more, "--profile", profile, "--ranks-per-node", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "between nodes: gradients and 1 x" in shown
    assert " tensor not estimated the profile has no all_gather inside a node" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--profile", TINY],
            "gpt_tiny.yaml is not a torchdistpackage cluster profile of version 1",
        ),
        (["--profile", "/none.json"], "/none.json cannot be read"),
        (["--forward-s", "1"], "needs --profile"),
    ],
)
def test_another_file_is_refused(words, said, capsys):
    assert main(["plan", TINY, *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out
