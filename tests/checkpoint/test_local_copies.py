"""Copies on the nodes' own disks: a node that is lost, with its folder, costs `local_every` steps.

A node is a folder here too, named by a variable of its ranks. Each run is compared with one that
nothing happened to, bit for bit, with dropout.
"""

import errno
import os
import pickle
import shutil
import signal
import socket
import sys
import time
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.moments import NEVER, Moments
from tests.checkpoint.test_kill import params_of, recover
from tests.tells import tells
from tests.train import parity
from torchdistpackage.checkpoint import file_exchange, local_copies
from torchdistpackage.checkpoint.commit import candidates, damage, latest, step_of
from torchdistpackage.checkpoint.local_copies import LocalCopies, _divided, _named
from torchdistpackage.checkpoint.manifest import FileFacts
from torchdistpackage.checkpoint.node_folder import (
    expanded,
    folder_of,
    make_folder,
    remove_stale,
    renew_id,
)
from torchdistpackage.checkpoint.nodes import neighbours
from torchdistpackage.checkpoint.save import file_name, start_save
from torchdistpackage.checkpoint.snapshot import HostCopies
from torchdistpackage.checkpoint.writer import write_snapshot
from torchdistpackage.errors import CheckpointError, RankError
from torchdistpackage.topology.mesh import topology
from torchdistpackage.train.build import make_local_copies, make_loop
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.train_state import begin_save, resume

BASE = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "data.seq_len=16", "data.global_batch=8"),
    *("model.dropout=0.2", "pipeline.microbatches=2", "train.generate_tokens=0", "log.every=100"),
    *("train.steps=9", "train.eval_every=0", "train.eval_batches=1", "checkpoint.save_every=0"),
    *("log.plot=false", "data.name=null", "parallel.zero=1", "checkpoint.async_mode=async"),
    "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 256}",
]  # fmt: skip
NODE = "TDP_TEST_NODE"


class Dies(Callback):
    """Ends these ranks with step `at`."""

    def __init__(self, ranks: tuple[int, ...], at: int):
        self.ranks, self.at = ranks, at

    def on_issued(self, loop: Loop, step: int) -> None:
        if step == self.at and loop.trainer.rank in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, num_nodes: int, extra: list[str], victims: tuple[int, ...] = (), at: int = 0
) -> tuple[int, str]:
    """Go on to the last step: the step it began after, and what was noted of saves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ[NODE] = f"node{rank * num_nodes // size}"
    place = [f"checkpoint.local_dir={folder}/disks/${NODE}", "checkpoint.local_every=2"]
    run = parity.trainer([*BASE, *place, *extra])
    local = make_local_copies(run.plan, folder)
    state = resume(run, folder, "auto", local)
    began, said = state.step, list[str]()
    loop = make_loop(run, state, folder, more=[Dies(victims, at)], local=local)
    loop.saver.note = said.append
    loop.run()
    return began, "\n".join(said)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def copies(folder: Path, node: int) -> list[Path]:
    """What is in the folders of runs on a node, newest first."""
    return [
        x
        for run in sorted((folder / "disks" / f"node{node}").glob("tdp-*"))
        for x in candidates(run)
    ]


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> list[tuple[int, float, float]]:
    folder = tmp_path_factory.mktemp("whole")
    assert [began for began, _ in ranks(4).run(train, folder, 2, [])] == [0] * 4
    assert copies(folder, 0) == copies(folder, 1) == [], "removed at the end"
    found = latest(folder / "checkpoints")
    assert found is not None and step_of(found) == 9, "a run with copies alone is saved at its end"
    return losses(folder)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["async", pytest.param("disabled", marks=pytest.mark.full)])
@pytest.mark.parametrize("lost", [1, 0])
def test_a_lost_node_costs_at_most_local_every_steps(ranks, tmp_path, undisturbed, lost, mode):
    """Its ranks are killed and its folder is gone; what was on it comes from its neighbour."""
    extra = [f"checkpoint.async_mode={mode}"]
    victims = (2 * lost, 2 * lost + 1)
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(4).run(train, tmp_path, 2, extra, victims, 7)
    for node in (0, 1):
        for path in copies(tmp_path, node):
            assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(tmp_path / "disks" / f"node{lost}")
    newest = step_of(copies(tmp_path, 1 - lost)[0])
    assert 7 - newest <= 2 + (mode == "async"), "one may be under way"
    assert [began for began, _ in ranks(4).run(train, tmp_path, 2, extra)] == [newest] * 4
    assert losses(tmp_path) == undisturbed
    assert not list((tmp_path / "disks").glob("*/*"))


def test_neighbours_of_uneven_nodes_keep_each_file_once():
    nodes = ((0, 1, 2), (3,), (4, 5))
    kept = {rank: neighbours(nodes, rank) for rank in range(6)}
    assert [kept[rank][1] for rank in range(6)] == [(3,), (), (), (4, 5), (0, 2), (1,)]
    for rank, (keeper, _) in kept.items():
        assert keeper is not None and rank in kept[keeper][1]
    assert neighbours(((0, 1),), 1) == (None, ())


def test_a_save_goes_to_the_run_folder_by_the_local_copy_with_the_same_bytes(ranks, tmp_path):
    """Also one that is due where no local copy is."""
    whole = ["checkpoint.save_every=3", "checkpoint.keep_last=9"]
    off = ["checkpoint.local_dir=null", "checkpoint.local_every=0"]
    found = []
    for name, extra in (("direct", [*whole, *off]), ("by copies", whole)):
        folder = tmp_path / name
        folder.mkdir()
        ranks(2).run(train, folder, 2, extra)
        top = folder / "checkpoints"
        found.append({str(p.relative_to(top)): p.read_bytes() for p in top.glob("*/*")})
    assert sorted({name.partition("/")[0] for name in found[0]}) == [
        "step_000003", "step_000006", "step_000009"
    ]  # fmt: skip
    assert found[0] == found[1]


def kept(folder: Path, num_nodes: int, steps: tuple[int, ...], extra: tuple[str, ...] = ()) -> None:
    """Train a little, and copy these steps, of which some are saved in the run folder before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ[NODE] = f"node{rank * num_nodes // size}"
    run = parity.trainer([*BASE, *extra])
    local = LocalCopies(f"{folder}/disks/${NODE}", folder / "checkpoints", "gpt")
    state = resume(run, folder, "auto", local)
    for step in steps:
        run.train_step(step).wait()
        state.step = step
        begin_save(run, state, local).finish()
    run.close()


