"""Which files are the code of a run: what git tracks where the user stands, as it is now.

One rule: files are named by somebody, by git or by `launch.slurm.files`, never guessed at, except
where there is no git; then those with a suffix of code are taken, up to a limit.
"""

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchdistpackage.errors import LaunchError

SUFFIXES = (
    *(".py", ".pyi", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".sh", ".txt", ".jinja"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".typed"),
)
"""Taken where there is no git."""
MAX_FILES = 5_000
MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 64 << 20
MAX_SEEN = 100_000
"""Limits without git: somebody may stand in a home folder, or beside data."""
LARGE_BYTES = 512 << 20
"""A snapshot that is worth a remark."""
_GIT_TIMEOUT_S = 60.0
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Tree:
    """Files of the code by their paths from `root`, and what a user should know of them.

    git: commit, branch and whether files differ from it, for code.json. diff: against the commit.
    untracked: modules that git does not know.
    """

    root: Path
    files: tuple[str, ...]
    git: tuple[tuple[str, object], ...] = ()
    diff: bytes = b""
    notes: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()


def tree_of(here: Path, patterns: Sequence[str] = (), skip: Sequence[Path] = ()) -> Tree:
    """The code of a user who stands in `here`.

    patterns: more files, folders or globs, from `here` on. skip: folders of outputs.

    Raises:
        LaunchError: a pattern names nothing, or what is outside; without git: too many files.
    """
    here = here.resolve()
    try:
        root = Path(os.fsdecode(_git(here, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    except LaunchError as error:
        found = _without_git(here, skip, str(error))
    else:
        found = _tracked(root, skip)
    more = _listed(here, found.root, patterns)
    return replace(found, files=tuple(sorted({*found.files, *more})))


def _git(folder: Path, *args: str) -> bytes:
    """What git writes; a LaunchError where it is missing or refuses, in its own words."""
    command = ["git", "-C", str(folder), "-c", "core.quotepath=off", *args]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            env={**env, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise LaunchError("there is no git here") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"git {args[0]} took more than {_GIT_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise LaunchError(said[0] if said else f"git {args[0]} failed")
    return done.stdout


def _names(output: bytes) -> list[str]:
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


def _tracked(root: Path, skip: Sequence[Path]) -> Tree:
    tracked = _names(_git(root, "ls-files", "-z", "--recurse-submodules"))
    files = [name for name in dict.fromkeys(tracked) if _is_file(root / name)]
    untracked = _names(_git(root, "ls-files", "-z", "--others", "--exclude-standard"))
    try:
        commit: str | None = _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
        diff = _git(root, "diff", "HEAD", "--no-ext-diff", "--no-color")
    except LaunchError:  # nothing is committed yet
        commit, diff = None, b""
    branch = _git(root, "branch", "--show-current").decode(errors="replace").strip()
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no").strip())
    git = (("commit", commit), ("branch", branch or None), ("dirty", dirty))
    outputs = [folder.resolve() for folder in skip]
    modules = tuple(
        name
        for name in untracked
        if name.endswith(".py") and not any((root / name).is_relative_to(x) for x in outputs)
    )
    return Tree(root, tuple(files), git, diff, (), modules)


def _is_file(path: Path) -> bool:
    """A link counts as one, wherever it leads; an empty submodule is a folder."""
    return path.is_symlink() or path.is_file()


def _without_git(here: Path, skip: Sequence[Path], why: str) -> Tree:
    files: list[str] = []
    large: list[str] = []
    num_bytes = 0
    for path in _code_below(here, {folder.resolve() for folder in skip}):
        name = path.relative_to(here).as_posix()
        size = path.lstat().st_size
        if size > MAX_FILE_BYTES:
            large.append(name)
            continue
        files.append(name)
        num_bytes += size
        if len(files) > MAX_FILES or num_bytes > MAX_BYTES:
            raise _too_much(here, why, f"more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
    notes = [
        f"{why}; the snapshot has the {len(files)} files of code below {here}, hidden folders and "
        f"environments left out"
    ]
    if large:
        notes.append(f"not in the snapshot, because larger than 1 MiB: {some(large)}")
    return Tree(here, tuple(files), (), b"", tuple(notes))


def _code_below(here: Path, skip: set[Path]) -> Iterator[Path]:
    seen = 0
    for folder, folders, names in os.walk(here):
        seen += len(names) + 1
        if seen > MAX_SEEN:
            raise _too_much(here, "no git repository", f"more than {MAX_SEEN} files to look at")
        folders[:] = sorted(x for x in folders if not _is_foreign(Path(folder, x), skip))
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in SUFFIXES and not name.startswith(".") and _is_file(path):
                yield path


def _is_foreign(folder: Path, skip: set[Path]) -> bool:
    return (
        folder.name.startswith(".")
        or folder.name in ("__pycache__", "node_modules")
        or (folder / "pyvenv.cfg").exists()
        or (folder / "conda-meta").exists()
        or folder.resolve() in skip
    )


def _too_much(here: Path, why: str, what: str) -> LaunchError:
    return LaunchError(
        f"{why}, and {here} holds {what} of code; submit from the folder of your project, or make "
        f"it a git repository"
    )


def _listed(here: Path, root: Path, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        try:
            found = [here / pattern] if _exists(here / pattern) else sorted(here.glob(pattern))
        except (NotImplementedError, ValueError) as error:
            raise LaunchError(f"launch.slurm.files: {pattern!r}: {error}") from None
        if not found:
            raise LaunchError(f"launch.slurm.files: {pattern!r} names no file below {here}")
        for path in found:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if not _is_file(file) or "__pycache__" in file.parts:
                    continue
                whole = Path(os.path.normpath(file))
                if not whole.is_relative_to(root):
                    raise LaunchError(
                        f"launch.slurm.files: {pattern!r} leads out of {root}; what lies outside "
                        f"is found by its own path, and is not copied"
                    )
                yield whole.relative_to(root).as_posix()


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def some(names: Sequence[str]) -> str:
    """The first few names of many."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
