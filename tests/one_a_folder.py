"""Pytest plugin (`-p tests.one_a_folder`): every test file is imported, and one case a folder runs.

Collecting 15,000 cases takes twice as long as importing their files and finds no more, since
parameters are evaluated at import. Modules of ours that ranks import before they run a test are
imported as well. The case that runs is the first of its folder that starts no ranks, which would
take longer than all the rest.
"""

import importlib
import inspect
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ELSEWHERE = ("slurm", "browser")
"""Folders whose cases need a cluster or a browser, and are imported alone."""
RANKS = {"ranks", "pool", "tdp", "forks", "start"}
"""Fixtures that start ranks."""
DEAR = {"test_arrows.py", "test_comm.py", "test_family_makers.py", "test_files.py"}
"""Files whose first case takes seconds: it starts processes itself, or reads all sources."""


def is_cheap(test: object) -> bool:
    """Return whether `test` is a function that starts no ranks and is in the small set."""
    if not inspect.isfunction(test):
        return False
    marks = {mark.name for mark in getattr(test, "pytestmark", ())}
    return not RANKS & {*inspect.signature(test).parameters} and "full" not in marks


class OneAFolder:
    def __init__(self) -> None:
        self.chosen: dict[Path, Path] = {}
        """Folder -> the file of its case."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        by_folder = importlib.import_module("tests.conftest").PRELOAD
        preload, missing = [x for modules in by_folder.values() for x in modules], []
        for path in sorted(TESTS.rglob("test_*.py")):
            name = ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
            try:
                module = vars(importlib.import_module(name))
            except pytest.skip.Exception:  # an optional library is not here
                continue
            except ImportError as error:
                missing.append(f"{name}: {error}")
                continue
            preload += module.get("RANKS_IMPORT", ())
            if path.relative_to(TESTS).parts[0] in ELSEWHERE or path.name in DEAR:
                continue
            if any(is_cheap(value) for key, value in module.items() if key.startswith("test_")):
                self.chosen.setdefault(path.parent, path)
        assert not missing, "\n".join(missing)
        for name in preload:
            if name.startswith("torchdistpackage."):
                importlib.import_module(name)

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        is_left = collection_path.suffix == ".py" and collection_path not in self.chosen.values()
        return is_left or None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept: dict[Path, pytest.Item] = {}
        for item in items:
            if is_cheap(getattr(item, "function", None)):
                kept.setdefault(item.path.parent, item)
        config.hook.pytest_deselected(items=[x for x in items if x not in kept.values()])
        items[:] = kept.values()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OneAFolder())
