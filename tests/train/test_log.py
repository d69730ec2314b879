"""Each step once in the record, whatever kills and resumes; plain lines where no one looks."""

import ast
import errno
import io
import json
import logging
import os
import pty
import select
import sys
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage import train
from torchdistpackage.errors import DataError
from torchdistpackage.plan.logged_values import VALUES
from torchdistpackage.report.run import Run
from torchdistpackage.train.log import ProgressDisplay, StepLog, plot_loss
from torchdistpackage.train.metric_rows import MetricsLog, read_metrics
from torchdistpackage.train.step_stats import StepResult
from torchdistpackage.train.worker import Tee


def steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("torn", ["", '{"step": 11, "lo', '{"step": 11}', "\x00\x00\x00"])
@pytest.mark.parametrize("resume", [0, 4, 6, 9, 30])
def test_after_a_resume_every_step_is_there_once(tmp_path, torn, resume):
    with MetricsLog(tmp_path) as metrics:
        for step in range(1, 11):
            metrics.write(step, loss=1.0 / step)
    with metrics.path.open("a") as file:
        file.write(torn)
    whole = 11 if torn == '{"step": 11}' else 10
    with MetricsLog(tmp_path, resume_step=resume) as metrics:
        assert steps(metrics.path) == list(range(1, min(whole, resume) + 1))
        for step in range(resume + 1, resume + 4):
            metrics.write(step, loss=2.0)
    rows = read_metrics(metrics.path)
    assert [row["step"] for row in rows] == [
        *range(1, min(whole, resume) + 1),
        *range(resume + 1, resume + 4),
    ]
    assert [row["loss"] for row in rows if row["step"] > resume] == [2.0] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


NO_ROWS = [
    *('{"step": 1e999}', '{"step": Infinity}', '{"step": "5"}', '{"step": true}', '{"step": 2.0}'),
    *('{"step": -1}', '{"step": 1' + "0" * 30 + "}", '{"step": ' + "9" * 5000 + "}", '{"stop": 3}'),
    *("[" * 200_000, '{"step": [7]}', '["step"]', "null", "\0", "\x85"),
]


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    rows = ['{"step": 1, "loss": 2.0}', *NO_ROWS, '{"step": 4, "loss": 1' + "0" * 400 + "}"]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(rows).encode() + b"\n\xff\xfe\n")
    with MetricsLog(tmp_path, resume_step=4) as metrics:
        assert steps(metrics.path) == [1, 4]
        metrics.write(5, loss=1.0)
    assert steps(metrics.path) == [1, 4, 5]
    assert plot_loss(metrics.path) == tmp_path / "loss.png"


def test_a_pipe_in_place_of_the_rows_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match="is a pipe"):
        MetricsLog(tmp_path)


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
    metrics = MetricsLog(tmp_path / "new")
    metrics.write(3, loss=1.5, note="x", lr=None)
    assert read_metrics(metrics.path) == [{"step": 3, "loss": 1.5, "note": "x", "lr": None}]
    metrics.close()


