"""The run folder: where it is, who may write to it, and how it is made. No torch.

The lock of the run folder is taken before anything in the folder is made or renamed, and released
after the last rank has ended.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.lock import Lock, take
from torchdistpackage.run_files import RunDir


def prepare_folder(config: RunConfig, resume: str) -> Path:
    """Make the run folder and return it. With `--resume never` an earlier one is renamed first.

    A folder without files stays: it may exist for its quota or striping.

    Raises:
        LaunchError: it cannot be made or renamed.
    """
    folder = config.run.folder
    try:
        if resume == "never" and any(not path.is_dir() for path in folder.rglob("*")):
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            folder.rename(aside)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def cannot_write(folder: Path, error: OSError) -> LaunchError:
    """Return the error for a run folder that cannot be written."""
    return LaunchError(
        f"the run folder {folder} cannot be written: {error.strerror} ({error.filename}); make "
        f"room, or set run.dir or run.name"
    )


@contextmanager
def only_writer(folder: Path, *, forks: bool = False) -> Generator[Lock | None]:
    """Hold the lock of a run folder, so that no other process on any machine writes to it.

    Yields the lock, or None if the folder's parent cannot be written.

    forks: this process will fork, and the fork must send the heartbeats (`Lock.keep`).

    Raises:
        HeldError: another run writes there.
    """
    if os.access(folder, os.W_OK) and not os.access(folder.parent, os.W_OK):
        sys.stdout.write(
            f"{folder.parent} cannot be written, so there is no lock, and nothing keeps a second "
            f"run from writing to {folder.name}\n"
        )
        yield None
        return
    lock = take(RunDir(folder).run_lock, f"the run {folder.name}")
    if not forks:
        lock.keep()
    try:
        yield lock
    finally:
        lock.release()
