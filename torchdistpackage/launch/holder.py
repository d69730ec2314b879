"""Who holds the lock of a run folder, and whether that process can still write. No torch.

One rule: a holder counts as gone only by proof (its process, its Slurm step or its job has ended,
or it was this one's predecessor), or by silence: no heartbeat for STALE_S by the clock of the file
system.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import parse_json
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import Outcome, Runner, limited, query_jobs
from torchdistpackage.launch.slurm_env import in_step

HEARTBEAT_S = 10.0
"""How often a holder touches its lock file."""
STALE_S = 60.0
"""Without a heartbeat for so long a holder that nothing else is known of counts as gone."""
ASK_S = 5.0
"""For Slurm's answer, of which a start must not depend."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """What a lock file says.

    doing: in words. boot, namespace, born: the kernel's boot, the namespace of `pid` and when the
    process was started, in clock ticks since that boot. job, restart, step: of Slurm, "" without;
    batch: the steps of that job run one after the other. elastic, round: id and restart of
    torchrun. flocked: the file is locked by the kernel as well. token: of this lock alone.
    """

    doing: str
    host: str
    boot: str
    namespace: int
    pid: int
    born: int
    time_s: float
    job: str
    restart: int
    step: str
    batch: bool
    elastic: str
    round: int
    flocked: bool
    token: str

    def __str__(self) -> str:
        job = f"job {self.job}{f'.{self.step}' if self.step else ''} of Slurm, " if self.job else ""
        since = time.strftime("%d %b %H:%M:%S", time.localtime(self.time_s))
        return f"{self.doing} on {self.host} ({job}process {self.pid}, since {since})"

    @property
    def advice(self) -> str:
        """How to end it."""
        if self.job:
            return f"`scancel {self.job}` ends it"
        return f"`kill {self.pid}` on {self.host} ends it"


def this_process(doing: str, env: Mapping[str, str]) -> LockHolder:
    """What this process would write into a lock file; not flocked yet."""
    elastic = env.get("TORCHELASTIC_RUN_ID", "")
    return LockHolder(
        doing,
        socket.gethostname(),
        _boot(),
        _namespace(),
        os.getpid(),
        _born(os.getpid()) or 0,
        time.time(),
        env.get("SLURM_JOB_ID", ""),
        _number(env.get("SLURM_RESTART_COUNT")),
        env.get("SLURM_STEP_ID", "") if env.get("SLURM_JOB_ID") and in_step(env) else "",
        bool(env.get("TDP_BATCH")),
        "" if elastic == "none" else elastic,
        _number(env.get("TORCHELASTIC_RESTART_COUNT")),
        False,
        uuid.uuid4().hex,
    )


def to_json(holder: LockHolder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def from_json(text: str) -> LockHolder | None:
    """Back from `to_json`; None of what is none, or not whole yet."""
    try:
        values: dict[str, Any] = parse_json(text)
        holder = LockHolder(**values)
    except (ValueError, TypeError):
        return None
    typed = all(type(values[field.name]) is field.type for field in fields(LockHolder))
    numbered = all(not x or x.isdecimal() for x in (holder.job, holder.step)) if typed else False
    return holder if numbered else None


def why_gone(
    holder: LockHolder, own: LockHolder, silent_s: float, freed: bool, runner: Runner | None = None
) -> str:
    """Why the holder writes no more; "" if it may.

    own: who asks. silent_s: since its last heartbeat. freed: the kernel no longer locks the file.
    """
    if _precedes(holder, own):
        return "it was an earlier start of the same"
    if holder.boot and holder.boot == own.boot:
        if holder.namespace == own.namespace:
            return "" if _born(holder.pid) == holder.born else "its process is gone"
        if holder.flocked:
            return "its process is gone" if freed else ""
    # outside of a step a process may outlive its job, as under salloc
    word = _slurm_says(holder, own, runner or limited(ASK_S)) if holder.step else ""
    if word is None or (not word and silent_s <= STALE_S):
        return ""
    return word or f"it gave no sign of life for {silent_s:.0f} s"


def _precedes(holder: LockHolder, own: LockHolder) -> bool:
    """Whether whoever started `own` has ended `holder` before."""
    if holder.job and holder.job == own.job:
        if own.restart != holder.restart:
            return own.restart > holder.restart
        both = own.step.isdecimal() and holder.step.isdecimal() and own.batch and holder.batch
        return both and int(own.step) > int(holder.step)
    return bool(holder.elastic) and holder.elastic == own.elastic and own.round > holder.round


def _slurm_says(holder: LockHolder, own: LockHolder, runner: Runner) -> str | None:
    """Why the holder's step is over; None if it is not, "" if nobody knows."""
    try:
        if holder.job == own.job:
            ran = runner(["squeue", "-h", "-s", "-j", holder.job, "-o", "%i"])
            if ran.code:
                return ""
            live = f"{holder.job}.{holder.step}" in ran.out.split()
            return None if live else f"step {holder.job}.{holder.step} is over"
        info = query_jobs([holder.job], runner, since_s=holder.time_s).jobs[holder.job]
    except LaunchError:
        return ""
    if info.ended:
        return f"job {holder.job} is {info.state}"
    return None if info.outcome is Outcome.ALIVE else ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _born(pid: int) -> int | None:
    """When the process was started, in clock ticks since the boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name in parentheses may have spaces; a zombie writes no more
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(numbers[18])


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
