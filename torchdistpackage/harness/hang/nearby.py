"""What the ranks of one host tell each other on its own disk, so that one of them looks for all.

One rule: nobody is in charge. Whoever finds that nobody has looked for a while looks, and says so;
a rank that is stopped, or gone, is so replaced by the next one within one look. Where there is no
place of the user's own (below), each rank looks for itself. No torch.
"""

import contextlib
import hashlib
import os
import socket
import stat
import tempfile
import time
from pathlib import Path


class Nearby:
    """Ranks of this host that watch over `shared`.

    every_s: how often one of them shall look there.
    """

    def __init__(self, shared: Path, every_s: float) -> None:
        self._every_s = every_s
        known = hashlib.sha256(f"{socket.gethostname()}\0{shared}".encode()).hexdigest()[:16]
        own = _own_folder()
        self._looked = own and own / f"{known}.looked"
        self._alarm = own and own / f"{known}.alarm"

    def is_due(self) -> bool:
        """Whether it is up to this rank to look now; if so, the others take it that it does."""
        if self._looked is None:
            return True
        try:
            # a clock that was put back must not keep everybody from looking
            if abs(time.time() - self._looked.stat().st_mtime) < self._every_s:
                return False
            os.utime(self._looked)
        except FileNotFoundError:
            return _make(self._looked)
        except OSError:
            pass
        return True

    @property
    def has_alarm(self) -> bool:
        return self._alarm is not None and self._alarm.exists()

    def raise_alarm(self) -> None:
        if self._alarm is not None:
            _make(self._alarm)

    def leave(self) -> None:
        """Take away what is there; ranks that stay make it anew."""
        if self._looked is not None and self._alarm is not None:
            with contextlib.suppress(OSError):
                self._looked.unlink(missing_ok=True)
                self._alarm.unlink(missing_ok=True)


def _make(path: Path) -> bool:
    """Whether it could be made here and now: others may come at the same moment."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def _own_folder() -> Path | None:
    """A folder on this host that nobody else can write to; None: there cannot be one."""
    folder = Path(tempfile.gettempdir()) / f"tdp-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if is_ours and not found.st_mode & 0o077 else None