def test_a_step_cannot_be_written_twice(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        metrics.write(2, loss=1.0)
        for step in (2, 1):
            with pytest.raises(DataError, match=f"step 2, so step {step}"):
                metrics.write(step, loss=1.0)
    assert steps(metrics.path) == [2]


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    with MetricsLog(tmp_path) as metrics:
        metrics.write(1, loss=float("nan"), grad_norm=float("inf"))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(metrics.path.read_text(), parse_constant=refuse)["loss"] is None


def test_without_a_terminal_there_is_one_plain_line_per_interval():
    out = io.StringIO()
    with ProgressDisplay(25, every=10, stream=out) as progress:
        for step in range(1, 26):
            progress.update(
                step, loss=2.5, tokens_per_s=12345, bubble=0.271, predicted_bubble=0.2727
            )
        progress.say("done")
    assert out.getvalue().splitlines() == [
        f"step {step}/25  loss 2.5000  12.3k tokens/s  bubble 27.1% (predicted 27.3%)"
        for step in (10, 20, 25)
    ] + ["done"]
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_run_without_a_pipeline_shows_no_bubble():
    out = io.StringIO()
    ProgressDisplay(1, every=1, stream=out).update(1, loss=2.5, tokens_per_s=99)
    assert out.getvalue() == "step 1/1  loss 2.5000  99 tokens/s\n"


@pytest.mark.parametrize(
    ("bubble", "lines"),
    [
        (None, ["step 1/2  loss 2.5000  16 tokens/s (predicted 32)"]),
        (
            0.2,
            [
                "step 1/2  loss 2.5000  16 tokens/s  bubble 25.0% (predicted 20.0%)",
                "  predicted 32 tokens/s",
            ],
        ),
    ],
)
def test_the_predicted_speed_stands_beside_the_measured_one(tmp_path, capsys, bubble, lines):
    log = StepLog(tmp_path, 2, rank=0, predicted_s=0.25, predicted_bubble=bubble)
    with log.opened(0):
        for step in (1, 2):
            log.write(StepResult(step, 2.5, 1.0, 8, 0.5, 0.1, 0.25), 8 * step, {})
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines
    # a start says once what does not change
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.get("predicted_s") for row in rows] == [0.25, None]


@pytest.mark.parametrize("verbose", [False, True])
def test_a_step_is_one_line_and_causes_of_the_bubble_are_in_its_row(tmp_path, capsys, verbose):
    causes = "1f1b: " + "waits for messages, " * 9
    log = StepLog(tmp_path, 2, rank=0, predicted_bubble=0.2, verbose=verbose)
    with log.opened(0):
        for step in (1, 2):
            log.note(pipeline=causes)
            log.write(StepResult(step, 2.5, 1.0, 8, 0.5, 0.1, 0.25), 8 * step, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("step")] == [
        ["step", "1/2"],
        ["step", "2/2"],
    ]
    assert len(lines) == (8 if verbose else 2) and max(map(len, lines)) <= 80
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["pipeline"] for row in rows] == [causes] * 2