def found_again(folder: Path, num_nodes: int, extra: tuple[str, ...] = ()) -> int:
    """The step that a start would go on from."""
    return found_and_noted(folder, num_nodes, extra)[0]


def found_and_noted(
    folder: Path, num_nodes: int, extra: tuple[str, ...] = ()
) -> tuple[int, list[str]]:
    """The same with what is noted of the copies."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ[NODE] = f"node{rank * num_nodes // size}"
    run = parity.trainer([*BASE, *extra])
    local = LocalCopies(f"{folder}/disks/${NODE}", folder / "checkpoints", "gpt")
    step = resume(run, folder, "auto", local).step
    run.close()
    local.close()
    return step, local.notes


def spoil(folder: Path, node: int, step: int, rank: int) -> None:
    (path,) = (folder / "disks" / f"node{node}").glob(f"tdp-*/step_{step:06d}/rank0000{rank}.*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_is_damaged_comes_from_the_other_node_or_an_older_copy_does(ranks, tmp_path, caplog):
    ranks(2).run(kept, tmp_path, 2, (1, 2, 3))
    assert [step_of(x) for x in copies(tmp_path, 0)] == [3, 2], "two are kept"
    spoil(tmp_path, 0, 3, rank=0)  # node 1 has it too
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "disks", whole / "disks")
    shutil.copytree(tmp_path / "checkpoints", whole / "checkpoints")
    (first, notes), other = ranks(2).run(found_and_noted, whole, 2)
    assert other == (first, notes) and first == 3, "noted alike on all ranks"
    assert notes[:2] == [f"local copies of step {x} on 2 of 2 nodes" for x in (3, 2)]
    assert "step_000003/rank00000" in notes[2] and "not usable on " in notes[2]
    assert notes[3:] == [
        "local copies of step 3 are used, and have been copied into the run folder"
    ]
    spoil(tmp_path, 1, 3, rank=0)  # now nobody has
    (folder,) = (tmp_path / "disks" / "node1").glob("tdp-*")
    folder.rename(folder.with_name("away"))
    (first, notes), _ = ranks(2).run(found_and_noted, tmp_path, 2)
    assert first == 2 and f"{folder} is not there" in notes[0]
    assert notes[1] == "local copies of step 3 on 1 of 2 nodes"
    assert notes[-1] == "local copies of step 2 are used, and have been copied into the run folder"


def test_what_a_rank_reads_at_a_start_does_not_grow_with_the_ranks():
    """Each node has the files of two, of which each rank checked some; every rank gets its own."""
    sizes: dict[int, int] = {}
    for num_ranks in (32, 4096):
        names = [file_name(rank) for rank in range(num_ranks)]
        files = {name: FileFacts(1000 + i) for i, name in enumerate(names)}
        nothing = _named(())
        told = [
            (nothing, [names[i], names[(i + 8) % num_ranks]], files if i == 8 else None)
            for i in range(num_ranks)
        ]
        answers: Any = _divided(told).answers
        assert sorted(name for _, _, share in answers for name in share) == names
        assert {lost for _, lost, _ in answers} == {""}
        sizes[num_ranks] = max(len(pickle.dumps(answer)) for answer in answers)
        told = [(nothing, [], files if i == 8 else None) for i in range(num_ranks)]
        told[3] = (_named([f"{name} is damaged" for name in names]), [], None)
        first: Any = _divided(told).answers[0]
        notes, lost, _ = first
        assert len(notes) == 9 and notes[-1].endswith(f"usable: {num_ranks - 8} more")
        assert lost.startswith(f"{num_ranks} of its {num_ranks} files, such as {names[0]}")
    assert sizes[4096] <= sizes[32] + 32


@pytest.mark.full
def test_without_two_neighbours_the_run_folder_is_what_is_left(ranks, tmp_path):
    ranks(4).run(kept, tmp_path, 4, (1, 2))
    for name, lost, expected in (("apart", (0, 2), 2), ("neighbours", (1, 2), 0)):
        left = tmp_path / name
        shutil.copytree(tmp_path / "disks", left / "disks")
        shutil.copytree(tmp_path / "checkpoints", left / "checkpoints")
        for node in lost:
            shutil.rmtree(left / "disks" / f"node{node}")
        assert ranks(4).run(found_again, left, 4) == [expected] * 4, name


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", ["parallel.pipe=2", "parallel.zero=3", "parallel.tensor=2"])
def test_fewer_ranks_on_one_node_go_on_from_what_is_left_of_two(ranks, tmp_path, layout):
    ranks(4).run(kept, tmp_path, 2, (1, 2), (layout, "parallel.data=auto"))
    shutil.rmtree(tmp_path / "disks" / "node0")
    (tmp_path / "disks" / "node1").rename(tmp_path / "disks" / "node0")
    assert ranks(2).run(found_again, tmp_path, 1, ("parallel.data=2",)) == [2, 2]
    found = latest(tmp_path / "checkpoints", checksums=True)
    assert found is not None and step_of(found) == 2


def test_folders_of_starts_that_nobody_resumes_from_are_removed_and_no_others(tmp_path):
    root, run, other, gone = (tmp_path / x for x in ("disk", "run", "other", "gone"))
    old = time.time() - 3600
    made = {}
    for name, owner in (("run", run), ("other", other), ("gone", gone)):
        for age in ("old", "new"):
            made[name, age] = folder_of(root, name, renew_id(owner / "checkpoints"))
            make_folder(made[name, age], owner / "checkpoints", made[name, age].name[-16:])
            if name != "run":
                os.utime(made[name, age], (old, old))
    shutil.rmtree(gone)
    theirs, foreign = root / "tdp-run-0123456789abcdef", root / "data"
    theirs.mkdir(mode=0o755)
    foreign.mkdir()
    removed = remove_stale(made["run", "new"], run / "checkpoints")
    assert removed == sorted([made["run", "old"], made["other", "old"], *(
        made["gone", age] for age in ("old", "new"))])  # fmt: skip
    left = {made["run", "new"], made["other", "new"], theirs, foreign}
    assert set(root.iterdir()) == left
    os.utime(made["other", "new"], (time.time() - 90_000,) * 2)
    assert remove_stale(made["run", "new"], run / "checkpoints") == [made["other", "new"]]
    assert made["run", "new"].stat().st_mode & 0o777 == 0o700


def test_a_folder_of_each_node_is_named_in_full_and_its_variables_are_set():
    assert expanded("/shm/$USER/${JOB}x", {"USER": "me", "JOB": "7"}) == Path("/shm/me/7x")
    with pytest.raises(CheckpointError, match=r"local_dir=/shm/\$A\$B: A, B is not set here"):
        expanded("/shm/$A$B", {"B": ""})
    with pytest.raises(CheckpointError, match="it is tmp/x on this node; use an absolute path"):
        expanded("$A/x", {"A": "tmp"})


def shared_disk(folder: Path) -> str:
    """What is said where two hosts see one folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{dist.get_rank()}")
        try:
            LocalCopies(str(folder), folder / "checkpoints", "gpt")
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_folder_that_nodes_share_is_refused(ranks, tmp_path):
    first, second = ranks(2).run(shared_disk, tmp_path)
    assert tells(first, "host0", "host1")
    assert first == second
    assert not list(tmp_path.glob(".tdp-*"))


