"""End the ranks after the alarm: one rank writes the report, then all exit. No torch.

No rank waits for long. The lowest rank that is there writes the report, with what has come by then;
if it does not, the next one does; and a rank ends even if no report came at all.
"""

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from torchdistpackage.environment.failure import (
    Failure,
    FailureKind,
    from_json,
    is_secondary,
    to_json,
)
from torchdistpackage.files import atomic_write
from torchdistpackage.harness.hang.diagnosis import Diagnosis, diagnose
from torchdistpackage.harness.hang.dump import Dump, Folder, State, states
from torchdistpackage.launch.supervisor import noted_stopped
from torchdistpackage.topology.mesh import Topology

GATHER_S = 4.0
"""Seconds to wait for the reports of live ranks; the report is then made from those received."""
TAKE_OVER_S = 1.5
"""Seconds after which the next rank writes the report, if the one whose turn it is does not."""
END_S = 9.0
"""Seconds after the alarm at which a rank exits, with or without a report; with thousands of ranks
later (`end_s`)."""
_LINGER_S = 3.0
"""Seconds that a rank which has left its loop gets to exit by itself."""
_SPEAK_S = 1.0
_LOOK_S = 0.2


def end_s(world_size: int) -> float:
    """Return how long after the alarm a rank ends, because opening thousands of files takes
    time.
    """
    return END_S + world_size / 1000


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The end of one rank's run. failure: see `HangWatchdog`."""

    folder: Folder
    rank: int
    world_size: int
    topology: Topology | None
    failure: Path | None

    def report(self, alarm_s: float) -> Diagnosis | None:
        """Wait until the report is written, or write it and return what it says.

        alarm_s: time.time() of the alarm. OSError: the folder cannot be used any more.
        """
        began_s = time.monotonic()
        limit_s = end_s(self.world_size)
        while not self.folder.has_report and (since_s := time.monotonic() - began_s) < limit_s:
            num_before = self.folder.num_reporting(below=self.rank)
            if not num_before or since_s > GATHER_S + num_before * TAKE_OVER_S:
                dumps = self.folder.read()
                if since_s > GATHER_S or _complete(dumps, self.world_size):
                    return self._write(dumps, alarm_s)
            # thousands that look at once would keep the file system from answering
            time.sleep(min(max(_LOOK_S, self.world_size / 1000), 1.0))
        return None

    def _write(self, dumps: dict[int, Dump], alarm_s: float) -> Diagnosis:
        silent = {rank: dump.failure for rank, dump in dumps.items() if not dump.answers}
        noted = {
            rank: letter
            for rank, report in silent.items()
            if report and (letter := noted_stopped(Path(report)))
        }
        stacks = self.folder.stacks(silent)
        diagnosis = diagnose(self.world_size, dumps, stacks, topology=self.topology, noted=noted)
        if self.failure is not None:
            atomic_write(self.failure, to_json(diagnosis.failure(alarm_s)))
        self.folder.write_report(diagnosis.text)
        return diagnosis

    def end(self, dump: Dump, diagnosis: Diagnosis | None, reported: threading.Event) -> None:
        """End this process, and those of this host that cannot; first say why. Does not return.

        reported: set when no one needs to wait for the report any more.
        """
        with contextlib.suppress(OSError):
            self._end_the_silent(dump)
        says = ""
        if self.failure is not None:
            with contextlib.suppress(OSError):
                no_report = f"hangs; {self.folder.path} has no report that says why"
                _leave_end(dump, self.failure, "" if self.folder.has_report else no_report)
        elif diagnosis is not None:
            says = f"{diagnosis.text}\nthe same is in {self.folder.report}\n"
        # in a thread, because a stream that nobody reads, or that the loop holds, would block
        speaker = threading.Thread(target=_say, args=(says,), daemon=True)
        speaker.start()
        speaker.join(_SPEAK_S)
        reported.set()
        if dump.state is not State.DUMPED:
            time.sleep(_LINGER_S)  # this rank may be about to exit with its own error
        for child in dump.process.descendants():  # workers of a loader may hang as well
            child.kill()
        os._exit(1)

    def _end_the_silent(self, own_dump: Dump) -> None:
        """Kill ranks of this host that cannot end by themselves: stopped processes, and those in
        which some call holds the interpreter.
        """
        for rank, dump in self.folder.read_host(own_dump.process.host).items():
            if rank != self.rank and not dump.answers and dump.process.state():
                if dump.failure:
                    _leave_end(dump, Path(dump.failure))
                for process in (dump.process, *dump.process.descendants()):
                    process.kill()


def _complete(dumps: dict[int, Dump], world_size: int) -> bool:
    """Return whether all ranks have answered, are gone or stopped, and none will add anything."""
    letters = states(dumps)
    if len(dumps) < world_size or _loses_a_peer(dumps):
        return False
    return all(
        (dump.answers and not dump.more) or letters.get(rank) in ("", "T", "t")
        for rank, dump in dumps.items()
    )


def _loses_a_peer(dumps: dict[int, Dump]) -> bool:
    """Return whether a rank raised because it lost a peer, and others may soon do the same."""
    states = {dump.state for dump in dumps.values()}
    return {State.RAISED, State.DUMPED} <= states and any(
        dump.state is State.RAISED and is_secondary(from_json(dump.error))
        for dump in dumps.values()
    )


def _leave_end(dump: Dump, path: Path, hangs: str = "") -> None:
    """Record for a supervisor that this rank ends because of others, unless it has a report."""
    if not path.exists():
        kind, process = FailureKind.HUNG if hangs else FailureKind.ENDED, dump.process
        failure = Failure(dump.rank, process.host, process.pid, time.time(), kind, 1, hangs)
        atomic_write(path, to_json(failure))


def _say(text: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.write(2, text.encode())
