"""The work of rank 0 after the other ranks have left: end trackers, write the report, export.

The run has succeeded or is saved, so an error here is only printed. A separate watchdog ends a
hang, and a signal ends the report or the export at once.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from torchdistpackage.errors import TorchDistError
from torchdistpackage.harness.watchdog import HangWatchdog, Heartbeat, agree_on_start
from torchdistpackage.launch.process import Interrupted, SignalFlag
from torchdistpackage.launch.slurm.requeue import RequeueDecision
from torchdistpackage.report.page import write_report
from torchdistpackage.run_files import REPORT
from torchdistpackage.train.log import print_line
from torchdistpackage.train.trackers.feed import Trackers

Export = Callable[[Callable[[], None]], Path]
"""A function that writes the model and returns its folder; it calls its argument whenever it makes
progress."""


def wind_up(
    folder: Path,
    trackers: Trackers,
    outcome: RequeueDecision,
    signals: SignalFlag,
    *,
    timeout_s: float,
    report: bool,
    export: Export | None,
) -> bool:
    """Finish the run: its report, trackers and export. Return False if a signal kept the export
    from being written.

    outcome: how the run ended. timeout_s: limit of a step, see `HangWatchdog`.
    """
    watch = Heartbeat()
    with ExitStack() as stack:
        with suppress(OSError):  # a full disk takes no files of a watch
            watch = stack.enter_context(
                HangWatchdog(
                    folder,
                    rank=0,
                    world_size=1,
                    timeout_s=timeout_s,
                    start=agree_on_start(folder, rank=0, world_size=1),
                )
            )
        stack.enter_context(watch.allow_slow())
        for line in trackers.close(outcome):
            print_line(line)
        if report:
            _report(folder, signals)
        return export is None or _export(export, folder, signals, watch)


def _report(run: Path, signals: SignalFlag) -> None:
    try:
        with signals.interrupting():
            write_report([run], run / REPORT, time.time())
        print_line(f"wrote {run / REPORT}")
    except Interrupted as signal:
        print_line(f"no report: {signal}; call tdp report {run}")
    except (TorchDistError, OSError) as error:
        print_line(f"no report: {error}; mend it, and call tdp report {run}")


def _export(export: Export, run: Path, signals: SignalFlag, watch: Heartbeat) -> bool:
    """Export the model; return False if a signal came before the end."""
    try:
        with signals.interrupting():
            if signals.received:
                raise Interrupted(signals.received)
            written = export(watch.beat)
        print_line(f"exported to {written}")
    except Interrupted as signal:
        print_line(f"not exported: {signal}; started again the run exports")
        return False
    except (TorchDistError, OSError) as error:
        print_line(f"not exported: {error}; mend it, and call tdp export {run} FOLDER")
    return True
