"""The rules the package lives by: imports point left, planning needs no torch, one folder talks.

Read from the syntax trees, so that nothing hides in a function or behind TYPE_CHECKING.
"""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests import package_files
from tests.package_files import (
    ROOT,
    every_file,
    files,
    imports,
    module_of,
    name_of,
    own_imports,
)

PURE_FOLDERS = (
    "errors",
    "bounded",
    "bounded_yaml",
    "topology",
    "layout",
    "schedule",
    "config",
    "launch",
)
ORDER = (
    *PURE_FOLDERS,
    *("comm", "harness", "tools", "ddp", "optim", "parallel", "models", "checkpoint", "train"),
    *("compat", "cli"),
)
INSIDE_PARALLEL = ("tensor", "context", "expert", "pipeline", "auto", "placed")

TOP_FILES = ("__init__.py", "__main__.py", "testing.py")
"""They only name what others define, and so stand to the right of everything."""

PURE_FILES = (
    "__init__.py",
    "testing.py",
    "compat/init_method.py",
    "compat/emp/__init__.py",
    "compat/not_available.py",
    "compat/paths.py",
    "compat/tensor_parallel/__init__.py",
    "compat/torchdistpackage/job_monitor.py",
    "compat/torchdistpackage/ranks.py",
    "compat/torchshard/__init__.py",
    "comm/__init__.py",
    "harness/operations.py",
    "harness/pool.py",
    "harness/pool_job.py",
    "harness/run_on_topology.py",
    "harness/bench/*.py",
    "harness/hang/*.py",
    "harness/late/__init__.py",
    "harness/late/orders.py",
    "harness/lint/__init__.py",
    "harness/lint/matcher.py",
    "harness/lint/replay.py",
    "harness/lint/report.py",
    "harness/lint/stacks.py",
    "harness/stragglers/find.py",
    "harness/comm_test_report.py",
    "ddp/bucket_plan.py",
    "layout/partition.py",
    "ddp/zero/shard_bounds.py",
    "ddp/zero/requires_whole.py",
    "optim/lr.py",
    "parallel/__init__.py",
    "parallel/pipeline/partition/cut_search.py",
    "parallel/pipeline/partition/cost_split.py",
    "parallel/tensor/layouts.py",
    "models/registry.py",
    "models/*_layout.py",
    "checkpoint/manifest.py",
    "checkpoint/commit.py",
    "checkpoint/validate.py",
    "train/estimate.py",
    "train/plan.py",
    "train/shrink.py",
    "train/stage_partition.py",
    "train/job.py",
    "train/stop.py",
    "train/submitit_task.py",
    "cli/*.py",
)
"""Outside the pure folders: what planning, and importing the package, need."""

ONLY_ARGUMENTS = ("ddp", "optim", "parallel", "checkpoint", "tools")
"""Folders that take plain arguments and never see the configuration or the launcher."""

COMM_MAY_LAUNCH = {
    "comm/runtime.py": "turns what the launcher found out, once agreed on, into a process group",
    "comm/creation.py": "leaves a rank's last words where its launcher looks for them",
}

PLANNERS = ["build", "dry_run", "estimate", "plan", "shrink", "worker"]
"""Files of train that read the configuration; the others get plain arguments."""

MAY_CALL_TORCH_DISTRIBUTED = {
    "harness/late/group.py": "a back end of our own",
    "harness/late/mirror.py": "a default group without peers",
    "harness/late/transfer.py": "gloo under a back end of our own",
    "harness/lint/data_movement.py": "reduce operations of a backend of our own",
    "harness/lint/linter.py": "a default group for each thread",
    "harness/lint/transport.py": "a backend of our own",
    "harness/lint/thread_worlds.py": "a world of groups for each thread",
    "harness/lint/own_backend.py": "what both back ends of our own answer",
    "harness/raw_torch.py": "the bare calls that ours are measured against",
    "harness/store_consensus.py": "asks the default store, so that a stuck group holds up no word",
    "harness/timeouts.py": "asks gloo's options for the time limit that it puts back",
    "harness/pool_worker.py": "makes and ends the default groups of test ranks, under comm's feet",
}

MAY_LOAD_BY_NAME = {
    "__init__.py": "public names, on first use",
    "testing.py": "public names, on first use",
    "comm/__init__.py": "public names, on first use",
    "harness/lint/__init__.py": "public names, on first use",
    "parallel/__init__.py": "public names, on first use",
    "compat/paths.py": "old names, on first use",
    "launch/entrypoint.py": "the function that a user names",
    "launch/fork_server.py": "the preload list, which is given as names so that it needs no torch",
    "cli/main.py": "a command loads only what it needs",
    "harness/late/streams.py": "doubles in modules of ddp that ask for the device",
}
"""Loading by text escapes the rules on imports."""


def is_pure(path: Path) -> bool:
    folder = path.relative_to(ROOT).parts[0].removesuffix(".py")
    empty = path.name == "__init__.py" and not package_files.tree(path).body
    return folder in PURE_FOLDERS or empty or any(fnmatch(name_of(path), f) for f in PURE_FILES)


