"""Lines of a file in a run folder that grows by lines, of bounded size and surely a file."""

from pathlib import Path

from torchdistpackage.bounded import read_regular
from torchdistpackage.errors import LaunchError

MOST_BYTES = 1 << 26


def read_lines(path: Path) -> list[str]:
    """All of them; none of a file that is not there.

    Raises:
        LaunchError: it is a pipe, a device or the like, too large, or may not be read.
    """
    try:
        return read_regular(path, MOST_BYTES).decode(errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise LaunchError(f"{path} {error.strerror}; move it away") from error
