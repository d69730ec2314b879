"""A disk that is full, over quota, read-only or gone: all ranks stop, or go on and say so.

Disks are file systems of their own, mounted for the test; the save after the trouble counts.
"""

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint import test_async
from tests.checkpoint.test_async import BASE
from tests.train import parity
from torchdistpackage.checkpoint import save as saves
from torchdistpackage.checkpoint.commit import candidates, damage, step_of
from torchdistpackage.checkpoint.writer import write_snapshot
from torchdistpackage.errors import CheckpointError
from torchdistpackage.train.build import make_local_copies, make_loop
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.train_state import resume

SIZE_BYTES = 8 << 20
STEPS = 10
WORDS = [*BASE, f"train.steps={STEPS}", "checkpoint.save_every=2", "train.eval_every=0"]
WORDS += ["checkpoint.async_mode=async", "parallel.zero=1"]


def mount(*words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["mount", *words], capture_output=True, timeout=60, check=False, **more)


def make_disk(path: Path) -> bytes:
    """Mount a file system of SIZE_BYTES; why it cannot be, if it cannot."""
    path.mkdir(exist_ok=True)
    return mount("-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(path)).stderr


def remove_disk(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=60)


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    path = tmp_path / "disk"
    if why := make_disk(path):
        pytest.skip(f"no file system can be mounted here: {why.decode().strip()}")
    yield path
    while os.path.ismount(path):
        remove_disk(path)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb") as file:
        left = os.statvfs(disk)
        file.write(bytes(left.f_bavail * left.f_bsize))


def limit_files(size_bytes: int) -> None:
    """Let this process write no larger file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def bring_back(disk: Path) -> None:
    assert not make_disk(disk)
    (disk / "checkpoints").mkdir()


STRIKES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "full": (fill, lambda disk: (disk / "ballast").unlink(), os.strerror(errno.ENOSPC)),
    "read-only": (
        lambda disk: mount("-o", "remount,ro", str(disk)),
        lambda disk: mount("-o", "remount,rw", str(disk)),
        os.strerror(errno.EROFS),
    ),
    "gone": (remove_disk, bring_back, "which is not there; mount its disk"),
    # on any Linux and without a mount: no file may grow to the size of the checkpoint's largest
    "limit": (
        lambda disk: limit_files(max(x.stat().st_size for x in disk.rglob("*")) // 2),
        lambda disk: limit_files(resource.RLIM_INFINITY),
        os.strerror(errno.EFBIG),
    ),
    # needs a kernel with quotas of disks, so the write is patched
    "quota": (lambda disk: None, lambda disk: None, os.strerror(errno.EDQUOT)),
}
"""What happens to a disk, what mends it, and what is said of it."""


class Strikes(Callback):
    """Rank 0 spoils the disk when `is_time`, and mends it when that has been said."""

    def __init__(self, how: str, disk: Path, said: list[str], at: int):
        self._todo, self._disk, self._said, self._at = list(STRIKES[how][:2]), disk, said, at

    def _next(self, loop: Loop) -> None:
        action = self._todo.pop(0)
        if loop.trainer.rank == 0:
            action(self._disk)

    def on_save(self, loop: Loop, step: int, took_s: float) -> None:
        if step == self._at:
            self._next(loop)

    def on_issued(self, loop: Loop, step: int) -> None:
        if not self._at and step == 3:
            self._next(loop)
        if any(line.startswith("no ") for line in self._said) and len(self._todo) == 1:
            self._next(loop)


def over_quota(folder: Path, *args: Any) -> Any:
    if dist.get_rank() == 1 and folder.name.startswith("step_000004"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(folder))
    return write_snapshot(folder, *args)


def train(folder: Path, disk: Path, how: str, words: list[str], at: int) -> str:
    """Train to the end, or until a save stops it: what was said of saves. at: the save after which
    the disk is spoilt; 0: with step 3."""
    said: list[str] = []
    os.environ["TDP_TEST_NODE"] = f"node{dist.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        if how == "quota":
            patch.setattr(saves, "write_snapshot", over_quota)
        run = parity.trainer([*WORDS, *words])
        local = make_local_copies(run.plan, folder)
        state = resume(run, folder, "auto", local)
        loop = make_loop(run, state, folder, more=[Strikes(how, disk, said, at)], local=local)
        loop.saver.note = said.append
        try:
            assert loop.run() is not None
        except CheckpointError as error:
            said.append(f"stopped after step {loop.state.step}: {error}")
    return next(line for line in said if not line.startswith("save of step"))


def steps_of(folder: Path) -> list[int]:
    assert {damage(path, checksums=True) for path in candidates(folder)} <= {None}
    return [step_of(path) for path in candidates(folder)]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [how for how in STRIKES if how != "limit"])
@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_spoilt_disk_stops_all_ranks_or_is_said_and_training_goes_on(
    ranks, tmp_path, disk, how, on_error
):
    folder = tmp_path / "run"
    folder.mkdir()
    (disk / "checkpoints").mkdir()
    (folder / "checkpoints").symlink_to(disk / "checkpoints")
    first, second = ranks(2).run(train, folder, disk, how, [f"checkpoint.on_error={on_error}"], 2)
    assert first == second, "all ranks say the same"
    assert f"writing the checkpoint of step 4 to {folder / 'checkpoints'} failed on rank" in first
    assert STRIKES[how][2] in first
    reached = [row["step"] for row in read_metrics(folder / "metrics.jsonl")]
    if on_error == "stop":
        assert first.startswith("stopped after step ") and reached[-1] in (4, 5, 6)
        assert how == "gone" or steps_of(disk / "checkpoints") == [2]
        return
    assert first.startswith("no checkpoint: ")
    assert first.endswith("training goes on (checkpoint.on_error: continue)")
    assert reached == list(range(1, STEPS + 1))
    saved = steps_of(disk / "checkpoints")
    assert saved[0] == STEPS and 4 not in saved and (how == "gone" or saved[-1] == 2)


def train_twice(folder: Path) -> tuple[str, list[int], int]:
    """Train until no more can be written, and again once it can: what was said, what was saved."""
    try:
        stopped = train(folder, folder / "checkpoints", "limit", [], 2)
    finally:
        limit_files(resource.RLIM_INFINITY)
    saved = steps_of(folder / "checkpoints")
    dist.barrier()  # before the others go on
    run = parity.trainer(WORDS)
    state = resume(run, folder, "auto", None)
    first = state.step
    assert make_loop(run, state, folder).run() is not None
    return stopped, saved, first


def test_a_run_that_can_write_no_more_says_so_keeps_what_it_has_and_resumes(ranks, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for stopped, saved, first in ranks(2).run(train_twice, tmp_path):
        assert stopped.startswith("stopped after step ")
        assert "writing the checkpoint of step 4 to " in stopped
        assert STRIKES["limit"][2] in stopped
        assert saved == [2] and first == 2
    assert steps_of(tmp_path / "checkpoints")[0] == STEPS
    steps = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.full
def test_the_full_disk_of_a_node_is_said_and_the_run_folder_gets_a_checkpoint(
    ranks, tmp_path, disk
):
    """A local copy fails on one of two nodes; before the disk is mended the run folder has one."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "disks").mkdir()
    (tmp_path / "disks" / "node1").symlink_to(disk)
    local = f"checkpoint.local_dir={tmp_path}/disks/$TDP_TEST_NODE"
    words = [local, "checkpoint.local_every=1", "checkpoint.on_error=continue"]
    first, second = ranks(2).run(train, folder, disk, "full", words, 0)
    assert first == second and first.startswith("no local copy: writing the checkpoint of step ")
    assert "failed on rank 1" in first and os.strerror(errno.ENOSPC) in first
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][-1] == STEPS
    assert steps_of(folder / "checkpoints")[0] == STEPS