def test_a_terminal_gets_a_bar_with_the_same_numbers(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        with ProgressDisplay(20, every=10, stream=terminal, done=4) as progress:
            progress.update(7, loss=2.5, tokens_per_s=500, bubble=0.25, predicted_bubble=0.2)
            progress.say("[validation] loss 2.4")
        terminal.flush()
        shown = ""
        # a terminal hands over what it has, which may be less than what was written
        while select.select([ours], [], [], 0.5)[0]:
            shown += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "step 7/20" in shown
    assert "loss 2.5000  500 tokens/s  bubble 25.0%" in shown
    assert "[validation] loss 2.4" in shown
    assert "\r" in shown and "…" not in shown


def test_the_curve_is_drawn_from_the_metrics_file_alone(tmp_path):
    pytest.importorskip("matplotlib")
    with MetricsLog(tmp_path) as metrics:
        for step in range(1, 50):
            metrics.write(step, loss=5.0 / step)
        metrics.write(50, loss=float("nan"), val_loss=0.2, unigram=3.3, bigram=2.5)
    path = plot_loss(metrics.path)
    assert path == tmp_path / "loss.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    bare = plot_loss(metrics.path, tmp_path / "other.png")
    assert bare is not None
    assert bare.read_bytes() == path.read_bytes()


def test_the_curve_has_the_losses_of_training_and_of_validations(tmp_path, monkeypatch):
    axes, drawn = pytest.importorskip("matplotlib.axes").Axes, {}
    plot = axes.plot

    def note(self, *values, label, **style):
        drawn[label] = [[*x] for x in values if not isinstance(x, str)]
        return plot(self, *values, label=label, **style)

    monkeypatch.setattr(axes, "plot", note)
    with MetricsLog(tmp_path) as metrics:
        metrics.write(1, loss=4.0)
        metrics.write(2, loss=2.0, val_loss=3.0)
    plot_loss(metrics.path)
    assert drawn == {"training": [[1, 2], [4.0, 2.0]], "validation": [[2], [3.0]]}


def test_a_missing_matplotlib_costs_the_picture_and_one_line(tmp_path, monkeypatch, caplog):
    with MetricsLog(tmp_path) as metrics:
        metrics.write(1, loss=1.0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with caplog.at_level(logging.WARNING):
        assert plot_loss(metrics.path) is None
    assert ["matplotlib is not installed" in record.message for record in caplog.records] == [True]


def test_a_file_without_losses_gives_no_curve(tmp_path, caplog):
    assert plot_loss(tmp_path / "metrics.jsonl") is None
    assert "has no losses" in caplog.text


def test_what_a_screen_shows_is_kept_but_for_its_motions(tmp_path):
    path = tmp_path / "logs" / "rank0.restart0.log"
    for line in ("first\n", "second\n"):
        screen = io.StringIO()
        both = Tee(screen, path)
        print("\x1b[2K\rstep 3/9", end="", file=both)
        print(line, end="", file=both)
        both.flush()
        assert screen.getvalue() == f"\x1b[2K\rstep 3/9{line}" and not both.isatty()
        both.close()
    assert path.read_text() == "step 3/9first\nstep 3/9second\n"


COLOURED = (
    "\x1b[1;31mValueError\x1b[0m: \x1b]8;;file:///a.py\x1b\\a.py\x1b]8;;\x07 is wrong\x1b(B\n"
)


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([COLOURED], "ValueError: a.py is wrong\n"),
        (["\r 10%", "\r 50%", "\r100%\n", "done\n"], "100%\ndone\n"),
        (["\r 10%", "\r 50%\x1b[K\r"], " 50%"),
        (["a\r\nb\r\n"], "a\nb\n"),
        (["x\ry", "z\nplain ", "goes on"], "yz\nplain goes on"),
        (["\x1b[2K\x1b[1A\x1b[2Kstep 1\n"], "step 1\n"),
        (["[0m is text, 3 < 4 ]\n"], "[0m is text, 3 < 4 ]\n"),
    ],
)
def test_the_file_has_the_text_of_what_only_a_terminal_can_show(tmp_path, parts, kept):
    screen = io.StringIO()
    both = Tee(screen, tmp_path / "log")
    for part in parts:
        both.write(part)
    both.close()
    assert (tmp_path / "log").read_text() == kept
    assert screen.getvalue() == "".join(parts), "the screen has all of it"


def test_plain_text_is_in_the_file_at_once_and_an_endless_line_is_no_leak(tmp_path):
    both = Tee(io.StringIO(), tmp_path / "log")
    both.write("half a line\n")
    assert (tmp_path / "log").read_text() == "half a line\n"
    for percent in range(30_000):
        both.write(f"\r{percent} of 30000")
    assert len(both._line) < 1 << 17
    both.close()
    assert (tmp_path / "log").read_text() == "half a line\n29999 of 30000"


@pytest.mark.parametrize("how", ["removed", "replaced", "moved"])
def test_a_folder_that_goes_away_under_a_run_is_noticed(tmp_path, how):
    """Or the run would end well and leave nothing."""
    metrics = MetricsLog(tmp_path / "run")
    metrics.write(1, loss=1.0)
    metrics.sync()
    (tmp_path / "run").rename(tmp_path / "other")
    if how != "moved":
        (tmp_path / "other" / "metrics.jsonl").unlink()
    if how == "replaced":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="was removed or replaced"):
        metrics.sync()
    metrics._looked_s -= 2
    with pytest.raises(DataError, match="was removed or replaced"):
        metrics.write(2, loss=1.0)
    metrics.close()


