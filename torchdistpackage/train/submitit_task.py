"""A run as a callable for submitit: `executor.submit(TrainingTask("run.yaml"))`. No torch.

Submitit keeps its protocol (`checkpoint`, its handler, its requeue), but only after all
ranks have saved. Its own handler would act in the middle of a step, on rank 0 alone.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import cast

from torchdistpackage.config.load import load
from torchdistpackage.errors import RankError
from torchdistpackage.launch.slurm.requeue import RequeueDecision, may_requeue, read_decision
from torchdistpackage.launch.slurm.restart_script import IGNORE_SIGNALS_UNTIL_READY
from torchdistpackage.run_files import RunDir

_KILLED_WITHIN_S = 300.0
"""Seconds in which Slurm should end the other ranks of a requeued job; after that they end by
themselves."""


class TrainingTask:
    """Calls `tdp train` in each task and returns the decision as text.

    config: path of the YAML file; overrides: `section.key=value`. Both are read in the job.
    """

    def __init__(self, config: str, *overrides: str) -> None:
        self.path = str(Path(config).absolute())
        self.overrides = overrides

    def __call__(self) -> str:
        """Run this task.

        Raises:
            RankError: the rank failed.
        """
        until_it_listens = ["sh", "-c", IGNORE_SIGNALS_UNTIL_READY, "task"]
        python = [sys.executable, "-u", "-P", "-m", "torchdistpackage", "train", self.path]
        env = {**os.environ, "TDP_BATCH": "1"}
        with _Relay() as relay:
            process = subprocess.Popen([*until_it_listens, *python, *self.overrides], env=env)
            relay.child = process
            # signals are relayed to the child meanwhile; its exit code is the task's
            code = process.wait()
        rank = os.environ.get("SLURM_PROCID", "0")
        if code:
            raise RankError(f"rank {rank} ended with code {code}; its log is in the run folder")
        files = RunDir(load(self.path, self.overrides).run.folder.absolute())
        decision = read_decision(files, os.environ)
        if (
            decision is not None
            and decision.word is RequeueDecision.REQUEUE
            and may_requeue(os.environ)
        ):
            if rank == "0":
                relay.hand_over()  # does not come back
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or Slurm would have to wait for SIGKILL
            time.sleep(_KILLED_WITHIN_S)
            raise RankError(
                f"rank {rank} outlived the requeue of its job by {_KILLED_WITHIN_S} s; look at "
                "this node, and cancel the job if it hangs"
            )
        return str(decision or "")

    def checkpoint(self) -> object:
        """Return the task that submitit requeues: the same one, because it resumes by itself."""
        # only where submitit runs us; it is not a dependency of training
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class _Relay:
    """Passes signals to the child instead of to the handlers that submitit installed."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self._handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> "_Relay":
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP):
            self._handlers[signum] = signal.signal(signum, self._pass)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, cast(signal.Handlers, handler))

    def _pass(self, signum: int, frame: FrameType | None) -> None:
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signum)

    def hand_over(self) -> None:
        """Call the handler by which submitit checkpoints and requeues, as its signal would."""
        for signum, handler in self._handlers.items():
            if getattr(handler, "__name__", "") == "checkpoint_and_try_requeue":
                cast(Callable[[int, FrameType | None], object], handler)(signum, None)
        raise RankError(
            "saved, but not requeued: none of the handlers of USR1, USR2, TERM and HUP was "
            "submitit's; requeue the job by hand"
        )


Training = TrainingTask
"""The name of TrainingTask before 0.1."""
