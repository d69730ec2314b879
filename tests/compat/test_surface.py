"""The names of the earlier TorchDistPackage: where they were, as they were, or why not.

`surface.yaml` lists them all. What it says is held against the package from both sides, so neither
can change alone.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchdistpackage
from tests.compat.surface import differences, import_from, read
from torchdistpackage.compat import paths
from torchdistpackage.launch.ipc import unpack

TESTS = Path(__file__).parents[1]
ENTRIES = read("surface.yaml")
BY_NAME = {entry["name"]: entry for entry in ENTRIES}
"""Where two modules have a name, the later one: only owners of methods are looked up."""
HERE = [entry for entry in ENTRIES if entry["status"] == "here"]
MODULES = paths._flat()
"""The old paths alone: other libraries' names are announced when they are first imported."""


def places(entry: dict) -> list[str]:
    """Full paths of the modules that had the name."""
    top = ["torchdistpackage"] if entry.get("top") else []
    return [*top, *(f"torchdistpackage.{path}" for path in entry.get("paths", ()))]


def by_name(entries: list[dict]) -> object:
    return pytest.mark.parametrize("entry", entries, ids=lambda entry: entry["name"])


def found(entry: dict) -> object:
    owner, _, attribute = entry["name"].partition(".")
    if not attribute:
        return import_from(places(entry)[0], owner)
    return getattr(import_from(places(BY_NAME[owner])[0], owner), attribute)


def test_the_table_is_well_formed():
    named = [(entry["name"], *entry.get("paths", ())[:1]) for entry in ENTRIES]
    assert len(set(named)) == len(named)
    for entry in ENTRIES:
        assert entry["status"] == "here" and entry["kind"]
        assert all(entry.get("differs", {"": "reason"}).values())
        owner, _, attribute = entry["name"].partition(".")
        assert (entry["kind"] == "method") == bool(attribute)
        assert not attribute or BY_NAME[owner]["status"] == entry["status"]
        assert attribute or places(entry), f"{entry['name']} was nowhere"
        assert "signature" in entry or entry["kind"] in ("value", "method")
        assert entry["meaning"], entry["name"]
        assert entry["test"], entry["name"]


@by_name(HERE)
def test_a_name_is_where_it_was(entry: dict):
    pytest.importorskip("torch")
    thing = found(entry)
    assert all(import_from(place, entry["name"]) is thing for place in places(entry))
    assert entry["kind"] == "value" or callable(thing) or isinstance(thing, property)


@by_name([entry for entry in HERE if "signature" in entry])
def test_a_name_takes_the_calls_that_it_took(entry: dict):
    """Each difference is one that the table gives a reason for, and none of those is stale."""
    pytest.importorskip("torch")
    thing = found(entry)
    ours = list(inspect.signature(thing).parameters.values())
    owner = BY_NAME[entry["name"].partition(".")[0]]
    if entry["kind"] == "method" and owner["kind"] == "class":
        ours = ours[1:]
    assert differences(entry["signature"], ours) == set(entry.get("differs", {}))


@pytest.mark.parametrize(
    ("earlier", "ours", "differ"),
    [
        ("a, b=1", lambda a, b=1, *, c=None: ..., set()),
        ("a, b=1", lambda a, b=1, c=2, **d: ..., set()),
        ("a, b=1", lambda b, a=1: ..., {"a", "b"}),
        ("a, b=1", lambda a, b=2: ..., {"b"}),
        ("a, b=1", lambda a, b: ..., {"b"}),
        ("a, b", lambda a, b=1: ..., set()),
        ("a, b=1", lambda a: ..., {"b"}),
        ("a", lambda a, b: ..., {"b"}),
        ("a", lambda a, *, b: ..., {"b"}),
        ("a, **rest", lambda a: ..., {"rest"}),
    ],
)
def test_differences_are_seen(earlier, ours, differ):
    assert differences(earlier, list(inspect.signature(ours).parameters.values())) == differ


