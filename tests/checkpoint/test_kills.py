"""200 kills as one list: of any rank, at named points and at random, in saves beside the steps and
in turn, local copies and prunes. They cost the steps since the last commit, and nothing else.

A life of a run is killed in its first start and in its second, which comes back from the first, and
ends in its third. A failure names its seed; `lives` draws the same kills from it again.
"""

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint.moments import NEVER, Moments
from tests.train import parity
from torchdistpackage.checkpoint.commit import candidates, latest, step_of
from torchdistpackage.checkpoint.node_folder import current_id
from torchdistpackage.errors import RankError
from torchdistpackage.train.build import make_local_copies, make_loop
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.train_state import resume

BASE = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8"),
    *("model.dropout=0.2", "pipeline.microbatches=2", "train.generate_tokens=0", "log.every=100"),
    *("train.eval_every=0", "train.eval_batches=1", "log.plot=false"),
    *("data.name=null", "data.target=tests.train.sources:UnevenTokens"),
    "data.args={seq_len: 16, vocab: 256}",
]  # fmt: skip
EACH = ["checkpoint.save_every=1", "checkpoint.keep_last=2"]
NODE = "TDP_TEST_NODE"
NUM_LIVES, STEPS = 100, 12


@dataclass(frozen=True)
class Kind:
    """A run to kill. loses: the most steps since the last commit. copies: on disks of two nodes."""

    num_ranks: int
    loses: int
    words: tuple[str, ...]
    copies: bool = False


KINDS = {
    "beside": Kind(2, 2, (*EACH, "checkpoint.async_mode=async", "parallel.zero=1")),
    "in turn": Kind(2, 1, (*EACH, "checkpoint.async_mode=disabled", "parallel.pipe=2")),
    "copies": Kind(2, 2, ("checkpoint.save_every=3", "parallel.zero=1"), copies=True),
    "copies of four": Kind(4, 2, ("checkpoint.save_every=4", "parallel.pipe=2"), copies=True),
}


@dataclass(frozen=True)
class Kill:
    """Of `victim`, at the time `at` that it passes `point`, or after `at` of the seconds that a run
    takes. loses_disk: with the folder of its node."""

    victim: int
    point: str
    at: float
    loses_disk: bool


@dataclass(frozen=True)
class Whole:
    """A run that nobody kills: its rows, how long it took, how often each rank passed a point."""

    rows: list[tuple[int, float, float]]
    took_s: float
    counts: list[Counter[str]]


def life(seed: int, whole: Callable[[str], Whole]) -> tuple[str, list[Kill]]:
    """The run of a seed, and its two kills."""
    draw = random.Random(seed)
    name = draw.choice(sorted(KINDS))
    kills: list[Kill] = []
    for share in (1.0, 0.4):  # the second start has less to do
        victim = draw.randrange(KINDS[name].num_ranks)
        counts = whole(name).counts[victim]
        point, at = "", draw.random() * share
        if draw.random() < 0.6:
            point = draw.choice(sorted(counts))
            at = int(at * counts[point])
        # two nodes lost in a row, before the first has its copies again, lose them
        may_lose = KINDS[name].copies and not any(kill.loses_disk for kill in kills)
        kills.append(Kill(victim, point, at, may_lose and draw.random() < 0.5))
    return name, kills


def train(
    folder: Path, kind: Kind, kill: Kill | None, took_s: float
) -> tuple[int, float, Counter[str]]:
    """Go on to the last step: the step it began after, the seconds, and the points passed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ[NODE] = f"node{rank * 2 // size}"
    words = [*BASE, f"train.steps={STEPS}", *kind.words]
    if kind.copies:
        words += [f"checkpoint.local_dir={folder}/disks/${NODE}", "checkpoint.local_every=1"]
    dies = kill is not None and kill.victim == rank
    moments = Moments(int(kill.at) if dies and kill.point else NEVER, kill.point if dies else "")
    run, began_s = parity.trainer(words), time.monotonic()
    end = None
    if dies and not kill.point:
        end = threading.Timer(kill.at * took_s, os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()
    with contextlib.ExitStack() as stack:
        if end is not None:
            stack.callback(end.cancel)  # or it ends a rank of another test
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        moments.watch(patch)
        local = make_local_copies(run.plan, folder)
        state = resume(run, folder, "auto", local)
        began = state.step
        make_loop(run, state, folder, local=local).run()
    return began, time.monotonic() - began_s, moments.counts


def rows(folder: Path) -> list[tuple[int, float, float]]:
    found = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"]) for row in found]


def committed(folder: Path) -> int:
    """The step of the newest checkpoint, of the run's own and those of the nodes that are left,
    each of which has all files."""
    own = folder / "checkpoints"
    found = latest(own, checksums=True)
    paths = [] if found is None else [found]
    if start := current_id(own):
        for node in (folder / "disks").glob(f"node*/tdp-*-{start}"):
            paths += candidates(node)
    return max(map(step_of, paths), default=0)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory) -> Callable[[str], Whole]:
    known: dict[str, Whole] = {}

    def of(name: str) -> Whole:
        if name not in known:
            folder, kind = tmp_path_factory.mktemp("whole"), KINDS[name]
            found = ranks(kind.num_ranks).run(train, folder, kind, None, 0.0)
            took_s = max(took for _, took, _ in found)
            known[name] = Whole(rows(folder), took_s, [counts for _, _, counts in found])
        return known[name]

    return of


@pytest.mark.parametrize(
    "seeds",
    [
        range(1, 2),
        *(
            pytest.param(range(at, at + 20), marks=pytest.mark.full)
            for at in range(0, NUM_LIVES, 20)
        ),
    ],
    ids=lambda seeds: f"{seeds.start}..{seeds.stop - 1}",
)
def test_a_kill_costs_the_steps_since_the_last_commit_and_nothing_else(
    ranks, tmp_path, whole, seeds
):
    killed = 0
    for seed in seeds:
        name, kills = life(seed, whole)
        kind, expected = KINDS[name], whole(name)
        run, folder = ranks(kind.num_ranks).run, tmp_path / f"seed{seed}"
        what = f"seed {seed}, {name}: {kills}"
        folder.mkdir()
        for number, kill in enumerate([*kills, None]):
            saved = committed(folder)
            before = rows(folder) if (folder / "metrics.jsonl").exists() else []
            reached = before[-1][0] if before else 0
            if number and killed:
                assert saved >= reached - kind.loses, f"{what}, start {number}"
            try:
                found = run(train, folder, kind, kill, expected.took_s)
            except RankError as error:
                assert "SIGKILL" in str(error), f"{what}: {error}"
                killed += 1
                if kill is not None and kill.loses_disk:
                    node = kill.victim * 2 // kind.num_ranks
                    shutil.rmtree(folder / "disks" / f"node{node}", ignore_errors=True)
            else:
                assert {began for began, _, _ in found} == {saved}, f"{what}, start {number}"
        assert rows(folder) == expected.rows, what
        left = [path.name for path in (folder / "checkpoints").iterdir()]
        # they go with the next save, and a run that was at its end makes none
        assert saved == STEPS or all("." not in name for name in left), f"{what}: {left}"
        assert not list((folder / "disks").glob("*/tdp-*")), what
        shutil.rmtree(folder)
    assert killed >= 1.5 * len(seeds), "most do die before their run ends"
    print(f"{killed} kills")
