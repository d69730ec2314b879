"""The package's files as the tests of its rules see them: names, syntax trees, imports."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "torchdistpackage"
PACKAGE = ROOT.name
WING = "compat"
"""The wing for guests: it may import the core, and nothing in the core imports it."""
HAS_WING = (ROOT / WING).exists()
"""Not so in the copy that `test_wing.py` makes."""


def present(names: Iterable[str]) -> list[str]:
    """Return those of `names`, files and patterns, that are there if the wing was deleted."""
    return [name for name in names if HAS_WING or not name.startswith(f"{WING}/")]


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def offences(
    look: Callable[[Path], Iterable[str]], paths: Iterable[Path] | None = None
) -> dict[str, list[str]]:
    """File -> what `look` finds in it, for files in which it finds anything."""
    found = {name_of(path): list(look(path)) for path in (files() if paths is None else paths)}
    return {name: what for name, what in found.items() if what}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def module_of(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path, inside: ast.AST | None = None) -> tuple[tuple[int, str], ...]:
    """(line, module) of each import: the module itself where one is imported from its package."""
    return tuple(_imports(path, inside))


def _imports(path: Path, inside: ast.AST | None) -> Iterator[tuple[int, str]]:
    for node in ast.walk(inside) if inside else nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: write imports in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if file_of(whole) else str(node.module)


@cache
def file_of(module: str) -> Path | None:
    """The file of one of our modules."""
    first, *rest = module.split(".")
    base = ROOT.joinpath(*rest)
    candidates = (
        (base.with_suffix(".py"), base / "__init__.py") if rest else (base / "__init__.py",)
    )
    return next((p for p in candidates if first == PACKAGE and p.is_file()), None)


def own_imports(path: Path, inside: ast.AST | None = None) -> Iterator[tuple[int, Path]]:
    for line, module in imports(path, inside):
        if module.split(".")[0] == PACKAGE:
            target = file_of(module)
            assert target is not None, f"{name_of(path)}:{line}: there is no {module}"
            yield line, target


def order_of(kind: str) -> tuple[str, ...]:
    """Return the folders of a line of the order that CONTRIBUTING.md states."""
    (line,) = re.findall(rf"^{kind}: +(\w.*|< .*)$", CONTRIBUTING, re.MULTILINE)
    return tuple(name.strip() for name in line.split("<") if name.strip())


CONTRIBUTING = (ROOT.parent / "CONTRIBUTING.md").read_text("utf-8")
PURE_FOLDERS = order_of("no torch")
ORDER = (*PURE_FOLDERS, *order_of("torch"))
WITHOUT_TORCH = (*PURE_FOLDERS, "plan", "cli")
"""Folders of which no file needs torch. The last two are to the right of some that do: they read
what these have beside it, and load it on first use."""
INSIDE_PARALLEL = ("tensor", "context", "expert", "pipeline", "auto")
TOP_FILES = ("__init__.py", "__main__.py", "testing.py")
"""They only name what others define, and so stand to the right of everything."""


def promises(path: Path) -> bool:
    """Whether a file says that it needs no torch: by its folder, as a front, or in words."""
    folder = path.relative_to(ROOT).parts[0].removesuffix(".py")
    text = ast.get_docstring(tree(path)) or ""
    is_front = path.name == "__init__.py" or name_of(path) in TOP_FILES
    return folder in WITHOUT_TORCH or is_front or "no torch" in " ".join(text.lower().split())


@cache
def pure() -> dict[Path, Path | None]:
    """Return the files that need no torch: those that promise it, with None, and those that these
    import, each with the file that does."""
    found: dict[Path, Path | None] = {path: None for path in files() if promises(path)}
    todo = list(found)
    while todo:
        path = todo.pop()
        targets = {target for _, target in own_imports(path)}
        todo += targets - found.keys()
        found |= dict.fromkeys(targets - found.keys(), path)
    return found


def place(path: Path) -> tuple[int, int]:
    """Position in the order of folders, and inside parallel."""
    relative = path.relative_to(ROOT)
    if relative.as_posix() in TOP_FILES:
        return len(ORDER), 0
    folder, *rest = relative.parts
    inside = rest[0] if folder == "parallel" and len(rest) > 1 else ""
    at = INSIDE_PARALLEL.index(inside) if inside in INSIDE_PARALLEL else -1
    return ORDER.index(folder.removesuffix(".py")), at