def test_the_table_of_paths_has_no_other_names():
    listed = {(place, e["name"]) for e in ENTRIES if e["kind"] != "method" for place in places(e)}
    served = {(path, name) for path, names in MODULES.items() for name in names}
    assert served <= listed
    files = ("", ".ddp.naive_ddp", ".parallel", ".tools.debug_nan", ".tools.module_replace")
    files += (".tools.module_profiler",)
    kept = {f"torchdistpackage{file}" for file in files}
    assert {path for path, _ in listed - served} <= kept, "only real files have names of their own"


@pytest.mark.parametrize("test", sorted({entry["test"] for entry in HERE}))
def test_the_test_that_shows_a_meaning_is_there(test: str):
    """By name only: what the test shows is for its reader, and for who changes the meaning."""
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert functions.count(name) == 1


def test_what_is_not_as_it_was_is_on_the_page():
    """The first column of its table has each name that differs, and no other."""
    page = (TESTS.parent / "docs" / "coming_from.md").read_text(encoding="utf-8")
    section = page.partition("\n## TorchDistPackage\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    told = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(set(told)) == len(told)
    differ = {e["name"] for e in HERE if e.get("differs") or e.get("changed")}
    assert set(told) == differ


def test_every_earlier_tpc_method_is_there():
    pytest.importorskip("torch")
    methods = [e["name"].removeprefix("tpc.") for e in ENTRIES if e["name"].startswith("tpc.")]
    assert len(methods) == 30
    assert [name for name in methods if not callable(getattr(torchdistpackage.tpc, name))] == []


OLD = [path for path in MODULES if path != "torchdistpackage"]
SHARED = ("torchdistpackage.ddp.naive_ddp",)
"""Old paths at which there is a file that needs torch."""


@pytest.mark.parametrize("path", OLD)
def test_an_old_path_is_a_module_in_every_way(path: str):
    if path in SHARED:
        pytest.importorskip("torch")
    module = importlib.import_module(path)
    assert sys.modules[path] is module and module.__name__ == path
    parent, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(parent), name) is module
    assert import_from(parent, name) is module
    if path not in SHARED:  # whose classes would be new ones after it
        assert importlib.reload(module) is module
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{path}.no_such_module")


def test_a_star_imports_all_names():
    modules = {path: importlib.import_module(path) for path in OLD if path not in SHARED}
    stars = {path: m.__all__ for path, m in modules.items() if not hasattr(m, "__file__")}
    assert {path: set(names) for path, names in stars.items()} == {
        path: set(MODULES[path]) for path in stars
    }
    assert stars["torchdistpackage.dist.node_group"] == ["setup_node_groups"]


def test_import_statements_work_as_written():
    pytest.importorskip("torch")
    import torchdistpackage.dist.process_topo as topo
    from torchdistpackage.parallel.pipeline_sched import forward_backward
    from torchdistpackage.utils import fix_rand

    assert topo.torch_parallel_context is torchdistpackage.tpc
    assert forward_backward is torchdistpackage.forward_backward
    assert fix_rand is torchdistpackage.fix_rand
    with pytest.raises(ImportError, match="cannot import name 'ShardedEmu'"):
        from torchdistpackage.dist.sharded_ema import ShardedEmu  # noqa: F401


def test_a_pickle_by_an_old_path_loads():
    pytest.importorskip("torch")
    old = b"ctorchdistpackage.parallel.pipeline_helper\nCallableModule\n."
    assert unpack(old) is importlib.import_module("torchdistpackage.parallel").CallableModule


def test_old_paths_load_nothing_until_asked():
    """In a fresh interpreter that refuses torch: all import, and only a name needs torch."""
    code = f"""
import importlib, sys
sys.modules["torch"] = None
import torchdistpackage
before = set(sys.modules)
assert torchdistpackage.dist.process_topo.__name__ == "torchdistpackage.dist.process_topo"
for path in {OLD!r}:
    if path not in {SHARED!r}:
        importlib.import_module(path)
loaded = set(sys.modules) - before - {{*{OLD!r}, "torchdistpackage.lazy"}}
assert not loaded, loaded
from torchdistpackage.dist.process_topo import gen_inner_ranks
assert gen_inner_ranks(4, 2) == [[0, 1], [2, 3]]
try:
    torchdistpackage.dist.process_topo.test_comm
except ImportError as error:
    assert "torch" in str(error), error
else:
    raise SystemExit("test_comm came without torch")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
