"""The code of a job as of its submission, copied into the run folder.

Code is every file that git tracks in the user's folder, in its current state, and what
`launch.slurm.files` names; without git, files with a code suffix are taken, up to a limit. Files
are read and hashed first, then copied into `code/<hash>/tree`, which appears completely or not at
all, so the code of a waiting job cannot change; equal files always have the same folder.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchdistpackage.errors import LaunchError
from torchdistpackage.files import beside

PACKAGE = Path(__file__).resolve().parents[2]
"""This package, which is part of every snapshot, wherever it was imported from."""

KEPT_S = 7 * 24 * 3600.0
_COPY = re.compile(r"[0-9a-f]{12}|\.[0-9a-f]{12}\..+")
"""Pattern of the name of a snapshot, finished or in progress."""
SUFFIXES = (
    ".py",
    ".pyi",
    ".yaml",
    ".yml",
    ".toml",
    ".json",
    ".cfg",
    ".ini",
    ".sh",
    ".txt",
    ".jinja",
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".cuh",
    ".h",
    ".hpp",
    ".typed",
)
"""Suffixes of files that are copied if there is no git."""
MAX_FILES = 5_000
MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 64 << 20
MAX_SEEN = 100_000
"""Largest number of files to look at without git: the folder may be a home folder, or hold data."""
LARGE_BYTES = 512 << 20
"""Size in bytes from which a snapshot is mentioned to the user."""
_GIT_TIMEOUT_S = 60.0
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of the code by path from `root`, and notes for the user.

    git: commit, branch and whether files differ from it, for code.json. diff: against the commit.
    untracked: modules that git does not track.
    """

    root: Path
    files: tuple[str, ...]
    git: tuple[tuple[str, object], ...] = ()
    diff: bytes = b""
    notes: tuple[str, ...] = ()
    untracked: tuple[str, ...] = ()


def tree_of(folder: Path, patterns: Sequence[str] = (), skip: Sequence[Path] = ()) -> Tree:
    """Return the code of a user whose working folder is `folder`.

    patterns: more files, folders or globs, from `folder` on. skip: folders of outputs.

    Raises:
        LaunchError: a pattern names nothing, or what is outside; without git: too many files.
    """
    folder = folder.resolve()
    try:
        root = Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").rstrip(b"\n")))
    except LaunchError as error:
        tree = _without_git(folder, skip, str(error))
    else:
        tree = _tracked(root, skip)
    more = _listed(folder, tree.root, patterns)
    return replace(tree, files=tuple(sorted({*tree.files, *more})))


