"""A snapshot is what git tracks as it is now; its name is its content; imports lead into it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm import snapshot
from torchdistpackage.launch.slurm.job import code_paths, import_folders
from torchdistpackage.launch.slurm.snapshot import CodeSnapshot, collect, materialize, tree_of


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Tracked: main.py, src/pkg/a.py; not: notes.py, data.bin, .env/x.py (ignored)."""
    root = tmp_path / "my repo"
    for name, text in {
        "main.py": "import pkg.a\n",
        "src/pkg/a.py": "A = 1\n",
        "src/pkg/__init__.py": "",
        ".gitignore": ".env\nruns\n",
        ".env/x.py": "",
        "notes.py": "",
        "data.bin": "\0",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "main.py", "src", ".gitignore")
    git(root, "commit", "-q", "-m", "x")
    return root


def names(taken: CodeSnapshot) -> set[str]:
    return {x.name.removeprefix("tree/") for x in taken.items if x.name.startswith("tree/")}


def copied(folder: Path) -> dict[str, Path]:
    return {str(p.relative_to(folder / "tree")): p for p in (folder / "tree").rglob("*")}


small = pytest.mark.usefixtures("small_package")
TRACKED = {"main.py", "src/pkg/a.py", "src/pkg/__init__.py", ".gitignore"}


@small
def test_tracked_files_are_taken_as_they_are_now(repo: Path, tmp_path: Path):
    (repo / "main.py").write_text("changed = 1\n")
    (repo / "staged.py").write_text("")
    git(repo, "add", "staged.py")
    (repo / "src/pkg/a.py").unlink()
    taken = collect(tree_of(repo / "src"))
    assert names(taken) == (TRACKED | {"staged.py"}) - {"src/pkg/a.py"}
    folder = materialize(taken, tmp_path / "runs/r/code", "login", 1.7e9)
    assert folder == tmp_path / "runs/r/code" / taken.digest and len(taken.digest) == 12
    assert (folder / "tree/main.py").read_text() == "changed = 1\n"
    facts = json.loads((folder / "code.json").read_text())
    assert facts["commit"] == git(repo, "rev-parse", "HEAD")
    assert (facts["branch"], facts["dirty"], facts["host"]) == ("main", True, "login")
    assert facts["num_files"] == len(taken.items) and facts["num_bytes"] == taken.num_bytes
    diff = (folder / "code.diff").read_text()
    assert "+changed = 1" in diff and "-import pkg.a" in diff


@small
def test_modules_that_are_not_tracked_are_named_and_others_are_not(repo: Path):
    (repo / "runs/code").mkdir(parents=True)
    (repo / "more").mkdir()
    (repo / "more/copy.py").write_text("")
    (note,) = collect(tree_of(repo, skip=[repo / "more"])).notes
    assert "notes.py;" in note and "git add" in note
    assert "data.bin" not in note and "copy.py" not in note


@small
def test_files_that_are_listed_come_along(repo: Path):
    (repo / "extra/deep").mkdir(parents=True)
    for name in ("extra/deep/x.txt", "extra/y.bin", "a [1].py"):
        (repo / name).write_text("")
    taken = collect(tree_of(repo, ["extra", "notes.py", "*.bin", "a [1].py", "main.py"]))
    more = {"extra/deep/x.txt", "extra/y.bin", "notes.py", "data.bin", "a [1].py"}
    assert names(taken) == TRACKED | more
    assert collect(tree_of(repo / "src", ["../data.bin"])).digest != taken.digest
    assert not taken.notes


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("nothing/*.py", "names no file"),
        ("../outside", "leads out of"),
        ("/etc/hosts", "leads out"),
    ],
)
def test_a_listed_file_that_cannot_be_is_refused(repo: Path, pattern: str, part: str):
    (repo.parent / "outside").write_text("")
    with pytest.raises(LaunchError, match=part):
        tree_of(repo, [pattern])


@small
def test_the_same_content_has_the_same_folder(repo: Path, tmp_path: Path):
    codes = tmp_path / "code"
    first = materialize(collect(tree_of(repo)), codes, "login", 0.0)
    os.utime(repo / "main.py", (1, 1))
    assert materialize(collect(tree_of(repo)), codes, "other", 9.0) == first
    assert json.loads((first / "code.json").read_text())["host"] == "login"
    digests = {first.name}
    for change in (
        lambda: (repo / "main.py").write_text("x"),
        lambda: (repo / "main.py").chmod(0o755),
        lambda: (repo / "main.py").rename(repo / "other.py"),
    ):
        change()
        git(repo, "add", "-A", ".")
        digests.add(materialize(collect(tree_of(repo)), codes, "login", 0.0).name)
    assert len(digests) == 4
    assert sorted(p.name for p in codes.iterdir()) == sorted(digests)


@small
def test_odd_names_links_and_modes_survive(repo: Path, tmp_path: Path):
    odd = ["a b.py", "ü\n\t'\".py", "-x", "sub dir/*"]
    for name in odd:
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text(name)
    (repo / "run.sh").write_text("#!/bin/sh\n")
    (repo / "run.sh").chmod(0o755)
    (tmp_path / "outside").write_text("out")
    links = {"in": "main.py", "dir": "src/pkg", "out": "../outside", "lost": "nowhere"}
    for name, target in links.items():
        (repo / name).symlink_to(target)
    git(repo, "add", "--", *odd, "run.sh", *links)
    folder = materialize(collect(tree_of(repo)), tmp_path / "code", "login", 0.0)
    files = copied(folder)
    assert all(files[name].read_text() == name for name in odd)
    assert files["run.sh"].stat().st_mode & 0o777 == 0o755
    assert files["main.py"].stat().st_mode & 0o111 == 0
    assert str(files["in"].readlink()) == "main.py" and str(files["dir"].readlink()) == "src/pkg"
    assert str(files["out"].readlink()) == str(tmp_path / "outside")
    assert files["lost"].is_symlink() and not files["lost"].exists()


