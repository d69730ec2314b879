"""The rules the package lives by: imports point left, planning needs no torch, one folder talks.

Read from the syntax trees, so that nothing hides in a function or behind TYPE_CHECKING.

No torch.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchdistpackage
from tests import package_files
from tests.package_files import (
    HAS_WING,
    ROOT,
    WING,
    imports,
    module_of,
    name_of,
    offences,
    own_imports,
    place,
    pure,
)

ONLY_ARGUMENTS = ("ddp", "optim", "parallel", "checkpoint", "tools")
"""Folders that take plain arguments and never see the configuration or the launcher."""

BUILDERS = [
    *("build", "data_build", "inference", "job", "parity", "parity_steps", "stage_trace", "worker"),
]
"""Files of train that read the configuration; the others, and data, get plain arguments."""

MAY_CALL_TORCH_DISTRIBUTED = {
    "checkpoint/formats/dcp.py": "torch's own files, which it reads and writes without a group",
    "harness/late/group.py": "a back end of our own, and a default group of it without peers",
    "harness/late/call.py": "gloo under a back end of our own",
    "thread_ranks/alone.py": "groups whose other members are not there",
    "thread_ranks/run.py": "a default group for each thread",
    "thread_ranks/transport.py": "a backend of our own",
    "thread_ranks/threads.py": "a world of groups for each thread",
    "thread_ranks/own_backend.py": "what both back ends of our own answer",
    "harness/calls.py": "the bare calls that ours are measured against",
    "harness/guarded.py": "asks the default store, so that a stuck group holds up no word",
    "harness/pool_worker.py": "makes and ends the default groups of test ranks, under comm's feet",
}


def wrong_direction(path: Path) -> list[str]:
    own = place(path)
    return [
        f"line {line}: {name_of(target)} is to the right"
        for line, target in own_imports(path)
        if place(target) > own
    ]


def test_imports_point_left():
    assert offences(wrong_direction) == {}


def wing_in(path: Path) -> list[str]:
    """Imports of the wing in a file of the core, those of `TOP_FILES` too."""
    in_wing = path.relative_to(ROOT).parts[0] == WING
    targets = () if in_wing else own_imports(path)
    return [
        f"line {line}: {name_of(target)} is in the wing"
        for line, target in targets
        if target.relative_to(ROOT).parts[0] == WING
    ]


def test_the_core_imports_nothing_of_the_wing():
    assert offences(wing_in) == {}


def configuration_and_launcher_in(path: Path) -> list[str]:
    """Imports of them in folders that take plain arguments, and in comm."""
    folder = path.relative_to(ROOT).parts[0]
    barred = {"config", "environment", "launch"} if folder in ONLY_ARGUMENTS else set()
    if folder == "comm":
        barred = {"config", "launch"}
    return [
        f"line {line}: {name_of(target)}"
        for line, target in own_imports(path)
        if target.relative_to(ROOT).parts[0] in barred
    ]


def test_only_the_right_half_knows_configuration_and_launcher():
    assert offences(configuration_and_launcher_in) == {}


def tools_of_tests_in(path: Path) -> list[str]:
    """Imports of harness in folders that compute: a model runs no linter and no watchdog."""
    barred = path.relative_to(ROOT).parts[0] in ("ddp", "optim", "parallel", "models")
    targets = own_imports(path) if barred else ()
    return [
        f"line {line}: {name_of(target)}"
        for line, target in targets
        if target.relative_to(ROOT).parts[0] == "harness"
    ]


def test_what_computes_imports_no_linter():
    assert offences(tools_of_tests_in) == {}


def configuration_in(path: Path) -> list[str]:
    """Reads of an attribute `config`."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in package_files.nodes(path)
        if isinstance(node, ast.Attribute) and node.attr.lstrip("_") == "config"
    ]


def test_in_training_only_what_plans_and_builds_reads_the_configuration():
    train = [path for path in (ROOT / "train").glob("*.py") if path.stem not in BUILDERS]
    data = [*(ROOT / "data").rglob("*.py")]
    assert train and data and offences(configuration_in, train + data) == {}


def torch_in(path: Path) -> list[str]:
    """Imports of it, and who imports this file that needs none."""
    by = pure().get(path)
    way = f", imported by {name_of(by)}" if by else ""
    found = [(line, module) for line, module in imports(path) if module.split(".")[0] == "torch"]
    return [f"line {line}: {module}{way}" for line, module in found]


def test_files_that_need_no_torch_and_what_they_import_import_none():
    assert sum(by is None for by in pure().values()) > 250
    assert offences(torch_in, pure()) == {}


