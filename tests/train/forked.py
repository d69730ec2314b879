"""`tdp` in forks of a process that has imported all that a rank needs. No torch here."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torchdistpackage.cli.main import main
from torchdistpackage.launch.fork_server_client import ForkServer


def until(condition: Callable[[], object], what: str, limit_s: float = 120) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.005)


class Forked:
    """`tdp words...`, with `env` besides this process's; to be asked like a Popen."""

    def __init__(
        self,
        server: ForkServer,
        log: Path,
        words: Sequence[str],
        env: Mapping[str, str],
        run: Callable[[], int] = main,
    ):
        self._server, self._log = server, log
        place = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        with log.open("wb") as file:
            self._child = server.spawn(
                _tdp, (tuple(words), run), env=place, stdout=file, stderr=file
            )
        self.pid = self._child.pid

    def poll(self) -> int | None:
        self._server.reap()
        return self.returncode

    @property
    def returncode(self) -> int | None:
        return self._child.exit.exit_code if self._child.exit else None

    def send_signal(self, signum: signal.Signals) -> None:
        self._child.signal(signum)

    def communicate(self, timeout: float) -> tuple[str, None]:
        until(lambda: self.poll() is not None, "its end", timeout)
        return self._log.read_text(), None


def _tdp(words: Sequence[str], run: Callable[[], int]) -> None:
    sys.argv[:] = ["tdp", *words]
    sys.exit(run())


def places(num_ranks: int) -> list[dict[str, str]]:
    """What a launcher tells each rank of a world on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    size = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks = map(str, range(num_ranks))
    return [{**meeting, **size, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


class ForkedRanks:
    """`tdp words...` as all ranks of a world, which a launcher would have started."""

    def __init__(self, server: ForkServer, folder: Path, words: Sequence[str], num_ranks: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks = [
            Forked(server, folder / f"said{rank}", words, place)
            for rank, place in enumerate(places(num_ranks))
        ]

    def kill(self) -> None:
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
        self.ended()

    def ended(self, timeout: float = 180) -> str:
        """What they said, when all have ended."""
        return "".join(rank.communicate(timeout)[0] for rank in self.ranks)

    @property
    def returncodes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]
