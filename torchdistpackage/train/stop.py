"""Track what may end a run, on one rank: signals, the job's end, the duration of steps and saves.
No torch.

A rank can only request a stop. Its request is a vote (votes.py): votes are summed in the step's
all-reduce, so all ranks end after the same step. `requeue.decide` decides what becomes of the run.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchdistpackage.bounded import parse_json
from torchdistpackage.config.schema import RequeueSection
from torchdistpackage.errors import LaunchError
from torchdistpackage.files import atomic_write
from torchdistpackage.launch.process import SignalFlag
from torchdistpackage.launch.slurm.requeue import (
    Decision,
    RequeueDecision,
    decide,
    time_is_up,
)
from torchdistpackage.launch.slurm.run_dir import attempt_id, in_job, series_of, this_start
from torchdistpackage.run_files import RunDir

_KEPT = 100
_TIMES = "save_s.json"


@dataclass
class StopController:
    """Requests a stop of the run. `clock`: whether this rank watches the job's end for all; its
    request is enough.

    end_s: end of the job, in seconds since 1970; None: never. save_s: durations of saves in
    seconds, including earlier starts. ahead: see `requeue.required_time_s`.
    """

    limits: RequeueSection = field(default_factory=RequeueSection)
    signals: SignalFlag = field(default_factory=SignalFlag)
    clock: bool = False
    end_s: float | None = None
    ahead: int = 2
    save_s: list[float] = field(default_factory=list[float])
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    _requested: str = ""

    def should_stop(self) -> bool:
        """Return whether this rank wants the run to end after the current step."""
        self._requested = self._requested or self._why()
        return bool(self._requested)

    def stop_reason(self) -> str:
        """Return why the run ends, as far as this rank knows."""
        return self._requested or "a signal to another rank"

    def _why(self) -> str:
        if name := self.signals.received:
            return name
        if not self.clock or self.end_s is None:
            return ""
        return time_is_up(
            time.time(),
            self.end_s,
            self.step_s,
            self.save_s,
            self.limits.margin_s,
            self.ahead,
        )


def begin(
    folder: Path, section: RequeueSection, signals: SignalFlag, rank: int, env: Mapping[str, str]
) -> StopController:
    """Return the stop controller of a rank that starts now.

    TDP_JOB_END_S or SLURM_JOB_END_TIME: when the job ends.
    """
    end = env.get("TDP_JOB_END_S") or env.get("SLURM_JOB_END_TIME") or ""
    clock = rank == 0
    return StopController(
        section,
        signals,
        clock=clock,
        end_s=float(end) if end.isdecimal() and int(end) > 0 else None,
        save_s=_read_times(RunDir(folder)) if clock else [],
    )


def end(stop: StopController, folder: Path, step: int, env: Mapping[str, str]) -> Decision:
    """Decide on rank 0 for all ranks, and record the decision for the job's script."""
    if attempt_id(env) == "local":
        return Decision(
            RequeueDecision.STOP,
            f"after step {step}: {stop.stop_reason()}; started again it goes on",
        )
    files = RunDir(folder)
    starts = series_of(files, this_start(files, env, step))
    reason = f"after step {step}: {stop.stop_reason()}"
    steps = [start.step for start in starts]
    decision = decide(stop.stop_reason(), steps, step, stop.limits, in_job(starts))
    if decision.word is RequeueDecision.CHAIN and not env.get("TDP_BATCH"):
        why = "only the script of tdp submit chains jobs"
        decision = Decision(RequeueDecision.STOP, f"{decision.reason}; {why}")
    try:
        write_decision(files, decision, env)
    except OSError as error:
        raise LaunchError(
            f"saved {reason}, but the decision cannot be written: "
            f"{files.decision(attempt_id(env))}: {error.strerror}; start the run again to "
            "continue it"
        ) from error
    atomic_write(files.job / _TIMES, json.dumps(stop.save_s[-_KEPT:]))
    return decision


def write_decision(files: RunDir, decision: Decision, env: Mapping[str, str]) -> None:
    """Write the decision of this start, complete or not at all."""
    atomic_write(files.decision(attempt_id(env)), f"{decision}\n")


def _read_times(files: RunDir) -> list[float]:
    try:
        return [float(x) for x in parse_json((files.job / _TIMES).read_text("utf-8"))]
    except (OSError, ValueError, TypeError, OverflowError):
        return []