def _git(folder: Path, *args: str) -> bytes:
    """Return git's output; raise a LaunchError with git's message if it is missing or refuses."""
    command = ["git", "-C", str(folder), "-c", "core.quotepath=off", *args]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        completed = subprocess.run(
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
    if completed.returncode:
        output = completed.stderr.decode(errors="replace").strip().splitlines()
        words = output[0].removeprefix("fatal: ") if output else f"git {args[0]} failed"
        raise LaunchError(words)
    return completed.stdout


def _tracked(root: Path, skip: Sequence[Path]) -> Tree:
    def listed(*options: str) -> list[str]:
        names = _git(root, "ls-files", "-z", *options).split(b"\0")
        return [os.fsdecode(name) for name in names if name]

    files = tuple(n for n in dict.fromkeys(listed("--recurse-submodules")) if _is_file(root / n))
    try:
        commit: str | None = _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
        diff = _git(root, "diff", "HEAD", "--no-ext-diff", "--no-color")
    except LaunchError:  # nothing is committed yet
        commit, diff = None, b""
    branch = _git(root, "branch", "--show-current").decode(errors="replace").strip()
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no").strip())
    git = (("commit", commit), ("branch", branch or None), ("dirty", dirty))
    outputs = [folder.resolve() for folder in skip]
    untracked = tuple(
        name
        for name in listed("--others", "--exclude-standard")
        if name.endswith(".py") and not any((root / name).is_relative_to(x) for x in outputs)
    )
    return Tree(root, files, git, diff, (), untracked)


def _is_file(path: Path) -> bool:
    """Return whether a path is a file.

    A link counts as one, whatever its target; an empty submodule is a folder.
    """
    return path.is_symlink() or path.is_file()


def _without_git(start_folder: Path, skip: Sequence[Path], why: str) -> Tree:
    files: list[str] = []
    large: list[str] = []
    num_bytes = 0
    for path in _code_below(start_folder, {folder.resolve() for folder in skip}):
        name = path.relative_to(start_folder).as_posix()
        size = path.lstat().st_size
        if size > MAX_FILE_BYTES:
            large.append(name)
            continue
        files.append(name)
        num_bytes += size
        if len(files) > MAX_FILES or num_bytes > MAX_BYTES:
            raise _too_much(
                start_folder, why, f"more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB"
            )
    notes = [
        f"{why}; the snapshot has the {len(files)} files of code below {start_folder}, hidden "
        f"folders and environments left out"
    ]
    if large:
        notes.append(f"not in the snapshot, because larger than 1 MiB: {some(large)}")
    return Tree(start_folder, tuple(files), (), b"", tuple(notes))


def _code_below(start_folder: Path, skip: set[Path]) -> Iterator[Path]:
    def is_foreign(folder: Path) -> bool:
        hidden = folder.name.startswith(".") or folder.name in ("__pycache__", "node_modules")
        environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists()
        return hidden or environment or folder.resolve() in skip

    seen = 0
    for folder, folders, names in os.walk(start_folder):
        seen += len(names) + 1
        if seen > MAX_SEEN:
            raise _too_much(
                start_folder, "no git repository", f"more than {MAX_SEEN} files to look at"
            )
        folders[:] = sorted(x for x in folders if not is_foreign(Path(folder, x)))
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in SUFFIXES and not name.startswith(".") and _is_file(path):
                yield path


def _too_much(folder: Path, why: str, amount: str) -> LaunchError:
    return LaunchError(
        f"{why}, and {folder} holds {amount} of code; submit from the folder of your project, or "
        f"make it a git repository"
    )


def _listed(folder: Path, root: Path, patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        try:
            is_name = os.path.lexists(folder / pattern)
            paths = [folder / pattern] if is_name else sorted(folder.glob(pattern))
        except (NotImplementedError, ValueError) as error:
            raise LaunchError(f"launch.slurm.files: {pattern!r}: {error}") from None
        if not paths:
            raise LaunchError(
                f"launch.slurm.files: {pattern!r} names no file below {folder}; correct the path, "
                "or remove it"
            )
        for path in paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if not _is_file(file) or "__pycache__" in file.parts:
                    continue
                clean = Path(os.path.normpath(file))
                if not clean.is_relative_to(root):
                    raise LaunchError(
                        f"launch.slurm.files: {pattern!r} leads out of {root}; remove it: files "
                        "outside are not copied, and the job finds them by their own paths"
                    )
                yield clean.relative_to(root).as_posix()


def some(names: Sequence[str]) -> str:
    """Return the first few of many names as text."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file: its path in the snapshot, its source, and its target if it is a link."""

    name: str
    source: Path
    link: str | None = None


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """The collected code. items: in order of names. digest: of all names and contents."""

    tree: Tree
    items: tuple[SnapshotFile, ...]
    digest: str
    num_bytes: int

    def folder(self, codes: Path) -> Path:
        """Return its current or future place in the folder of all snapshots."""
        return codes / self.digest

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the user should know about the copied code before the job runs."""
        notes = list(self.tree.notes)
        copied = {item.source for item in self.items}
        if lost := [name for name in self.tree.untracked if self.tree.root / name not in copied]:
            notes.append(
                f"not in the snapshot, because git does not track them: {some(lost)}; `git add` "
                f"what the job imports, or name it in launch.slurm.files"
            )
        if self.num_bytes > LARGE_BYTES:
            size = f"the snapshot of the code has {self.num_bytes >> 20} MiB"
            notes.append(f"{size}; check that there is no data in the repository")
        return tuple(notes)


def collect(tree: Tree) -> CodeSnapshot:
    """Read all files of `tree`, and this package's own.

    Raises:
        LaunchError: a file cannot be read.
    """
    package_files = [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    init = PACKAGE / "__init__.py"
    if init.is_relative_to(tree.root) and init.relative_to(tree.root).as_posix() in tree.files:
        names = {*tree.files, *(p.relative_to(tree.root).as_posix() for p in package_files)}
        items = _items(tree.root, "tree", names)
    else:
        names = {p.relative_to(PACKAGE.parent).as_posix() for p in package_files}
        items = _items(tree.root, "tree", tree.files) + _items(PACKAGE.parent, "package", names)
    items.sort(key=lambda item: item.name)
    try:
        digest = _digest((item, item.source) for item in items)
        num_bytes = sum(item.source.lstat().st_size for item in items)
    except OSError as error:
        raise LaunchError(
            f"a file of the code cannot be read: {error}; make it readable, or remove it"
        ) from error
    return CodeSnapshot(tree, tuple(items), digest, num_bytes)


def materialize(snapshot: CodeSnapshot, codes: Path, host: str, now_s: float) -> Path:
    """Copy the files into `codes`/<hash> unless they exist; return the folder.

    Raises:
        LaunchError: a file was changed since it was read, or cannot be copied.
    """
    folder = snapshot.folder(codes)
    partial = beside(folder)
    try:
        if folder.is_dir():
            os.utime(folder)  # `prune` sees that it is in use
            return folder
        for item in snapshot.items:
            target = partial / item.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if item.link is None:
                shutil.copy2(item.source, target)
            else:
                target.symlink_to(item.link)
        copied = _digest((item, partial / item.name) for item in snapshot.items)
        if copied != snapshot.digest:
            raise LaunchError(
                f"files below {snapshot.tree.root} were changed while they were being copied; "
                f"submit again"
            )
        facts = {
            "root": str(snapshot.tree.root),
            **dict(snapshot.tree.git),
            "num_files": len(snapshot.items),
            "num_bytes": snapshot.num_bytes,
            "host": host,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now_s)),
        }
        (partial / "code.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (partial / "code.diff").write_bytes(snapshot.tree.diff)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same content
                raise
    except OSError as error:
        raise LaunchError(
            f"the code cannot be copied into {codes}: {error}; make room there, or set run.dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def prune(codes: Path, scripts: Path, now_s: float) -> list[Path]:
    """Remove snapshots that are no longer needed, and return them. None of their jobs may be alive.

    A snapshot is removed if no submission has used it for KEPT_S and no batch script in the folder
    `scripts` names it. Leftovers of killed submissions are removed too.
    """
    named = "".join(
        path.read_text(encoding="utf-8", errors="replace") for path in scripts.glob("*.sbatch")
    )
    removed: list[Path] = []
    for folder in codes.iterdir():
        unfinished = folder.name.startswith(".")
        if not _COPY.fullmatch(folder.name) or (not unfinished and folder.name in named):
            continue
        if unfinished or now_s - folder.stat().st_mtime > KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _items(root: Path, top: str, names: Iterable[str]) -> list[SnapshotFile]:
    names_of_items = set(names)
    names_of_items |= {
        parent.as_posix() for name in names_of_items for parent in Path(name).parents
    }

    def link(path: Path) -> str | None:
        """Return the target of a link in the snapshot: the copied file, else the original."""
        if not path.is_symlink():
            return None
        leads = path.readlink()
        leads_to = Path(os.path.normpath(path.parent / leads))
        inside = (
            leads_to.is_relative_to(root)
            and leads_to.relative_to(root).as_posix() in names_of_items
        )
        return str(leads if inside and not leads.is_absolute() else leads_to)

    return [SnapshotFile(f"{top}/{name}", root / name, link(root / name)) for name in names]


def _digest(files: Iterable[tuple[SnapshotFile, Path]]) -> str:
    """Hash the files' names, their executable bits and their contents."""
    digest = hashlib.sha256()
    for item, path in files:
        if item.link is not None:
            kind, content = b"link", hashlib.sha256(os.fsencode(item.link)).digest()
        else:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
                kind = b"program" if os.fstat(file.fileno()).st_mode & 0o111 else b"file"
        entry = kind + b"\0" + os.fsencode(item.name) + b"\0" + content
        digest.update(hashlib.sha256(entry).digest())
    return digest.hexdigest()[:12]
