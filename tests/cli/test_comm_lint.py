"""`tdp comm lint`: what it proves is printed, what it finds ends in code 1 with both stacks."""

import pytest
import yaml

from torchdistpackage.cli.main import main
from torchdistpackage.harness.lint import linter
from torchdistpackage.train import build as builder

SMALL = {
    "parallel": {"data": 2, "pipe": 2},
    "model": {"layers": 2, "dim": 16, "heads": 2, "vocab": 257, "tied": True},
    "data": {
        "target": "tests.train.sources:UnevenTokens",
        "args": {"seq_len": 8, "vocab": 257},
        "seq_len": 8,
        "global_batch": 8,
    },
    "pipeline": {"microbatches": 2},
}


@pytest.fixture
def small(tmp_path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_a_small_run_is_checked_on_paper_and_run(small, capsys):
    assert main(["comm", "lint", small]) == 0
    out = capsys.readouterr().out
    paper, ran = out.split("two steps, 4 threads as ranks")
    assert "on paper, 4 ranks: data=2 x pipe=2" in paper
    for part in (paper, ran):
        assert "pipe             2 groups of 2" in part
        assert part.count("orders agree") >= 3


def test_a_large_one_only_on_paper_unless_asked(small, capsys):
    assert main(["comm", "lint", small, "parallel.data=auto", "data.global_batch=512",
                 "--world", "256"]) == 0  # fmt: skip
    assert "steps were not run (--run runs them)" in capsys.readouterr().out
    assert main(["comm", "lint", small, "--no-run"]) == 0
    assert "threads" not in capsys.readouterr().out


def test_a_disagreement_is_code_1_and_a_wrong_file_code_2(small, capsys, monkeypatch):
    made = builder._reducer

    def reducer(stage, layouts):
        found = made(stage, layouts)
        if linter.tpc.get_pp_rank():
            found._buckets = found._buckets[::-1]
        return found

    monkeypatch.setattr(builder, "_reducer", reducer)
    capsys.readouterr()
    assert main(["comm", "lint", small]) == 1
    out = capsys.readouterr().out
    assert "stack of rank" in out and "reducer.py" in out
    assert main(["comm", "lint", small, "--world", "5"]) == 2
