"""Processes and threads have names that ps and top show."""

import os
import subprocess
import threading
from pathlib import Path

from torchdistpackage.launch.process import name_thread
from torchdistpackage.launch.workers import run_local


def shown_names() -> tuple[str, str]:
    """Return what ps shows for this process and for its parent."""
    command = ["ps", "-o", "comm=", "-p"]
    own, parent = (
        subprocess.run([*command, str(pid)], capture_output=True, text=True, check=True).stdout
        for pid in (os.getpid(), os.getppid())
    )
    return own.strip(), parent.strip()


def test_ranks_and_the_server_that_forks_them_have_names_of_their_own() -> None:
    names = run_local(shown_names, num_procs=2)
    assert names == [("tdp-rank-0", "tdp-fork-server"), ("tdp-rank-1", "tdp-fork-server")]


def test_a_thread_gets_the_first_bytes_of_a_name_and_the_process_keeps_its_own() -> None:
    process = Path(f"/proc/{os.getpid()}/comm")
    before, names = process.read_text(), list[str]()

    def body() -> None:
        name_thread("tdp data-and more")
        names.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert names == ["tdp-data-and-mo\n"] and process.read_text() == before
