"""Change one place of the package at a time, and see which tests notice.

`scripts/mutants` draws mutants by a seed, as many of each folder as it has lines. Each is run with
the small set of its folder's tests, of this tree and with `--old` of another commit, in a copy of
the tree. A mutant is killed by the first test that fails, or by the limit of time. Tests that fail
without a mutant are left out. Rows are written as they come, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "torchdistpackage"

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A text of a file and what takes its place. start, stop: its bytes."""

    file: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.start}-{self.stop}:{self.kind}"

    def applied(self, source: bytes) -> bytes:
        """Return `source`, the whole file, with this one change."""
        assert source[self.start : self.stop].decode() == self.before, self.key
        return source[: self.start] + self.after.encode() + source[self.stop :]


class Outcome(NamedTuple):
    """What a set of tests says of a mutant. verdict: killed, time, alive, or none without tests."""

    verdict: str
    by: str
    seconds: float


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Return (kind, what of `node` is replaced, by what)."""
    match node:
        case ast.Compare(ops=[op], comparators=[_]) if type(op) in COMPARED:
            other = ast.Compare(node.left, [COMPARED[type(op)]()], node.comparators)
            yield "comparison", node, other
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", node, ast.BinOp(node.left, ARITHMETIC[type(op)](), node.right)
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            other = ast.AugAssign(node.target, ARITHMETIC[type(op)](), node.value)
            yield "arithmetic", node, other
        case ast.BoolOp(op=op):
            other_op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "boolean", node, ast.BoolOp(other_op, node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", node, node.operand
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, ast.Constant(value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "call left out", node, ast.Pass()
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "return of None", node, ast.Return(ast.Constant(None))
        case ast.If(test=test) | ast.While(test=test):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Break():
            yield "break", node, ast.Continue()
        case _:
            return


def _is_text(node: ast.BinOp) -> bool:
    """Whether it makes a text: `"%s" % x`, `"a" + b`."""
    return any(
        isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
        for x in (node.left, node.right)
    )


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _reached(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below that runs: no annotation, f-string (whose places Python 3.11 does not know),
    decorator, docstring, or what only a type checker reads."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__":
                continue
            yield child
            yield from _reached(child)


def mutants_of(path: Path, file: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    for node in _reached(ast.parse(source)):
        for kind, old, new in changes(node):
            assert isinstance(old, ast.expr | ast.stmt) and old.end_lineno and old.end_col_offset
            first = starts[old.lineno - 1] + old.col_offset
            last = starts[old.end_lineno - 1] + old.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(new))
            after = text if isinstance(new, ast.stmt) else f"({text})"
            before = source[first:last].decode()
            found.append(Mutant(file, old.lineno, kind, first, last, before, after))
    return sorted(found, key=lambda x: (x.start, x.kind, x.stop))


def folders_of(root: Path, package: str = PACKAGE) -> dict[str, list[str]]:
    """Return the Python files of each folder of the package, those beside its folders under ""."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / package).rglob("*.py")):
        inside = path.relative_to(root / package)
        folder = inside.parts[0] if len(inside.parts) > 1 else ""
        found.setdefault(folder, []).append(str(path.relative_to(root)))
    return found


def shares(lines: dict[str, int], number: int) -> dict[str, int]:
    """Return how many of `number` each folder gets: by its lines, the largest remainders first."""
    total = sum(lines.values())
    exact = {name: number * count / total for name, count in lines.items()}
    given = {name: int(x) for name, x in exact.items()}
    rest = sorted(exact, key=lambda name: (given[name] - exact[name], name))
    for name in rest[: number - sum(given.values())]:
        given[name] += 1
    return given


def draw(root: Path, number: int, seed: int, package: str = PACKAGE) -> list[Mutant]:
    """Return `number` mutants, the same for the same files and seed."""
    folders = folders_of(root, package)
    lines = {
        name: sum(len((root / file).read_bytes().splitlines()) for file in files)
        for name, files in folders.items()
    }
    drawn: list[Mutant] = []
    for name, count in shares(lines, number).items():
        every = [x for file in folders[name] for x in mutants_of(root / file, file)]
        # each folder draws by itself: a change in one leaves the mutants of the others
        chosen = random.Random(f"{seed} {name}").sample(every, min(count, len(every)))
        drawn += sorted(chosen, key=lambda x: (x.file, x.start))
    return drawn


def tests_of(root: Path, mutant: Mutant, package: str = PACKAGE) -> list[list[str]]:
    """Return paths of tests, in the order in which they are run: first the files of the module's
    name, then its folder; of a file beside the folders the tests beside theirs."""
    inside = Path(mutant.file).relative_to(package)
    tests = root / "tests"
    if len(inside.parts) > 1 and (tests / inside.parts[0]).is_dir():
        folder = tests / inside.parts[0]
        near = sorted(map(str, folder.rglob(f"test_{inside.stem}*.py")))
        rest = [str(folder)]
    else:
        near, rest = [], sorted(map(str, tests.glob("test_*.py")))
    relative = [[os.path.relpath(x, root) for x in paths] for paths in (near, rest)]
    return [paths for paths in relative if paths]


