"""Ranks with an environment of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.comm.starting import Start
    from torchdistpackage.harness.pool import RankPool


@pytest.fixture(scope="session")
def start(pool: RankPool) -> Start:
    from tests.comm.starting import Start

    return Start(pool.server)
