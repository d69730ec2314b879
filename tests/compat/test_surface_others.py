"""The names of the other earlier libraries: where they were, as they were, or why not.

Their tables are held against the package from both sides, as `surface.yaml` is.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from tests.compat.surface import differences, earlier_parameters, import_from, read
from torchdistpackage.compat import paths, torchshard
from torchdistpackage.compat.paths import UnavailableReason

LIBRARIES = {
    "torchdistpackage.compat.tplib": "surface_tplib.yaml",
    "torchdistpackage.compat.torchshard": "surface_torchshard.yaml",
    "torchdistpackage.compat.tensor_parallel": "surface_tensor_parallel.yaml",
    "torchdistpackage.compat.emp": "surface_emp.yaml",
}
NEW = {"torchdistpackage.compat.tplib": {"destroy_dist_env"}}
"""Public names that the earlier library had not, on purpose."""

IN = {"torchdistpackage.compat.tplib": ["", "tensor_parallel"]}
"""Where names are of which the table does not say it; else in the package itself."""


def modules(library: str, entry: dict) -> list[str]:
    below = entry.get("in", IN.get(library, [""]))
    below = [below] if isinstance(below, str) else below
    return [f"{library}.{path}".removesuffix(".") for path in below]


ENTRIES = [
    {**entry, "library": library, "modules": modules(library, entry)}
    for library, file in LIBRARIES.items()
    for entry in read(file)
]
NAMES = [{**entry, "module": module} for entry in ENTRIES for module in entry["modules"]]
HERE = [entry for entry in NAMES if entry["status"] == "here" and entry["kind"] != "method"]
METHODS = [e for e in ENTRIES if e["status"] == "here" and e["kind"] == "method"]
ABOVE = {(entry["library"], entry["name"]): entry["modules"][0] for entry in ENTRIES}


def by_name(entries: list[dict]) -> object:
    return pytest.mark.parametrize("entry", entries, ids=lambda e: f"{e['module']}.{e['name']}")


def test_the_tables_are_well_formed():
    names = [(e["module"], e["name"]) for e in NAMES if e["kind"] != "method"]
    assert len(set(names)) == len(names)
    assert {entry["library"] for entry in ENTRIES} == set(LIBRARIES)
    for entry in ENTRIES:
        assert entry["status"] == "here"
        assert ("." in entry["name"]) == (entry["kind"] == "method")
        assert "signature" in entry or entry["kind"] in ("value", "constant")
        earlier_parameters(entry.get("signature", ""))
        owner = entry["name"].partition(".")[0]
        assert any(e["library"] == entry["library"] and e["name"] == owner for e in ENTRIES)


@by_name(HERE)
def test_a_name_is_there_and_takes_the_calls_that_it_took(entry: dict):
    pytest.importorskip("torch")
    thing = import_from(entry["module"], entry["name"])
    assert thing == import_from(entry["modules"][0], entry["name"])
    if "signature" in entry:
        ours = list(inspect.signature(thing).parameters.values())
        assert differences(entry["signature"], ours) == set(entry.get("differs", {}))


@pytest.mark.parametrize("entry", METHODS, ids=lambda e: f"{e['library']}.{e['name']}")
def test_a_method_is_there_and_takes_the_calls_that_it_took(entry: dict):
    pytest.importorskip("torch")
    owner, _, name = entry["name"].partition(".")
    thing = inspect.getattr_static(import_from(ABOVE[entry["library"], owner], owner), name)
    skipped = int(not isinstance(thing, staticmethod))
    ours = list(inspect.signature(getattr(thing, "__func__", thing)).parameters.values())[skipped:]
    assert differences(entry["signature"], ours) == set(entry.get("differs", {}))


@pytest.mark.parametrize("module", sorted({entry["module"] for entry in NAMES}))
def test_the_modules_have_no_other_names(module: str):
    """A star imports what is still to come too: its use says so then, and not a NameError."""
    pytest.importorskip("torch")
    listed = [e for e in NAMES if e["module"] == module and e["kind"] not in ("method", "constant")]
    names = set(importlib.import_module(module).__all__) - NEW.get(module, set())
    assert names == {entry["name"] for entry in listed}


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_name_is_said_to_come(library: str):
    pytest.importorskip("torch")
    importlib.import_module(library)
    announced = {
        (module, name)
        for module, names in paths.MODULES.items()
        if module == library or module.startswith(f"{library}.")
        for name, place in names.items()
        if isinstance(place, UnavailableReason)
    }
    assert announced == set()


def test_what_is_no_name_of_a_library_is_said_to_be_none():
    with pytest.raises(AttributeError, match="has no attribute 'nm'"):
        torchshard.nm  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'ParalelLinear'"):
        from torchdistpackage.compat.torchshard.nn import ParalelLinear  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchdistpackage.compat.torchshard.nm")


def test_names_of_modules_below_are_those_above():
    pytest.importorskip("torch")
    from torchdistpackage.compat import tplib
    from torchdistpackage.compat.torchshard.distributed import comm, core
    from torchdistpackage.compat.tplib import tensor_parallel, worker

    assert worker.Worker is tplib.Worker and worker.init_dist_env is tplib.init_dist_env
    assert tensor_parallel.tp_all_reduce is tplib.tp_all_reduce is not None
    assert tplib.tensor_parallel is tensor_parallel
    assert comm.gather is torchshard.distributed.gather
    assert torchshard.distributed.core is core and core.get_rank is torchshard.distributed.get_rank
    assert torchshard.TORCH_VERSION >= (2, 11)
