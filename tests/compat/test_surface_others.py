"""The names of tplib and torchshard: where they were, as they were, or why not.

Their tables are held against the package from both sides, as `surface.yaml` is.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.compat.surface import differences, earlier_parameters, import_from, read
from torchdistpackage.compat import paths, torchshard
from torchdistpackage.compat.paths import Later

LIBRARIES = {
    "torchdistpackage.compat.tplib": "surface_tplib.yaml",
    "torchdistpackage.compat.torchshard": "surface_torchshard.yaml",
}
NEW = {"torchdistpackage.compat.tplib": {"destroy_dist_env"}}
"""Public names that the earlier library had not, on purpose."""

ENTRIES = [
    {**entry, "module": ".".join([library, *([entry["in"]] if "in" in entry else [])])}
    for library, file in LIBRARIES.items()
    for entry in read(file)
]
HERE = [entry for entry in ENTRIES if entry["status"] == "here"]
LATER = [e for e in ENTRIES if e["status"] == "later" and e["kind"] != "method"]


def by_name(entries: list[dict]) -> object:
    return pytest.mark.parametrize("entry", entries, ids=lambda e: f"{e['module']}.{e['name']}")


def test_the_tables_are_well_formed():
    names = [(entry["module"], entry["name"]) for entry in ENTRIES]
    assert len(set(names)) == len(names)
    assert {module.split(".")[2] for module, _ in names} == {"tplib", "torchshard"}
    for entry in ENTRIES:
        assert entry["status"] in ("here", "later")
        assert (entry["status"] == "later") == bool(entry.get("reason")), entry["name"]
        assert ("." in entry["name"]) == (entry["kind"] == "method")
        assert "signature" in entry or entry["kind"] == "value"
        earlier_parameters(entry.get("signature", ""))


@by_name(HERE)
def test_a_name_is_there_and_takes_the_calls_that_it_took(entry: dict):
    pytest.importorskip("torch")
    owner, _, attribute = entry["name"].partition(".")
    thing = import_from(entry["module"], owner)
    thing = getattr(thing, attribute) if attribute else thing
    if "signature" in entry:
        ours = list(inspect.signature(thing).parameters.values())[1 if attribute else 0 :]
        assert differences(entry["signature"], ours) == set(entry.get("differs", {}))


@pytest.mark.parametrize("module", sorted({entry["module"] for entry in HERE}))
def test_the_modules_have_no_other_names(module: str):
    pytest.importorskip("torch")
    listed = {e["name"] for e in HERE if e["module"] == module and e["kind"] != "method"}
    assert set(importlib.import_module(module).__all__) - NEW.get(module, set()) == listed


@by_name(LATER)
def test_a_name_that_is_not_there_yet_says_why(entry: dict):
    """Also in a module that is not there itself: `from torchshard.nn import ParallelLinear`."""
    first = entry.get("in", entry["name"]).partition(".")[0]
    text = f"torchdistpackage.compat.torchshard.{first} is not there yet: {entry['reason']}"
    with pytest.raises(ImportError) as imported:
        import_from(entry["module"], entry["name"])
    with pytest.raises(AttributeError) as asked:
        getattr(torchshard, first)
    assert str(imported.value) == str(asked.value) == text
    assert first not in dir(torchshard)


def test_no_other_name_is_said_to_come():
    announced = paths.MODULES["torchdistpackage.compat.torchshard"]
    assert all(isinstance(place, Later) for place in announced.values())
    later = {e["name"] for e in LATER if "in" not in e}
    assert set(announced) == later
    with pytest.raises(AttributeError, match="has no attribute 'nm'"):
        torchshard.nm  # noqa: B018
