"""`tdp watch`: follow a run in the terminal, local or submitted, running or finished.

It reads the files of the run folder, and asks Slurm for the state of a submitted job if Slurm is
there. `report/status.py` computes what it shows.
"""

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import wrap
from torchdistpackage.cli.jobs import RUNS
from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.launch.slurm.query import query_jobs
from torchdistpackage.launch.slurm.runs import find, read_run, single
from torchdistpackage.report.charts import series
from torchdistpackage.report.run import Run
from torchdistpackage.report.status import RunStatus, curve, status_of

_ASK_S = 10.0
_CURVE_ROWS = 6


def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of a run, its folder or a job id.")
    ],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder that contains the run folders.")
    ] = RUNS,
    interval: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="Seconds between updates.")
    ] = 2.0,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a page, as without a terminal.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Show the run as it is now, and exit.")
    ] = False,
) -> None:
    """Follow a run in the terminal.

    Shows loss, throughput, waiting, memory, slow ranks, times and restarts.

    On a terminal this is a page; press q to leave it, and the run goes on. Elsewhere a line is
    printed each time the run has advanced, until the run ends.
    """
    view = RunView(_folder_of(run, folder))
    if once:
        typer.echo(view.text(*view.look()))
    elif plain or not (sys.stdout.isatty() and sys.stdin.isatty()):
        _follow_lines(view, interval)
    else:
        _follow_page(view, interval)


def _folder_of(run: str, folder: Path) -> Path:
    """Return the folder of the run that was named.

    Raises:
        ConfigError: there is no such run.
    """
    for path in (Path(run), folder / run):
        try:
            Run(path)
            return path
        except ConfigError as error:
            refused = error
            if path.is_dir() and any(path.iterdir()):
                break
    try:
        return single(find(run, folder)).folder
    except ConfigError as error:
        raise (refused if Path(run).is_dir() else error) from None


class RunView:
    """A run at the time of each look; each look reads only the new rows."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._run = Run(folder)
        self._asked_s, self._queue, self._queue_ended = float("-inf"), "", False

    def look(self) -> tuple[Run, RunStatus]:
        """Read the new rows, and return the run and its status."""
        self._run.read()
        queue = self._queue_state()
        now = status_of(self._run, time.time(), queue, queue_ended=self._queue_ended)
        return self._run, now

    def _queue_state(self) -> str:
        """Return the state of the latest job in Slurm, or "" without a job or an answer."""
        record = read_run(self.folder)
        if record is None or shutil.which("squeue") is None:
            return ""
        if time.monotonic() - self._asked_s > _ASK_S:
            self._asked_s = time.monotonic()
            try:
                job = record.latest.job
                info = query_jobs([job], since_s=record.latest.time_s).jobs[job]
                self._queue = " ".join(filter(None, (info.state, info.reason, info.nodes)))
                self._queue_ended = info.ended
            except LaunchError as error:
                self._queue = f"Slurm does not answer: {error}".partition("\n")[0]
        return self._queue

    def text(self, data: Run, status: RunStatus, columns: int = 78) -> str:
        """Return the whole page as plain text."""
        steps = f"{status.step}/{status.num_steps or '?'}"
        lines = [f"{data.name}  step {steps}  {_bar(status, columns - len(data.name) - 24)}"]
        lines += curve([y for _, y in series(data.rows, "loss")], columns, _CURVE_ROWS)
        width = max(map(len, status.facts), default=0)
        lines += [f"{name:<{width}}  {text}" for name, text in status.facts.items()]
        lines += [f"note: {note}" for note in data.notes]
        # names and notes of others may hold control characters, which must not move the cursor
        lines = ["".join(c if c.isprintable() else " " for c in line) for line in lines]
        return "\n".join(line.rstrip() if len(line) <= columns else wrap(line) for line in lines)


def _bar(status: RunStatus, columns: int) -> str:
    if not status.num_steps or columns < 4:
        return ""
    full = min(columns * status.step // status.num_steps, columns)
    return "#" * full + "." * (columns - full)


def _follow_lines(view: RunView, interval: float) -> None:
    last_line, notes = "", set[str]()
    while True:
        data, status = view.look()
        for note in data.notes:
            if note not in notes:
                notes.add(note)
                typer.echo(f"note: {note}")
        if status.line != last_line:
            last_line = status.line
            typer.echo(last_line)
            sys.stdout.flush()
        if status.ended:
            return
        # each look reads the run folder, which may be on a shared disk
        time.sleep(interval)


def _follow_page(view: RunView, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            data, status = view.look()
            text = view.text(data, status, max(console.width - 1, 20))
            text += "\n\nq: quit (the run goes on)"
            live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
            if pressed(interval) in ("q", "Q", "\x03", "\x04"):
                return


@contextlib.contextmanager
def _keys() -> Generator:
    """Yield a function that waits up to so many seconds for a key, and returns it or ""."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        return os.read(terminal, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