@small
def test_files_of_submodules_are_part_of_it(repo: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q", "-b", "main")
    (other / "lib.py").write_text("")
    git(other, "add", "lib.py")
    git(other, "commit", "-q", "-m", "x")
    git(repo, "submodule", "--quiet", "add", str(other), "vendor/other")
    assert names(collect(tree_of(repo))) == TRACKED | {".gitmodules", "vendor/other/lib.py"}


def test_a_repository_without_a_commit_will_do(tmp_path: Path):
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "a.py").write_text("")
    git(tmp_path, "add", "a.py")
    found = tree_of(tmp_path)
    assert (found.files, dict(found.git)["commit"], found.diff) == (("a.py",), None, b"")


@pytest.mark.parametrize("git_is_there", [True, False])
def test_without_git_files_of_code_are_taken_and_that_is_said(
    git_is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not git_is_there:
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    here = tmp_path / "here"
    for name in (
        *("a.py", "conf/b.yaml", "data.bin", ".hidden/c.py", ".secret.py", "__pycache__/a.py"),
        *("venv/pyvenv.cfg", "venv/lib/d.py", "runs/one/e.json", "big.json"),
    ):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("")
    (here / "big.json").write_bytes(b" " * (snapshot.MAX_FILE_BYTES + 1))
    taken = collect(tree_of(here, ["data.bin"], [here / "runs"]))
    assert names(taken) == {"a.py", "conf/b.yaml", "data.bin"}
    first, second = taken.notes
    why = "not a git repository" if git_is_there else "there is no git here"
    assert why in first and f"the 2 files of code below {here}" in first
    assert "larger than 1 MiB: big.json" in second


@pytest.mark.parametrize(("limit", "value"), [("MAX_FILES", 3), ("MAX_BYTES", 3), ("MAX_SEEN", 3)])
def test_without_git_there_is_a_limit(limit, value, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(snapshot, limit, value)
    for index in range(5):
        (tmp_path / f"{index}.py").write_text("x")
    with pytest.raises(LaunchError, match="submit from the folder of your project"):
        tree_of(tmp_path)


@small
def test_a_file_that_changes_meanwhile_is_told(repo: Path, tmp_path: Path):
    taken = collect(tree_of(repo))
    (repo / "main.py").write_text("edited\n")
    with pytest.raises(LaunchError, match="submit again"):
        materialize(taken, tmp_path / "code", "login", 0.0)
    assert list((tmp_path / "code").iterdir()) == []
    (repo / "main.py").unlink()
    with pytest.raises(LaunchError, match="cannot be copied"):
        materialize(taken, tmp_path / "code", "login", 0.0)


def test_this_package_is_part_of_every_snapshot(repo: Path, tmp_path: Path):
    folder = materialize(collect(tree_of(repo)), tmp_path / "code", "login", 0.0)
    own = folder / "package" / "torchdistpackage"
    assert (own / "launch/slurm/snapshot.py").read_bytes() == Path(snapshot.__file__).read_bytes()
    assert not list(own.rglob("__pycache__"))
    inside = collect(tree_of(snapshot.PACKAGE.parent))
    assert "tree/torchdistpackage/launch/slurm/snapshot.py" in {x.name for x in inside.items}
    assert not any(x.name.startswith("package/") for x in inside.items)


def test_imports_lead_into_the_snapshot(repo: Path, tmp_path: Path):
    taken = collect(tree_of(repo))
    folder = materialize(taken, tmp_path / "code", "login", 0.0)
    env = {"PYTHONPATH": f"src::{tmp_path / 'other'}:{repo / '.env'}"}
    imports = ["", str(repo), str(repo / ".env"), "/usr/lib/python3", str(repo / "src")]
    paths = code_paths(taken, folder, repo, imports, env)
    assert paths.paths == (
        *(f"{folder}/package", f"{folder}/tree", f"{folder}/tree/src"),
        *(str(tmp_path / "other"), str(repo / ".env")),
    )
    assert (paths.folder, paths.workdir) == (str(folder), f"{folder}/tree")
    assert code_paths(taken, folder, repo / "src/pkg", [], {}).workdir == f"{folder}/tree/src/pkg"
    assert code_paths(taken, folder, repo / ".env", [], {}).workdir == str(repo / ".env")


def test_a_job_imports_what_was_submitted(repo: Path, tmp_path: Path):
    taken = collect(tree_of(repo))
    folder = materialize(taken, tmp_path / "code", "login", 0.0)
    paths = code_paths(taken, folder, repo, [str(repo / "src")], {})
    (repo / "src/pkg/a.py").write_text("A = 2\n")
    code = "import pkg.a, torchdistpackage as t; print(pkg.a.A, pkg.a.__file__, t.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths.paths)},
        cwd=repo,
        capture_output=True,
        text=True,
        check=True,
    )
    package = f"{folder}/package/torchdistpackage/__init__.py"
    assert done.stdout == f"1 {folder}/tree/src/pkg/a.py {package}\n"


def test_packages_installed_as_editable_are_found_without_the_path():
    finder = ModuleType("__editable___mine_1_0_finder")
    finder.MAPPING = {"mine": "/repo/src/mine"}  # type: ignore[attr-defined]
    found = import_folders(["/a"], {"__editable___mine_1_0_finder": finder, "os": os})
    assert found == ("/a", "/repo/src")
    assert set(sys.path) <= set(import_folders())