def place(path: Path) -> tuple[int, int]:
    """Position in the order of folders, and inside parallel."""
    relative = path.relative_to(ROOT)
    if relative.as_posix() in TOP_FILES:
        return len(ORDER), 0
    folder, *rest = relative.parts
    inside = rest[0] if folder == "parallel" and len(rest) > 1 else ""
    at = INSIDE_PARALLEL.index(inside) if inside in INSIDE_PARALLEL else -1
    return ORDER.index(folder.removesuffix(".py")), at


def wrong_direction(path: Path) -> list[str]:
    own = place(path)
    return [
        f"line {line}: {name_of(target)} is to the right"
        for line, target in own_imports(path)
        if place(target) > own
    ]


@every_file
def test_imports_point_left(path: Path):
    assert wrong_direction(path) == []


@every_file
def test_only_the_right_half_knows_configuration_and_launcher(path: Path):
    folder = path.relative_to(ROOT).parts[0]
    barred = {"config", "launch"} if folder in ONLY_ARGUMENTS else set()
    if folder == "comm":
        barred = {"config"} if name_of(path) in COMM_MAY_LAUNCH else {"config", "launch"}
    seen = [
        f"line {line}: {name_of(target)}"
        for line, target in own_imports(path)
        if target.relative_to(ROOT).parts[0] in barred
    ]
    assert seen == []


def configuration_in(path: Path) -> list[str]:
    """Reads of an attribute `config`."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(package_files.tree(path))
        if isinstance(node, ast.Attribute) and node.attr.lstrip("_") == "config"
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "train").glob("*.py")), ids=name_of)
def test_in_training_only_what_plans_and_builds_reads_the_configuration(path: Path):
    if path.stem not in PLANNERS:
        assert configuration_in(path) == []


def test_files_that_promise_to_need_no_torch_are_held_to_it():
    promised = [
        p for p in files() if "no torch" in (ast.get_docstring(package_files.tree(p)) or "").lower()
    ]
    assert len(promised) > 8
    assert [name_of(path) for path in promised if not is_pure(path)] == []


@pytest.mark.parametrize("path", [p for p in files() if is_pure(p)], ids=name_of)
def test_pure_files_import_pure_files_and_no_torch(path: Path):
    torch = [line for line, module in imports(path) if module.split(".")[0] == "torch"]
    assert torch == []
    unclean = [
        f"line {line}: {name_of(target)} needs torch"
        for line, target in own_imports(path)
        if not is_pure(target)
    ]
    assert unclean == []


def test_pure_modules_load_where_torch_is_refused():
    """A finder that refuses torch stands before all others: nothing loads it by a detour."""
    modules = [module_of(path) for path in files() if is_pure(path)]
    assert len(modules) > 30
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
        for node in ast.walk(package_files.tree(path))
        if isinstance(node, ast.ImportFrom)
        and node.module == "torch"
        and any(alias.name == "distributed" for alias in node.names)
    ]
    by_attribute = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(package_files.tree(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith("torch.distributed")
        and node.attr == "distributed"
    ]
    return by_import + by_name + by_attribute


@every_file
def test_only_comm_talks_to_torch_distributed(path: Path):
    """Others name the group type by `comm.primitives.Group` and call what comm offers."""
    if (
        path.relative_to(ROOT).parts[0] != "comm"
        and name_of(path) not in MAY_CALL_TORCH_DISTRIBUTED
    ):
        assert torch_distributed_in(path) == []


def test_exceptions_are_still_needed():
    assert all(torch_distributed_in(ROOT / name) for name in MAY_CALL_TORCH_DISTRIBUTED)
    assert all(loads_by_name(ROOT / name) for name in MAY_LOAD_BY_NAME)
    for name in COMM_MAY_LAUNCH:
        assert any("launch" in name_of(t) for _, t in own_imports(ROOT / name)), name
    for name in PURE_FILES:
        assert list(ROOT.glob(name)), f"no file {name}"


@every_file
def test_own_modules_are_imported_at_the_top(path: Path):
    """A late import hides a circle. Optional dependencies, which are not ours, may come late."""
    late = [
        f"line {line}: {name_of(target)} in {function.name}"
        for function in ast.walk(package_files.tree(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, target in own_imports(path, function)
    ]
    assert late == []


def loads_by_name(path: Path) -> list[str]:
    """Calls of import_module and __import__."""
    return [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(package_files.tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
    ]


@every_file
def test_modules_are_loaded_by_text_only_where_there_is_a_reason(path: Path):
    if name_of(path) not in MAY_LOAD_BY_NAME:
        assert loads_by_name(path) == []


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
    "train/sample.py": (
        configuration_in,
        "every = trainer.plan.config.log.every",
        "line 1: trainer.plan.config",
    ),
    "models/sample.py": (
        loads_by_name,
        "from importlib import import_module\nimport_module('torchdistpackage.cli.main')",
        "line 2: import_module",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_fence_holds(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each kind of breach, in a file that does not exist, is seen."""
    look, text, expected = SAMPLES[name]
    monkeypatch.setattr(package_files, "tree", lambda path: ast.parse(text))
    assert list(look(ROOT / name)) == [expected]