def result(step: int) -> StepResult:
    return StepResult(step, 2.5, 1.0, 8, 0.5, 0.1, 0.25)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"step": 1}\n{"step": 2}\n', "steps 3 to 6"),
        ('{"step": 4}\n{"step": 5}\n{"step": 9}\n{"step"', "steps 1 to 3, 6"),
        ('{"step": 1}\nx\n{"step": 3}\n{"step": 4}\n{"step": 5}\n{"step": 6}\n', "step 2"),
        (None, "steps 1 to 6"),
        ("".join(f'{{"step": {step}}}\n' for step in range(8)), None),
    ],
)
def test_steps_without_a_row_are_said_at_a_resume(tmp_path, capsys, lines, said):
    if lines is not None:
        (tmp_path / "metrics.jsonl").write_text(lines)
    log = StepLog(tmp_path, 7, rank=0)
    with log.opened(6):
        log.write(result(7), 8, {})
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("resumed after step 6 of 7; 1 to go ")
    assert ("no row of" in shown) is (said is not None)
    assert said is None or f"note: metrics.jsonl has no row of {said}: it was cut or" in shown
    assert steps(tmp_path / "metrics.jsonl")[-1] == 7
    with StepLog(tmp_path / "new", 7, rank=0).opened(0):
        assert not capsys.readouterr().out, "a first start misses nothing"


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_disk_that_takes_no_row_ends_the_run_or_is_said_and_gets_them_later(
    tmp_path, capsys, monkeypatch, goes_on
):
    """And no half of a row, of which a write on a full disk may take the beginning."""
    write, room = os.write, [0]

    def no_room(file: int, data: bytes) -> int:
        if room and len(data) > room[0]:
            part = room[0] and write(file, data[: room[0]])
            room[0] -= part
            if not part:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return part
        return write(file, data)

    log, path = StepLog(tmp_path, 5, rank=0, goes_on=goes_on), tmp_path / "metrics.jsonl"
    with log.opened(0):
        log.write(result(1), 8, {})
        monkeypatch.setattr(os, "write", no_room)
        if not goes_on:
            with pytest.raises(DataError, match=r"metrics\.jsonl cannot be written: No space"):
                log.write(result(2), 16, {})
            assert steps(path) == [1]
            return
        for step in (2, 3):
            room[0] = 20
            log.write(result(step), 8 * step, {})
            log.sync()
            assert steps(path) == [1]
        room.clear()
        log.write(result(4), 32, {})
        assert steps(path) == [1, 2, 3, 4]
        log.write(result(5), 40, {})
    shown = capsys.readouterr().out
    assert shown.count("no rows: ") == 1 and f"{path} cannot be written: No space left" in shown
    assert "training goes on (checkpoint.on_error: continue)" in shown
    assert tells(shown, "metrics.jsonl", "3 rows")
    assert steps(path) == [1, 2, 3, 4, 5]


def test_each_key_that_the_package_notes_has_a_row():
    """A row describes it in docs/logging.md."""
    noted = {
        keyword.arg
        for path in (Path(train.__file__).parent).glob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "note"
        for keyword in call.keywords
    }
    assert {"stragglers", "epochs"} <= noted
    assert noted - {None} <= {value.name for value in VALUES}


@pytest.mark.parametrize(("terms", "unit"), [(256, "tokens"), (8, "samples")])
def test_a_loss_of_the_user_names_what_it_counts(tmp_path, terms, unit):
    """The speed is of tokens where the loss counts more terms than the step has samples."""
    log = StepLog(
        tmp_path, 1, rank=0, samples=8, is_cross_entropy=False, flops_per_token=2, every=1
    )
    with log.opened(0):
        log.see(terms)
        log.write(StepResult(1, 2.0, 1.0, terms, 0.5, 0.1, None), terms, {})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert log.unit == unit and not log.in_nats
    assert row["flops_per_s"] == (4 * terms if unit == "tokens" else None)
    text = "model: {target: 'mine:net', loss: 'mine:loss'}\ndata: {global_batch: 8}\n"
    (tmp_path / "resolved.yaml").write_text(text)
    assert Run(tmp_path).unit == unit, "a report says the same"
