"""Modules that moved into the wing: their earlier paths import the very same modules."""

import importlib
import pkgutil

import pytest

pytest.importorskip("torch")

from torchdistpackage.compat import paths


def full(path: str) -> str:
    return f"{paths.PACKAGE}.{path}"


def moved_modules() -> list[tuple[str, str]]:
    """(earlier path, present path) of each, those in folders too."""
    pairs = []
    for old, new in paths.MOVED.items():
        module = importlib.import_module(full(new))
        below = [f".{info.name}" for info in pkgutil.iter_modules(getattr(module, "__path__", ()))]
        pairs += [(full(old) + name, full(new) + name) for name in ("", *below)]
    return pairs


def test_an_earlier_path_is_the_module_itself():
    pairs = moved_modules()
    assert len(pairs) >= len(paths.MOVED)
    for old, new in pairs:
        assert importlib.import_module(old) is importlib.import_module(new), old