BYTES_A_SECOND = 100_000
"""Of a throttled disk: a checkpoint of BASE takes a second or two."""
LIMITS = Path("/sys/fs/cgroup/blkio")


@pytest.fixture
def slow_disk(tmp_path: Path) -> Generator[tuple[Path, Path]]:
    """A file system in a file, and the control group for whose processes it is slow."""
    image, disk = tmp_path / "image", tmp_path / "slow"
    group = LIMITS / f"tdp-test-{os.getpid()}"
    image.touch()
    os.truncate(image, 32 << 20)
    disk.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)
        if why := mount("-o", "loop", str(image), str(disk)).stderr:
            raise OSError(why.decode())
        group.mkdir()
    except (OSError, subprocess.CalledProcessError) as error:
        if os.path.ismount(disk):
            remove_disk(disk)
        pytest.skip(f"no disk can be mounted and slowed down here: {error}")
    device = disk.stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {BYTES_A_SECOND}"
    (group / "blkio.throttle.write_bps_device").write_text(limit)
    yield disk, group
    remove_disk(disk)
    group.rmdir()


def train_slowly(group: Path, folder: Path, words: list[str]) -> str:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        return test_async.train(folder, words)
    finally:
        (LIMITS / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.full
def test_a_slow_disk_loses_no_save_and_changes_no_byte(ranks, tmp_path, slow_disk):
    """The kernel holds the writers back, inside a flush; a step in between finds its save there."""
    disk, group = slow_disk
    (disk / "checkpoints").mkdir()
    words = ["parallel.zero=1", "checkpoint.async_mode=async"]
    found = []
    for name in ("quick", "slow"):
        folder = tmp_path / f"run-{name}"
        folder.mkdir()
        if name == "slow":
            (folder / "checkpoints").symlink_to(disk / "checkpoints")
            said = ranks(2).run(train_slowly, group, folder, words)
            assert all("save of step 4 waited " in x and "failed" not in x for x in said)
        else:
            ranks(2).run(test_async.train, folder, words)
        found.append(test_async.bytes_of(folder))
        assert steps_of(folder / "checkpoints") == [6, 4, 2]
    assert found[0] == found[1]
