"""File systems that lie (lying_disk.c) under whole runs of two nodes: what they save is whole, what
they lose is said with its file and cause, and no start goes on from less than was saved.
"""

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkpoint.lying_disk import LyingDisk
from torchdistpackage.checkpoint.commit import candidates, damage, latest, step_of
from torchdistpackage.train.metric_rows import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS, LIMIT_S = 8, 300
WORDS = [
    *("model.layers=1", "model.dim=16", "model.heads=2", "model.dropout=0.2", "data.name=null"),
    *("data.seq_len=16", "data.global_batch=8", "pipeline.microbatches=1", "parallel.data=2"),
    *("parallel.pipe=1", "parallel.zero=1", "train.generate_tokens=0", "train.eval_every=0"),
    *("checkpoint.save_every=2", "checkpoint.keep_last=9", "log.every=1", "log.plot=false"),
    *(f"train.steps={STEPS}", "data.target=tests.train.sources:Paced"),
]
NOT_SAVED = "writing the checkpoint of step 4 to"


class Start(NamedTuple):
    """What is left of one start of both ranks: exit codes and output by rank."""

    codes: tuple[int, ...]
    texts: tuple[str, ...]


class Ranks:
    """Two ranks, each on a node of its own, of the run in the folder of a disk."""

    def __init__(self, disk: LyingDisk, *words: str, pause_s: float = 0.3):
        data = f"data.args={{seq_len: 16, num_val: 1, pause_s: {pause_s}}}"
        self.disk, self.run = disk, disk.folder / "run"
        self.words = [*WORDS, data, f"run.dir={disk.folder}", "run.name=run", *words]

    def start(self, *envs: dict[str, str]) -> list[subprocess.Popen[str]]:
        """Start a rank in each of these environments."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        launcher |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "torchdistpackage", "train", "configs/gpt_tiny.yaml"]
        return [
            subprocess.Popen(
                [*command, *self.words],
                env=env | launcher | {"RANK": str(rank), "GROUP_RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, env in enumerate(envs)
        ]

    def end(self, processes: list[subprocess.Popen[str]]) -> Start:
        texts = tuple(process.communicate(timeout=LIMIT_S)[0] for process in processes)
        return Start(tuple(process.returncode for process in processes), texts)

    def kill_after(self, step: int, processes: list[subprocess.Popen[str]]) -> Start:
        """Kill both ranks once `step` has its row; they may have ended before."""
        until_s = time.monotonic() + LIMIT_S
        while all(process.poll() is None for process in processes):
            if any(row["step"] >= step for row in read_metrics(self.run / "metrics.jsonl")):
                break
            assert time.monotonic() < until_s, f"no step {step}"
            time.sleep(0.05)
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        return self.end(processes)

    def lives(self, kind: str, nodes: tuple[str, str] = ("n0", "n1"), **lie) -> list[dict]:
        return [self.disk.env(kind, node, **lie) for node in nodes]

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def whole_steps(self) -> list[int]:
        """The steps of folders that readers accept, each of which is whole on an honest disk."""
        paths = candidates(self.checkpoints)
        assert {damage(path, checksums=True) for path in paths} <= {None}
        return [step_of(path) for path in paths]


def honest() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def disk(tmp_path: Path) -> LyingDisk:
    return make_disk(tmp_path)


def make_disk(place: Path) -> LyingDisk:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc), which the lying disk is made with")
    folder = place / "disk"
    folder.mkdir()
    return LyingDisk.build(folder, place)


Truth = tuple[list[float], dict[str, bytes]]


def results(ranks: Ranks) -> Truth:
    """The loss of each step, each of which has one row, and the files of the last checkpoint."""
    rows = read_metrics(ranks.run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    last = ranks.checkpoints / f"step_{STEPS:06d}"
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert len(files) == 2
    return [row["loss"] for row in rows], files


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Generator[Truth]:
    """An undisturbed run on an honest disk."""
    ranks = Ranks(make_disk(tmp_path_factory.mktemp("honest")), pause_s=0)
    assert ranks.end(ranks.start(honest(), honest())).codes == (0, 0)
    yield results(ranks)


class Lie(NamedTuple):
    """A lie in the files of the save of step 4. cause: what is said of the save; "": it works."""

    kind: str
    seed: int = 0
    for_s: float = 0.0
    cause: int = 0


WRITES = [
    Lie("short"),
    *(Lie("stripe", seed, cause=errno.ENOSPC) for seed in range(2)),
    *(Lie("fsync", seed, cause=errno.EIO) for seed in range(4)),
    *(Lie("quota", seed, cause=errno.EDQUOT) for seed in range(2)),
    Lie("slow", for_s=0.5),
]


@pytest.mark.full
@pytest.mark.parametrize("lie", WRITES, ids=lambda lie: f"{lie.kind}-{lie.seed}")
def test_a_save_is_whole_or_said_and_a_killed_run_goes_on_with_every_number(disk, truth, lie):
    ranks = Ranks(disk, "checkpoint.on_error=continue")
    # every file is written in parts; the others lie in one save
    match = "" if lie.kind == "short" else "step_000004"
    lying = ranks.lives(lie.kind, match=match, seed=lie.seed, for_s=lie.for_s)
    _, (text, _) = ranks.kill_after(STEPS - 1, ranks.start(*lying))
    whole = ranks.whole_steps()
    assert 2 in whole and (4 in whole) == (not lie.cause)
    if lie.cause:
        (line,) = (line for line in text.splitlines() if NOT_SAVED in line)
        assert os.strerror(lie.cause) in line and line.endswith("(checkpoint.on_error: continue)")
        # the file, or of a flush of names the folder
        assert re.search(r"'\S*step_000004\.tmp-\w+(/rank\d+\.safetensors|/manifest\.json)?'", line)
    assert ranks.end(ranks.start(honest(), honest())).codes == (0, 0)
    assert results(ranks) == truth


@pytest.mark.full
def test_a_save_that_fails_ends_the_run_where_it_is_to(disk, truth):
    ranks = Ranks(disk, "checkpoint.on_error=stop")
    codes, texts = ranks.end(ranks.start(*ranks.lives("stripe", match="step_000004", seed=1)))
    assert all(codes) and any(NOT_SAVED in x and os.strerror(errno.ENOSPC) in x for x in texts)
    assert ranks.whole_steps() == [2]
    assert ranks.end(ranks.start(honest(), honest())).codes == (0, 0)
    assert results(ranks) == truth


@pytest.mark.full
@pytest.mark.parametrize("kind", ["stale", "listing", "late"])
def test_other_nodes_go_on_from_the_last_save_though_they_see_an_old_state(disk, truth, kind):
    ranks = Ranks(disk, pause_s=1.5)
    seen_after_s = 6.0  # of names; sizes and listings are old for good
    for_s = seen_after_s if kind == "late" else 3600.0
    killed = ranks.kill_after(STEPS - 1, ranks.start(*ranks.lives(kind, for_s=for_s)))
    saved = max(ranks.whole_steps(), default=0)
    assert saved >= 2, killed
    if kind == "late":
        newest = latest(ranks.checkpoints)
        assert newest is not None
        for_s += time.time() - newest.stat().st_ctime
    lying = ranks.lives(kind, ("n2", "n3"), for_s=for_s)
    codes, texts = ranks.end(ranks.start(*lying))
    assert codes == (0, 0), texts
    assert f"resumed after step {saved} of {STEPS}" in texts[0], texts[0]
    assert results(ranks) == truth


@pytest.mark.full
def test_a_lock_that_nodes_do_not_share_lets_no_second_run_in(disk, truth):
    ranks = Ranks(disk, pause_s=1.0)
    first = ranks.start(*ranks.lives("flock"))
    lock = disk.folder / ".run.running"
    until_s = time.monotonic() + LIMIT_S
    while not lock.exists():
        assert time.monotonic() < until_s and first[0].poll() is None
        time.sleep(0.05)
    codes, texts = ranks.end(ranks.start(*ranks.lives("flock", ("n2", "n3"))))
    assert codes[0] == 2 and codes[1], codes
    assert "is under way elsewhere" in texts[0] and " on n0 (" in texts[0], texts[0]
    assert ranks.end(first).codes == (0, 0)
    assert results(ranks) == truth


HOLD = """
import sys
from pathlib import Path
from torchdistpackage.launch.lock import hold
with hold(Path(sys.argv[1]), "a run"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["short", "stale", "late"])
def test_a_lock_is_taken_once_on_a_disk_that_lies(disk, kind):
    """Its text is whole, and another node that sees it late or old waits and is told of it."""
    words = [sys.executable, "-c", HOLD, disk.folder / "lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    first = subprocess.Popen(words, env=disk.env(kind, for_s=2), **pipes)
    try:
        assert first.stdout.readline() == "held\n"
        second = subprocess.run(
            words, env=disk.env(kind, "n1", for_s=2), capture_output=True, text=True, cwd=ROOT
        )
        assert second.returncode and "HeldError" in second.stderr, second
        assert f"process {first.pid}," in second.stderr
    finally:
        assert first.communicate("")[0] == "" and first.returncode == 0


TOKENIZE = """
import sys, time
from pathlib import Path
from tests.data.texts import json_lines
from torchdistpackage.data.tokens import token_cache

texts, cache, node, make = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], token_cache._make

def both(*args):
    (cache / f"here.{node}").touch()
    while len(list(cache.glob("here.*"))) < 2:
        time.sleep(0.01)
    make(*args)

token_cache._make = both
text = token_cache.tokenized(json_lines(texts / node, ["a b", "c"] * 50), cache)
print(text.folder)
"""


def test_two_nodes_that_make_one_entry_of_the_cache_at_once_both_get_it(disk, tmp_path):
    """The lock does not hold the second one back, and its entry is there when it has made its."""
    texts, cache = tmp_path / "texts", disk.folder / "cache"
    for node in ("n0", "n1"):
        (texts / node).mkdir(parents=True)
    cache.mkdir()
    both = [
        subprocess.Popen(
            [sys.executable, "-c", TOKENIZE, texts, cache, node],
            env=disk.env("flock", node) | {"PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in ("n0", "n1")
    ]
    (one, other) = (process.communicate(timeout=LIMIT_S)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0], one + other
    assert one == other and [path for path in cache.iterdir() if path.is_dir()] == [Path(one[:-1])]
