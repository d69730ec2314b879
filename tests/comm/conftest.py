"""The server from which ranks with an environment of their own are forked."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.comm.starting import Start


@pytest.fixture(scope="session")
def start() -> Generator[Start]:
    from tests.comm.starting import Start
    from torchdistpackage.launch.fork_server_client import ForkServer

    preload = ["torch", "torch.distributed", "numpy", "pytest", "tests.comm.starting"]
    with ForkServer(preload) as server:
        yield Start(server)