def full(folder: Path, extra: list[str], where: str) -> str:
    """Train while rank 1 cannot write step 4, its own file or what it keeps; what is said."""
    with pytest.MonkeyPatch.context() as patch:
        if where == "own":
            patch.setattr(local_copies, "write_snapshot", no_room)
        else:
            patch.setattr(file_exchange, "FileIO", no_room)
        try:
            return train(folder, 2, extra)[1]
        except CheckpointError as error:
            return f"stopped: {error}"


def no_room(path: Path, *args: Any) -> Any:
    if dist.get_rank() == 1 and "step_000004" in str(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return FileIO(path, *args) if args == ("w",) else write_snapshot(path, *args)


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["own", "kept"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_full_disk_of_a_node_stops_all_or_is_said_and_the_run_folder_gets_a_checkpoint(
    ranks, tmp_path, where, goes_on
):
    extra = ["checkpoint.save_every=4", "checkpoint.keep_last=9"]
    extra += ["checkpoint.on_error=continue"] if goes_on else []
    found = (text.splitlines() for text in ranks(2).run(full, tmp_path, extra, where))
    # a slow machine says besides that a save waited for the one before
    said = [next(x for x in lines if not x.startswith("save of step")) for lines in found]
    assert said[0] == said[1], "all ranks say the same"
    assert tells(said[0], "step 4", "checkpoint.local_dir")
    assert "failed on rank 1" in said[0] and "node1/tdp-" in said[0]
    assert "No space left on device" in said[0]
    assert said[0].startswith("no local copy: " if goes_on else "stopped: ")
    saved = [step_of(x) for x in candidates(tmp_path / "checkpoints")]
    if not goes_on:
        assert saved == []
    else:
        assert saved[0] == 9 and set(saved) & {5, 6, 7, 8}, "after the step after that was known"
        assert 4 not in saved
        assert {damage(x, checksums=True) for x in candidates(tmp_path / "checkpoints")} == {None}


def moments_of_copy(folder: Path, step: int, victim: int, kill_at: int) -> int:
    """Copy weights of `step`; the number of moments that passed on this rank."""
    rank = dist.get_rank()
    os.environ[NODE] = f"node{rank}"
    local = LocalCopies(f"{folder}/disks/${NODE}", folder / "checkpoints", "gpt")
    local.recover(None)
    local.begin()
    moments = Moments(kill_at if rank == victim else NEVER)
    for at in (step, step + 1):
        params, world = params_of(at), topology((("tensor", 2),), 2)
        with pytest.MonkeyPatch.context() as patch:
            if at > step:
                moments.watch(patch)
            common: dict[str, Any] = {"params": params, "topology": world, "rank": rank}
            start_save(local, step=at, tokens=at, copies=HostCopies(), **common).finish()
    return moments.passed


def recovered(folder: Path) -> int:
    rank = dist.get_rank()
    os.environ[NODE] = f"node{rank}"
    local = LocalCopies(f"{folder}/disks/${NODE}", folder / "checkpoints", "gpt")
    path = local.recover(None)
    assert path is not None and recover(str(folder / "checkpoints")) == (step_of(path),) * 2
    local.close()
    return step_of(path)


@pytest.mark.few(1)
@pytest.mark.parametrize("victim", [1, 0])
@pytest.mark.parametrize("most", [3, pytest.param(sys.maxsize, marks=pytest.mark.full)])
def test_a_copy_that_is_killed_anywhere_leaves_it_or_the_one_before(ranks, tmp_path, victim, most):
    """Both nodes' folders are there afterwards, and then that of the victim is not."""
    run = ranks(2).run
    num_moments = run(moments_of_copy, tmp_path / "counted", 1, victim, NEVER)[victim]
    num_kills, outcomes = min(num_moments, most), list[int]()
    for kill_at in (i * (num_moments - 1) // (num_kills - 1) for i in range(num_kills)):
        folder = tmp_path / f"killed{kill_at}"
        with pytest.raises(RankError, match="SIGKILL"):
            run(moments_of_copy, folder, 1, victim, kill_at)
        lost = tmp_path / f"lost{kill_at}"
        shutil.copytree(folder, lost)
        shutil.rmtree(lost / "disks" / f"node{victim}")
        found = run(recovered, folder)
        assert found[0] == found[1] in (1, 2), f"killed at moment {kill_at} of {num_moments}"
        assert run(recovered, lost)[0] in (1, found[0])
        outcomes.append(found[0])
    assert outcomes == sorted(outcomes) and outcomes[0] == 1
    assert num_moments >= 8
