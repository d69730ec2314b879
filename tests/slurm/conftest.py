"""Fixtures of the tests on a real Slurm cluster (scripts/slurm_cluster), five nodes each.

The one rule: submit early, assert late. Jobs wait for Slurm most of their time, so a module
starts all its slow ones at once, before the first test of the session:

    def submit(cluster, folder):            # called once, when the cluster has come up
        quick = cluster.sbatch("-N2", "-o", folder / "out", script="srun hostname")
        return quick, cluster.beside(lose_a_node, cluster, folder)

    def lose_a_node(cluster, folder):       # a scenario that acts and waits, in a thread
        with cluster.sibling(nodes=3) as own:
            ...
            return what_the_test_looks_at

    def test_hosts(cluster, submitted, folder):     # `submitted` is what submit() returned
        assert cluster.wait_end(submitted[0]) == "COMPLETED"
        assert (folder / "out").read_text() ...

`cluster` is shared: a test on it leaves the jobs of others and all nodes alone. Whoever breaks
nodes, preempts, or needs an empty queue takes `own_cluster`, which is emptied and repaired
before each test, or a sibling of another shape. Jobs that burn CPU (ranks with torch) take
`-J heavy --dependency=singleton`, so that Slurm runs them one after the other. The environment
variable TDP_REQUIRE_SLURM=1, which `scripts/test --slurm` sets, installs packages that are missing
and turns a skip of these tests into a failure. Daemons' logs are kept in pytest's temporary
folder, slurm/logs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.slurm.cluster import REQUIRE, SCRIPT, CannotRun, Cluster, take_down_leftovers

# What submit() of a module returned, or the exception it raised.
_submitted: dict[str, Any] = {}


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the session that every node sees under the same path."""
    return tmp_path_factory.mktemp("slurm", numbered=False)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, shared_folder: Path) -> Path:
    """The folder of this module that its submit() got."""
    return _folder_of(request.module, shared_folder)


def _folder_of(module: ModuleType, shared_folder: Path) -> Path:
    folder = shared_folder / Path(str(module.__file__)).stem
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, shared_folder: Path) -> Generator[Cluster]:
    """Five nodes with accounting, shared by all tests."""
    take_down_leftovers()
    try:
        logs = shared_folder / "logs"
        cluster = Cluster(f"tests-{os.getpid()}", logs, nodes=5, accounting=True)
    except CannotRun as error:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {SCRIPT.name} {error}", pytrace=False)
        pytest.skip(f"{SCRIPT.name} {error}")
    with cluster:
        _submit_all(request.session.items, cluster, shared_folder)
        yield cluster


def _submit_all(items: list[pytest.Item], cluster: Cluster, shared_folder: Path) -> None:
    """Call submit() of each module that has a test to run which asks for `submitted`.

    Modules whose scenarios are the longest (`SUBMIT_FIRST`) come first.
    """
    modules = {
        item.module: None
        for item in items
        if isinstance(item, pytest.Function) and "submitted" in item.fixturenames
    }
    for module in sorted(modules, key=lambda each: not getattr(each, "SUBMIT_FIRST", False)):
        name = module.__name__
        try:
            _submitted[name] = module.submit(cluster, _folder_of(module, shared_folder))
        except Exception as error:
            _submitted[name] = error


@pytest.fixture(scope="module")
def submitted(request: pytest.FixtureRequest, cluster: Cluster) -> Any:
    """What `submit(cluster, folder)` of this module returned."""
    found = _submitted[request.module.__name__]
    if isinstance(found, Exception):
        raise found
    return found


@pytest.fixture(scope="session")
def _own_cluster(cluster: Cluster) -> Cluster:
    return cluster.sibling(nodes=5, accounting=True)


@pytest.fixture
def own_cluster(_own_cluster: Cluster) -> Cluster:
    """Five nodes with accounting that a test has for itself: no job, every node idle."""
    _own_cluster.settle()
    return _own_cluster


@pytest.fixture(scope="session")
def new_cluster(cluster: Cluster) -> Callable[..., Cluster]:
    """`new_cluster(nodes=2, cards=2)`: one of another shape, until the end of the session."""
    return cluster.sibling