def test_pure_modules_load_where_torch_is_refused():
    """A finder that refuses torch stands before all others: nothing loads it by a detour."""
    modules = sorted(module_of(path) for path in pure())
    assert len(modules) > 250
    code = f"""
import importlib, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{{name}} is refused here")
sys.meta_path.insert(0, NoTorch())
for module in {modules!r}:
    importlib.import_module(module)
assert not [name for name in sys.modules if name.partition(".")[0] == "torch"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def torch_distributed_in(path: Path) -> list[str]:
    """Every way by which a file gets at torch.distributed."""
    by_import = [
        f"line {line}: import {module}"
        for line, module in imports(path)
        if module.startswith("torch.distributed")
    ]
    by_name = [
        f"line {node.lineno}: from torch import distributed"
        for node in package_files.nodes(path)
        if isinstance(node, ast.ImportFrom)
        and node.module == "torch"
        and any(alias.name == "distributed" for alias in node.names)
    ]
    by_attribute = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in package_files.nodes(path)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith("torch.distributed")
        and node.attr == "distributed"
    ]
    return by_import + by_name + by_attribute


def test_only_comm_talks_to_torch_distributed():
    """Others name the group type by `comm.primitives.Group` and call what comm offers."""
    found = offences(torch_distributed_in)
    assert {n for n in found if not n.startswith("comm/")} <= set(MAY_CALL_TORCH_DISTRIBUTED), found


def test_exceptions_are_still_needed():
    assert set(MAY_CALL_TORCH_DISTRIBUTED) <= set(offences(torch_distributed_in))


SAMPLES = {
    "schedule/sample.py": (
        wrong_direction,
        "from torchdistpackage.comm import tpc",
        "line 1: comm/tpc.py is to the right",
    ),
    "parallel/tensor/sample.py": (
        wrong_direction,
        "def f():\n    import torchdistpackage.parallel.pipeline.partition.cost_split",
        "line 2: parallel/pipeline/partition/cost_split.py is to the right",
    ),
    "train/wing_sample.py": (
        wing_in,
        "from torchdistpackage.compat import paths",
        "line 1: compat/paths.py is in the wing",
    ),
    "ddp/sample.py": (
        torch_distributed_in,
        "import torch\nx = torch.distributed.get_rank()",
        "line 2: torch.distributed",
    ),
    "optim/sample.py": (
        torch_distributed_in,
        "from torch import distributed as dist",
        "line 1: from torch import distributed",
    ),
    "comm/launched.py": (
        configuration_and_launcher_in,
        "def f():\n    from torchdistpackage.launch.workers import run_local",
        "line 2: launch/workers.py",
    ),
    "plan/sample.py": (
        torch_in,
        "def f():\n    import torch.nn",
        "line 2: torch.nn",
    ),
    "models/linted.py": (
        tools_of_tests_in,
        "from torchdistpackage.harness.lint.linter import lint",
        "line 1: harness/lint/linter.py",
    ),
    "train/sample.py": (
        configuration_in,
        "every = trainer.plan.config.log.every",
        "line 1: trainer.plan.config",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_fence_holds(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each kind of breach, in a file that does not exist, is seen."""
    look, text, expected = SAMPLES[name]
    if look is wing_in and not HAS_WING:
        return
    monkeypatch.setattr(package_files, "tree", lambda path: ast.parse(text))
    assert list(look(ROOT / name)) == [expected]


def asks_of_zero(path: Path) -> list[str]:
    """Calls of isinstance that name a class of ZeRO."""
    calls = (n for n in package_files.nodes(path) if isinstance(n, ast.Call) and len(n.args) == 2)
    asked = [ast.unparse(n.args[1]) for n in calls if getattr(n.func, "id", "") == "isinstance"]
    return [x for x in asked if "ZeroOptimizer" in x or "ReduceScatterBucket" in x]


def test_nobody_asks_whether_something_is_of_zero():
    """They ask `ShardedOptimizer`, or what a bucket says of itself."""
    assert [x for x in offences(asks_of_zero) if not x.startswith("ddp/zero/")] == []


def reached(path: Path) -> set[str]:
    """Return names of the files that `path` imports, directly or not, and its own."""
    found: set[Path] = set()
    todo = [path]
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo += [target for _, target in own_imports(current)]
    return {name_of(x) for x in found}


@pytest.mark.parametrize("name", ["GradScaler", "NaiveDDP", "Pipeline", "clip_grad_norm_"])
def test_a_tree_without_zero_has_what_trains_a_pipeline(name: str):
    """With --full tests/parallel/pipeline/test_without_zero.py trains one there."""
    module = torchdistpackage.NAMES[name].partition(":")[0]
    files = reached(ROOT / f"{module.replace('.', '/')}.py")
    assert f"{module.replace('.', '/')}.py" in files and len(files) > 20
    assert [x for x in files if x.startswith("ddp/zero/")] == []
