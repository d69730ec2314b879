"""torch's init methods lead to the place that their numbers, or the launcher's, say."""

from __future__ import annotations

import pytest

from torchdistpackage.compat.init_method import parse_init_method
from torchdistpackage.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("method", "numbers", "env", "expected"),
    [
        # rank, world size, local rank, local world size, address, ports, store
        ("env://", (-1, -1, -1), {}, (0, 1, 0, 1, "127.0.0.1", (), None)),
        ("env://", (-1, -1, -1), TORCHRUN, (3, 4, 1, 2, "node7", (29500,), None)),
        ("env://", (2, 1, -1), MASTER, (1, 2, 0, 1, "node7", (29500,), None)),
        ("tcp://localhost:23456", (2, 1, -1), {}, (1, 2, 1, 2, "localhost", (23456,), None)),
        ("tcp://localhost:23456", (2, 0, 0), {}, (0, 2, 0, 2, "localhost", (23456,), None)),
        ("tcp://node9:1234", (8, 5, 1), {}, (5, 8, 1, 2, "node9", (1234,), None)),
        ("tcp://node9:1234", (-1, -1, -1), TORCHRUN, (3, 4, 1, 2, "node9", (1234,), None)),
        ("tcp://node9:1234", (8, -1, -1), TORCHRUN, (3, 8, 1, 2, "node9", (1234,), None)),
        (
            *("tcp://node9:1?rank=1&world_size=2", (-1, -1, -1), {}),
            (1, 2, 0, 1, "node9", (1,), None),
        ),
        (
            *("tcp://node9:1?rank=1&world_size=2&local_rank=x", (-1, -1, -1), {}),
            (1, 2, 0, 1, "node9", (1,), None),
        ),
        ("tcp://localhost:23456", (1, 0, -1), {}, (0, 1, 0, 1, "127.0.0.1", (), None)),
        ("tcp://localhost:23456", (1, -1, 3), {}, (0, 1, 3, 1, "127.0.0.1", (), None)),
        ("file:///tmp/f", (2, 1, -1), TORCHRUN, (1, 2, 1, 2, "127.0.0.1", (), "/tmp/f")),
    ],
)
def test_a_place_is_what_was_said(method, numbers, env, expected):
    found = parse_init_method(method, *numbers, env)
    assert found.served == (method == "env://" and env is TORCHRUN), "only its agent's own port"
    assert (
        *(found.rank, found.world_size, found.local_rank, found.local_world_size),
        *(found.address, found.ports, found.store),
    ) == expected


@pytest.mark.parametrize(
    ("method", "numbers", "text"),
    [
        ("tcp://localhost:1", (-1, -1, -1), "lacks rank and world_size, and no launcher"),
        ("tcp://localhost:1", (2, -1, -1), "lacks rank, and no launcher"),
        ("tcp://localhost", (2, 0, -1), "needs a host and a port"),
        ("tcp://localhost:port", (2, 0, -1), "needs a host and a port"),
        ("tcp://[::1", (2, 0, -1), "is not a URL: Invalid IPv6"),
        ("file://", (2, 0, -1), "needs the path of a file"),
        ("tcp://localhost:1?rank=x", (2, -1, -1), "RANK='x'"),
        ("tcp://localhost:1", (2, 2, -1), "rank 2 of 2"),
        ("tcp://localhost:1", (1, 1, -1), "rank 1 is outside a world of 1"),
        ("env://", (2, 0, -1), "MASTER_PORT, MASTER_ADDR"),
        ("mpi://", (2, 0, -1), "not one of env://, tcp://HOST:PORT and file://PATH"),
    ],
)
def test_what_is_missing_or_cannot_be_is_said(method, numbers, text):
    with pytest.raises(LaunchError, match=text):
        parse_init_method(method, *numbers, {})
