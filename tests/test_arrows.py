"""Arrows between modules can be followed: none is hidden in a string, a function or a circle.

No torch.
"""

import ast
import graphlib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import package_files
from tests.package_files import (
    PACKAGE,
    ROOT,
    files,
    name_of,
    offences,
    own_imports,
    present,
    pure,
)

MAY_LOAD_BY_NAME = {
    "__init__.py": "public names, on first use",
    "compat/paths.py": "old names, on first use",
    "lazy.py": "public names of packages, commands, and what a name in a table stands for",
    "launch/entrypoint.py": "the function that a user names",
    "launch/fork_server.py": "the preload list, which is given as names so that it needs no torch",
    "harness/late/streams.py": "doubles in modules of ddp that ask for the device",
}
"""Loading by text escapes the rules on imports."""


MAY_NAME_MODULES = {
    "compat/emp/devices.py": "a logger",
    "config/data_section.py": "what reads data",
    "environment/failure.py": "frames that a report leaves out",
    "families/table.py": "what reads folders",
    "compat/torchshard/marks.py": "torch's function of a split tensor, which makes split tensors",
    "harness/late/streams.py": "doubles in modules to the right",
    "train/compiled.py": "hooks of our own, told from others by where they are defined",
    "launch/fork_server_client.py": "what another process runs",
    "launch/workers.py": "what another process runs",
    "launch/slurm/restart_script.py": "what another process runs",
    "models/registry.py": "families of transformers, for the plans that have one",
    "train/export.py": "what rounds weights to 4 bits, with torch",
    "data/tokens/token_workers.py": "what another process runs",
    "train/harness_calls.py": "lm-eval, on rank 0 of an evaluation by its tasks",
    "train/worker.py": "the check of nodes, for the runs that ask for it",
    "train/trackers/feed.py": "libraries of services, for the runs that log to them",
}
"""Files with modules of ours in strings for other reasons than those of `needs_no_reason`."""


def late_imports(path: Path) -> list[str]:
    """Imports of our modules inside functions."""
    return [
        f"line {line}: {name_of(target)} in {function.name}"
        for function in package_files.nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, target in own_imports(path, function)
    ]


def test_own_modules_are_imported_at_the_top():
    """A late import hides a circle. Optional dependencies, which are not ours, may come late."""
    assert offences(late_imports) == {}


LOADERS = ("import_module", "resolve_name", "__import__")


def loads_by_name(path: Path) -> list[str]:
    """Calls of import_module, resolve_name and __import__."""
    return [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in package_files.nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOADERS
    ]


def test_modules_are_loaded_by_text_only_where_there_is_a_reason():
    found = offences(loads_by_name)
    assert set(found) == set(present(MAY_LOAD_BY_NAME)), found


def circle(imported: Mapping[str, set[str]]) -> list[str]:
    """Files of which each imports the one before, the first and last being the same; [] if none."""
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    """Imports for types count: a reader follows them too."""
    imported = {
        name_of(path): {name_of(target) for _, target in own_imports(path)} for path in files()
    }
    assert circle(imported) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "c", "b", "a"]


def needs_no_reason(path: Path, text: str) -> bool:
    """Whether an import in the place of this name of a module would bring torch to a file that
    needs none, or whether a command loads what it shows."""
    target = package_files.file_of(text.partition(":")[0])
    if target is None:
        return False
    return path in pure() and (target not in pure() or name_of(path).startswith("cli/"))


def names_in_strings(path: Path) -> list[str]:
    """Strings, also the beginnings of others, that are a module or a member of one."""
    texts = (
        (node.lineno, node.value)
        for node in package_files.nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    names = [(line, x) for line, x in texts if re.fullmatch(rf"{PACKAGE}\.[\w.:]*", x)]
    return [f"line {line}: {x}" for line, x in names if not needs_no_reason(path, x)]


def test_modules_are_named_in_strings_only_where_there_is_a_reason():
    """`lazy.py` says when that is right."""
    found = offences(names_in_strings)
    assert set(found) == set(present(MAY_NAME_MODULES)), found
    assert needs_no_reason(ROOT / "plan/run_plan.py", "torchdistpackage.ddp.naive_ddp:NaiveDDP")
    assert not needs_no_reason(ROOT / "ddp/reducer.py", "torchdistpackage.comm.tpc:tpc")
    assert not needs_no_reason(ROOT / "plan/run_plan.py", "torchdistpackage.ddp.no_such_file")


OPTIONS_OF = {
    "ddp/reducer.py": (
        *("naive_ddp", "options", "scheduled_ready", "bucket_tuning", "sparse_grads"),
        *("param_sync", "comm_hooks"),
    ),
    "ddp/zero/bucket.py": ("optimizer", "guards", "offload", "stage3", "state_dict"),
}
"""Mechanism -> files of its options: who makes it imports both and passes in what it needs."""


def reachable(start: Path) -> set[Path]:
    """It and what it imports, at any depth."""
    found, left = set[Path](), [start]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += [target for _, target in own_imports(path)]
    return found


@pytest.mark.parametrize("mechanism", OPTIONS_OF)
def test_a_mechanism_imports_none_of_its_options(mechanism: str):
    folder = (ROOT / mechanism).parent
    options = {folder / f"{name}.py" for name in OPTIONS_OF[mechanism]}
    assert all(path.exists() for path in options)
    assert not options & reachable(ROOT / mechanism)


SAMPLES = {
    "tools/sample.py": (
        names_in_strings,
        "from torchdistpackage.lazy import resolve\nresolve('torchdistpackage.ddp.auto:measure')",
        "line 2: torchdistpackage.ddp.auto:measure",
    ),
    "models/sample.py": (
        loads_by_name,
        "from importlib import import_module\nimport_module('torchdistpackage.cli.main')",
        "line 2: import_module",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_hidden_arrow_is_seen(name: str, monkeypatch: pytest.MonkeyPatch):
    look, text, expected = SAMPLES[name]
    monkeypatch.setattr(package_files, "tree", lambda path: ast.parse(text))
    assert list(look(ROOT / name)) == [expected]
