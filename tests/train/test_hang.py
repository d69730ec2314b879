"""A whole run that hangs: the report ends the log and is in the run folder, and all are gone."""

import re
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.processes import survivors
from tests.train.test_job import STARTS_AGAIN, rows, start, words

TIMEOUT_S, FIRST_TIMEOUT_S = 3, 15
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--nproc-per-node", "4", "--no-python", sys.executable, "-m", "torchdistpackage"),
)
# data 2 x pipe 2: the ranks 0 and 2 are the first of their pipes
CASES = [
    pytest.param("sleep", 2, None, id="sleep"),
    pytest.param("sleep", 2, (), id="sleep-program", marks=pytest.mark.full),
    pytest.param("sleep-first", 2, (), id="sleep-first", marks=pytest.mark.full),
    pytest.param("sleep", 0, (), id="sleep-0", marks=pytest.mark.full),
    pytest.param("hold", 0, (), id="hold", marks=pytest.mark.full),
    pytest.param("stop", 0, (), id="stop", marks=pytest.mark.full),
    pytest.param("sleep", 2, TORCHRUN, id="torchrun", marks=pytest.mark.full),
    pytest.param("stop", 2, TORCHRUN, id="torchrun-stop", marks=pytest.mark.full),
]
WORDS = {
    "sleep": r"is in data loading while \d other ranks? waits? for it",
    "hold": r"does not answer: it is alive .*, but its interpreter does not run",
    "stop": r"is stopped \(process state T, process \d+\)",
}


@pytest.mark.parametrize(("how", "rank", "prefix"), CASES)
def test_a_hang_ends_with_a_report_that_names_the_culprit(
    tmp_path, how, rank, prefix, monkeypatch, tdp
):
    """After a validation and a save, of which the first takes longer than a step may."""
    mark = f"TDP_TEST_MARK={tmp_path}"
    monkeypatch.setenv(*mark.split("="))
    note = tmp_path / "fault"
    how, _, first = how.partition("-")
    # start-up has the same limit as the first step
    step, limit_s = (1, FIRST_TIMEOUT_S) if first else (4, TIMEOUT_S)
    when = f"how: {how}, rank: {rank}, step: {step}, note: {note}"
    args = f"{{seq_len: 32, vocab: 256, {when}, val_s: 4}}"
    changes = (
        "train.steps=50", f"train.step_timeout_s={TIMEOUT_S}", "train.eval_every=2",
        "checkpoint.save_every=2", "data.name=null", "data.target=tests.train.sources:Hanging",
        f"data.args={args}", f"launch.init_timeout_s={FIRST_TIMEOUT_S}",
    )  # fmt: skip
    if prefix is None:
        code, out = tdp(words(tmp_path, changes))
    else:
        process = start(tmp_path, *changes, prefix=prefix)
        out, _ = process.communicate(timeout=180)
        code = process.returncode
    took_s = time.time() - float(note.read_text())
    assert took_s < limit_s + 15, f"{took_s:.1f} s\n{out}"
    assert code not in (0, None)
    assert survivors(mark) == []
    assert [row["step"] for row in rows(tmp_path) if "val_loss" in row] == ([] if first else [2])

    (report,) = (tmp_path / "gpt_tiny").glob("hang.*.txt")
    text = report.read_text().rstrip()
    who = f"data {rank // 2} pipe 0"
    host = re.escape(socket.gethostname())
    assert re.match(rf"hang: rank {rank} \({who} on {host}\) {WORDS[how]}", text), text
    waits = (
        rf"data {rank // 2} pipe 1 on {host} waits in RECV_F stage 1 microbatch 0; its sender {who}"
    )
    # in the first step the batches are compared before a message is sent
    assert re.search("all_gather number 1 of the pipe group" if first else waits, text), text
    assert re.search(r"in batch", text) or how == "stop", "the culprit's stack"
    last = out.rstrip().removesuffix(STARTS_AGAIN).rstrip()
    if prefix:
        assert text in last, "torchrun has the last word"
    else:
        assert last.endswith(text), out
        heads = re.findall(rf"rank {rank} .*hang: it {WORDS[how]}", last)
        assert len(heads) == 2, "in the first line of the report of failures and above the block"


def test_it_all_stays_under_the_limit_of_single_calls(tmp_path):
    """What gloo says by itself must come later, or it would be the last word."""
    from torchdistpackage.harness.watchdog import HangWatchdog

    watch = HangWatchdog(tmp_path, rank=0, world_size=1, start="a", timeout_s=7)
    assert watch.call_timeout_s > watch.slow_timeout_s + 15 > watch.timeout_s + 15
    assert watch.call_timeout_s > watch.first_timeout_s + 15
    assert list(Path(tmp_path).iterdir()) == []