def copy_tree(target: Path, commit: str | None) -> None:
    """Make a copy of the files that git knows, with the tests of `commit`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not (commit and name.startswith("tests/")):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    if commit:
        archive = subprocess.run(
            ["git", "archive", commit, "tests"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(target)], input=archive, check=True)


def run_tests(
    root: Path, paths: Sequence[str], limit_s: float, options: Sequence[str] = ()
) -> tuple[int | None, str]:
    """Return pytest's exit code, None where the limit ended it, and what it wrote."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-m", "not full", "--tb=no", *options, *paths]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(
        command, cwd=root, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            # ranks end with the server that pytest started, and it with pytest
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def failures(said: str) -> list[str]:
    """Return the tests, or files, that failed."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?= - |$)", said, re.M)


class TestSet:
    """The tests of a copy of a tree. known: of tests that failed, whether without a mutant too."""

    __test__ = False

    def __init__(
        self, folder: Path, limit_s: float, known: dict[str, bool], package: str = PACKAGE
    ) -> None:
        self.folder = folder
        self.limit_s = limit_s
        self.known = known
        self.package = package

    def fails_alone(self, test: str) -> bool:
        """Whether `test` fails without a mutant, so that it tells nothing of one."""
        if test not in self.known:
            code, _ = run_tests(self.folder, [test], self.limit_s)
            self.known[test] = code not in (0, 5)
        return self.known[test]

    def outcome(self, mutant: Mutant) -> Outcome:
        """Run the tests of a mutant until one fails that passes without it."""
        begun_s = time.monotonic()
        groups = tests_of(self.folder, mutant, self.package)
        for number, paths in enumerate(groups):
            ignored = [f"--ignore={x}" for x in groups[0]] if number else []
            while True:
                left_out = [f"--deselect={test}" for test, fails in self.known.items() if fails]
                code, said = self._with_mutant(mutant, paths, ["-x", *ignored, *left_out])
                took_s = round(time.monotonic() - begun_s, 1)
                if code is None:
                    return Outcome("time", paths[0], took_s)
                if code in (0, 5):  # 5: no test is left to run
                    break
                by = next(iter(failures(said)), "")
                if not by or by in self.known or not self.fails_alone(by):
                    return Outcome("killed", by or said.strip()[-200:], took_s)
        return Outcome("alive" if groups else "none", "", round(time.monotonic() - begun_s, 1))

    def _with_mutant(
        self, mutant: Mutant, paths: Sequence[str], options: Sequence[str]
    ) -> tuple[int | None, str]:
        file = self.folder / mutant.file
        original = file.read_bytes()
        file.write_bytes(mutant.applied(original))
        try:
            return run_tests(self.folder, paths, self.limit_s, options)
        finally:
            file.write_bytes(original)


def table(mutants: Sequence[Mutant], rows: dict[str, dict[str, list]], sets: Sequence[str]) -> str:
    """Return a Markdown table of what is known, and below it the numbers."""
    lines = [
        f"| mutant | change | {' | '.join(sets)} |",
        f"|---|---|{'---|' * len(sets)}",
    ]
    counts, late = dict.fromkeys(sets, 0), dict.fromkeys(sets, 0)
    lost: list[str] = []
    for mutant in mutants:
        row = rows.get(mutant.key, {})
        told = [Outcome(*row[name]) if name in row else None for name in sets]
        for name, outcome in zip(sets, told, strict=True):
            counts[name] += outcome is not None and outcome.verdict == "killed"
            late[name] += outcome is not None and outcome.verdict == "time"
        cells = [f"{x.verdict} {x.by}".strip() if x else "" for x in told]
        change = f"{_cell(mutant.before)} becomes {_cell(mutant.after)}"
        lines.append(f"| {mutant.file}:{mutant.line} | {change} | {' | '.join(cells)} |")
        verdicts = [x.verdict if x else "" for x in told]
        if len(sets) == 2 and verdicts[0] == "killed" and verdicts[1] != "killed":
            lost.append(mutant.key)
    lines += [
        "",
        *(
            f"{name}: {number} of {len(mutants)} killed, {late[name]} reached the limit"
            for name, number in counts.items()
        ),
    ]
    if len(sets) == 2:
        lines.append(f"killed by the old set alone: {', '.join(lost) or 'none'}")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{short[:60]}`"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=15, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--old", metavar="COMMIT", help="run the tests of this commit too, first")
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        help="seconds of a run of tests; allow twice what the slowest folder takes",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and run nothing")
    given = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the tests of a mutant end too
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    mutants = draw(ROOT, given.number, given.seed)
    if given.list:
        for x in mutants:
            print(f"{x.file}:{x.line}  {x.kind}: {_cell(x.before)} becomes {_cell(x.after)}")
        return 0
    digest = hashlib.sha256(repr([mutants, given.old]).encode()).hexdigest()[:12]
    out: Path = given.out / f"{given.number}.{given.seed}.{digest}"
    out.mkdir(parents=True, exist_ok=True)
    state = out / "rows.json"
    kept = json.loads(state.read_text()) if state.exists() else {"failing": {}, "rows": {}}
    names = ["old", "new"] if given.old else ["new"]
    sets: dict[str, TestSet] = {}
    for name in names:
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)  # which may hold the mutant of a run that ended
        copy_tree(folder, given.old if name == "old" else None)
        sets[name] = TestSet(folder, given.limit, kept["failing"].setdefault(name, {}))
    (out / "mutants.json").write_text(json.dumps([asdict(x) for x in mutants], indent=1))
    for number, mutant in enumerate(mutants, 1):
        row = kept["rows"].setdefault(mutant.key, {})
        for name in names:
            if name not in row:
                row[name] = list(sets[name].outcome(mutant))
                state.write_text(json.dumps(kept))
                (out / "table.md").write_text(table(mutants, kept["rows"], names))
                print(f"{number}/{len(mutants)} {mutant.key} {name}: {row[name]}", flush=True)
    print((out / "table.md").read_text().rpartition("\n\n")[2] + f"{out / 'table.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
