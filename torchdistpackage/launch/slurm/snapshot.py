"""The code of a job as it was at submission, copied into the run folder.

One rule: what is named by its content cannot change under a job that waits. Files are read and
hashed first, then copied into `code/<hash>/tree`, which appears complete or not at all; the same
files always have the same folder.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.files import beside
from torchdistpackage.launch.slurm.batch_job import CodePaths
from torchdistpackage.launch.slurm.source_files import LARGE_BYTES, Tree, some

PACKAGE = Path(__file__).resolve().parents[2]
"""This package, which is part of every snapshot, wherever it was imported from."""

KEPT_S = 7 * 24 * 3600.0
_COPY = re.compile(r"[0-9a-f]{12}|\.[0-9a-f]{12}\..+")
"""A copy, or one that is being made."""


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """One file: its path inside the snapshot, where it is now, and where it leads if a link."""

    name: str
    source: Path
    link: str | None = None


@dataclass(frozen=True, slots=True)
class CodeSnapshot:
    """items: in order of names. digest: of all names and contents."""

    tree: Tree
    items: tuple[SnapshotFile, ...]
    digest: str
    num_bytes: int

    def folder(self, codes: Path) -> Path:
        """Where it lies, or will lie, in the folder of all snapshots."""
        return codes / self.digest

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before the job runs from it."""
        notes = list(self.tree.notes)
        held = {item.source for item in self.items}
        if lost := [name for name in self.tree.untracked if self.tree.root / name not in held]:
            notes.append(
                f"not in the snapshot, because git does not track them: {some(lost)}; `git add` "
                f"what the job imports, or name it in launch.slurm.files"
            )
        if self.num_bytes > LARGE_BYTES:
            size = f"the snapshot of the code has {self.num_bytes >> 20} MiB"
            notes.append(f"{size}; is there data in the repository?")
        return tuple(notes)


def collect(tree: Tree) -> CodeSnapshot:
    """Read all files of `tree`, and this package's own.

    Raises:
        LaunchError: a file cannot be read.
    """
    own = (p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    if _holds_package(tree):
        base = PACKAGE.parent.relative_to(tree.root)
        names = {*tree.files, *((base / p.relative_to(PACKAGE.parent)).as_posix() for p in own)}
        items = _items(tree.root, "tree", names)
    else:
        names = {p.relative_to(PACKAGE.parent).as_posix() for p in own}
        items = [
            *_items(tree.root, "tree", tree.files),
            *_items(PACKAGE.parent, "package", names),
        ]
    items.sort(key=lambda item: item.name)
    try:
        digest = _name(_digest(item, item.source) for item in items)
        num_bytes = sum(item.source.lstat().st_size for item in items)
    except OSError as error:
        raise LaunchError(f"a file of the code cannot be read: {error}") from error
    return CodeSnapshot(tree, tuple(items), digest, num_bytes)


def materialize(snapshot: CodeSnapshot, codes: Path, host: str, now_s: float) -> Path:
    """Copy the files into `codes`/<hash>, unless they are there; the folder.

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
        if _name(_digest(item, partial / item.name) for item in snapshot.items) != snapshot.digest:
            raise LaunchError(
                f"files below {snapshot.tree.root} were changed while they were being copied; "
                f"submit again"
            )
        (partial / "code.json").write_text(_facts(snapshot, host, now_s), encoding="utf-8")
        (partial / "code.diff").write_bytes(snapshot.tree.diff)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else somebody was faster, with the same content
                raise
    except OSError as error:
        raise LaunchError(
            f"the code cannot be copied into {codes}: {error}; make room there, or set run.dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def prune(codes: Path, scripts: Path, now_s: float) -> list[Path]:
    """Remove the copies that nobody needs; returns them. No job of theirs may be alive.

    These are the ones that no submission has used for KEPT_S and no batch script in the folder
    `scripts` names, and what submissions that were killed have left unfinished.
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


def code_paths(
    snapshot: CodeSnapshot,
    folder: Path,
    here: Path,
    imports: Iterable[str],
    env: Mapping[str, str],
) -> CodePaths:
    """Where a job that runs from `folder` finds modules.

    here: the current folder. imports: folders that this process imports from. Each that has
    files in the snapshot is replaced by its counterpart; of the others those in PYTHONPATH stay.
    """
    held = {parent.as_posix() for item in snapshot.items for parent in Path(item.name).parents}
    here, root = here.resolve(), snapshot.tree.root

    def counterpart(path: Path) -> str | None:
        if not path.is_relative_to(root):
            return None
        inside = Path("tree", path.relative_to(root)).as_posix()
        return str(folder / inside) if inside in held else None

    package = str(folder / "package") if "package" in held else counterpart(PACKAGE.parent)
    own = counterpart(here)
    given = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found = [package, own]
    found += [counterpart(Path(here, x).resolve()) or str(here / x) for x in given]
    found += [counterpart(Path(here, x).resolve()) for x in imports if x]
    return CodePaths(str(folder), tuple(dict.fromkeys(x for x in found if x)), own or str(here))


def import_folders(
    path: Sequence[str] | None = None, modules: Mapping[str, ModuleType] | None = None
) -> tuple[str, ...]:
    """sys.path, and the folders of packages installed as editable, which may not be on it."""
    folders = list(sys.path if path is None else path)
    for name, module in list((sys.modules if modules is None else modules).items()):
        # setuptools installs one such module a package; pip's `-e` says so by its name alone.
        mapping: object = getattr(module, "MAPPING", None) if "__editable__" in name else None
        if isinstance(mapping, dict):
            folders += [str(Path(str(x)).parent) for x in mapping.values()]  # pyright: ignore
    return tuple(folders)


def _holds_package(tree: Tree) -> bool:
    first = PACKAGE / "__init__.py"
    return first.is_relative_to(tree.root) and first.relative_to(tree.root).as_posix() in tree.files


def _items(root: Path, top: str, names: Iterable[str]) -> list[SnapshotFile]:
    held = set(names)
    held |= {parent.as_posix() for name in held for parent in Path(name).parents}
    return [SnapshotFile(f"{top}/{n}", root / n, _link(root, n, held)) for n in names]


def _link(root: Path, name: str, held: set[str]) -> str | None:
    """Where a link leads from inside the snapshot: to the copy, or else to the original."""
    path = root / name
    if not path.is_symlink():
        return None
    leads = path.readlink()
    leads_to = Path(os.path.normpath(path.parent / leads))
    inside = leads_to.is_relative_to(root) and leads_to.relative_to(root).as_posix() in held
    return str(leads if inside and not leads.is_absolute() else leads_to)


def _digest(item: SnapshotFile, path: Path) -> bytes:
    """Of one file: its name, whether it can be run, and its content."""
    if item.link is not None:
        kind, content = b"link", hashlib.sha256(os.fsencode(item.link)).digest()
    else:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
            kind = b"program" if os.fstat(file.fileno()).st_mode & 0o111 else b"file"
    return hashlib.sha256(kind + b"\0" + os.fsencode(item.name) + b"\0" + content).digest()


def _name(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()[:12]


def _facts(snapshot: CodeSnapshot, host: str, now_s: float) -> str:
    facts = {
        "root": str(snapshot.tree.root),
        **dict(snapshot.tree.git),
        "num_files": len(snapshot.items),
        "num_bytes": snapshot.num_bytes,
        "host": host,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now_s)),
    }
    return json.dumps(facts, indent=1) + "\n"
