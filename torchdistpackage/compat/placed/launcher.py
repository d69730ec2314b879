"""`launch`: runs a placed program on new ranks of this machine, or in this rank."""

import inspect
import logging
import os
from collections.abc import Callable, Sized
from pathlib import Path
from typing import cast

from torchdistpackage.comm.random import seed_all
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.placed.place import Devices, devices_by_rank, problem_of
from torchdistpackage.compat.placed.program import DEBUG, finish_all
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import PlacementError
from torchdistpackage.launch.entrypoint import PackedCall, StopLoading, main_is_loading
from torchdistpackage.launch.workers import run_local, show_line

# loaded once, before the ranks are forked; the first optimizer imports torch._dynamo
_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", __name__)


def launch(
    main: Callable[..., object],
    devices: Devices,
    seed: int = 42,
    *,
    num_procs: int | None = None,
    backend: str | None = None,
    log_dir: str | Path | None = None,
    debug: bool | None = None,
    timeout_s: float | None = None,
    prepare: Callable[[int], object] | None = None,
) -> list[object]:
    """Run `main(devices)` on `num_procs` ranks; returns the results by rank.

    Under torchrun or srun this process is a rank already: it starts no ranks, and the list has only
    its own result. All ranks seed Python, NumPy and torch the same, and print here.

    devices: one device for each rank ("cpu", "cuda:0"), a list for each, or k times as many.
    num_procs: default one for each entry of `devices`.
    backend: None: gloo if all devices are CPUs, else nccl if each rank has its own GPU.
    log_dir: each rank logs to `rank<r>.log` there, and what ranks other than 0 print goes to
        `rank<r>.restart0.log`.
    debug: compare the operations of all ranks; slow. None: as TDP_PLACED_DEBUG says.
    timeout_s: how long a rank waits for another one.
    prepare: called with its number on each rank first; a function at the top of a module.

    Raises:
        PlacementError: `main` does not take one argument, a device does not exist, or `num_procs`,
            `seed` or `timeout_s` is out of range.
        RankError: a rank failed; the text ends with its traceback. All are gone then.
        LaunchError: no process can be started.
    """
    if main_is_loading():
        raise StopLoading  # a script without a guard, in a rank
    if problems := _problems(main, devices, seed, num_procs, timeout_s):
        raise PlacementError(f"launch: {'; '.join(problems)}")
    num_args = len(inspect.signature(main).parameters)
    if num_args != 1:
        raise PlacementError(
            f"The target function must have exactly 1 argument but got {num_args}: it is called "
            f"with the list of devices"
        )
    is_rank = detect(os.environ).source != "alone"
    num = len(devices) if num_procs is None else num_procs
    by_rank = devices_by_rank(devices, num) if not is_rank else []
    if problems := [p for rank_devices in by_rank for d in rank_devices if (p := problem_of(d))]:
        raise PlacementError("; ".join(dict.fromkeys(problems)))
    if backend is None and "cuda" not in str(devices):
        backend = "gloo"
    folder = None if log_dir is None else str(Path(log_dir).resolve())
    options = (devices, seed, backend, folder, debug, timeout_s, prepare)
    if is_rank:
        return [_run(main, *options)]
    call = PackedCall.of(main)
    results = run_local(
        _as_rank,
        (call, *options),
        num_procs=num,
        preload=_PRELOAD,
        log_dir=None if folder is None else Path(folder),
        on_line=show_line,
    )
    return [call.unpack_result(cast(bytes, result)) for result in results]


def _problems(
    main: object, devices: object, seed: object, num_procs: object, timeout_s: object
) -> list[str]:
    """Return the problems of each argument of `launch`."""
    problems = list[str]()
    if not callable(main):
        problems.append(f"what is run is a function of the devices, not {main!r}")
    if not isinstance(devices, Sized):
        problems.append(f"devices must be a list with at least one device, not {devices!r}")
    if not isinstance(seed, int):
        problems.append(f"seed is {seed!r}; give an integer")
    if num_procs is not None and (not isinstance(num_procs, int) or num_procs < 1):
        problems.append(
            f"num_procs is {num_procs!r}; give 1 or more, or None for one process for each device"
        )
    if timeout_s is not None and (not isinstance(timeout_s, int | float) or not timeout_s > 0):
        problems.append(f"timeout_s is {timeout_s!r}; give seconds above 0, or None")
    return problems


def _as_rank(call: PackedCall, *options: object) -> bytes:
    return call.pack_result(_run(call.load(), *options))  # type: ignore[arg-type]


def _run(
    main: Callable[..., object],
    devices: Devices,
    seed: int,
    backend: str | None,
    log_dir: str | None,
    debug: bool | None,
    timeout_s: float | None,
    prepare: Callable[[int], object] | None,
) -> object:
    if debug is not None:
        os.environ[DEBUG] = str(int(debug))
    rank, *_ = setup_distributed(backend, timeout_s=timeout_s)
    handler = None if log_dir is None else log_to_file(Path(log_dir), rank)
    if prepare is not None:
        prepare(rank)
    seed_all(seed)
    try:
        result = main(devices)
        finish_all()
    finally:
        if handler is not None:
            handler.remove()
    tpc.destroy()
    leave()
    return result


FORMAT = "%(asctime)s rank{rank} %(levelname)s %(name)s:%(lineno)d %(message)s"


class RankLog:
    """The log file of this rank at `path`; `remove()` closes it."""

    def __init__(self, path: Path, rank: int, level: int | str):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(path, encoding="utf-8")
        self._handler.setLevel(level)
        self._handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank)))
        root = logging.getLogger()
        self._level = root.level
        root.addHandler(self._handler)
        root.setLevel(min(root.level, self._handler.level))

    def remove(self) -> None:
        """Close the file, and restore the root logger."""
        root = logging.getLogger()
        root.removeHandler(self._handler)
        root.setLevel(self._level)
        self._handler.close()


def log_to_file(folder: Path, rank: int, level: int | str = logging.INFO) -> RankLog:
    """Write this rank's log records from `level` on to `rank<r>.log` in `folder`."""
    return RankLog(folder / f"rank{rank}.log", rank, level)
