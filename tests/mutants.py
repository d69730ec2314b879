"""Change one place of the package at a time, and see which tests notice.

`scripts/mutants` draws mutants by a seed, as many of each folder as it has lines, and takes them in
an order that the seed draws too, so that those of a run that was stopped are a fair sample. A first
run of a folder's small set, with a call planted at each place (`tests/reach.py`), tells which tests
come there; a mutant is run with those alone: first with those of its own folder, at the end with
those of others. It is killed by the first test that fails with it and passes without it. A limit of
time kills nothing, and a failure that tells of time counts where it comes again. With `--old` the
tests of another commit are run on what the present ones leave alive. Rows are written as they come,
so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
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


VERDICTS = ("killed", "alive", "none", "time", "error")
FIRST = 12
"""How many tests of a mutant are run before all others of it."""
LONG_S = 20.0
ABOUT_TIME = re.compile(r"(?i)timeout|\btimed?\b|limit|within|no answer|did not|silent|killed")
"""A test that took so long, or says so, may have failed of a loaded machine."""


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
    is_expression: bool = False
    is_planted: bool = False
    """Whether it runs whenever a function is called: who does not come there does not see it."""

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.start}-{self.stop}:{self.kind}"

    def applied(self, source: bytes) -> bytes:
        """Return `source`, the whole file, with this one change."""
        assert source[self.start : self.stop].decode() == self.before, self.key
        return source[: self.start] + self.after.encode() + source[self.stop :]


class Outcome(NamedTuple):
    """What a set of tests says of a mutant. verdict: killed, alive, none where no test comes there,
    time where the limit ended the tests, error where pytest failed and named no test."""

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


def _reached(node: ast.AST, is_called: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below that runs: no annotation, f-string (whose places Python 3.11 does not know),
    decorator, docstring, or what only a type checker reads. Beside it, whether each call of a
    function comes there, which it does not in one that keeps its results."""
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and name == "body":
            decorators = [ast.unparse(x) for x in getattr(node, "decorator_list", ())]
            is_called = not any("cache" in x for x in decorators)
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                continue
            if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__":
                continue
            yield child, is_called
            yield from _reached(child, is_called)


def mutants_of(path: Path, file: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Mutant] = []
    for node, is_called in _reached(ast.parse(source)):
        for kind, old, new in changes(node):
            assert isinstance(old, ast.expr | ast.stmt) and old.end_lineno and old.end_col_offset
            first = starts[old.lineno - 1] + old.col_offset
            last = starts[old.end_lineno - 1] + old.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(new))
            after = text if isinstance(new, ast.stmt) else f"({text})"
            before = source[first:last].decode()
            is_expression = isinstance(old, ast.expr)
            place = (file, old.lineno, kind, first, last, before, after)
            found.append(Mutant(*place, is_expression, is_called))
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
    """Return `number` mutants in a random order, the same for the same files and seed."""
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
    random.Random(seed).shuffle(drawn)
    return drawn


def planted(source: bytes, places: dict[int, Mutant], package: str = PACKAGE) -> bytes:
    """Return `source` with a call at each of `places`, mutants of it by their numbers."""
    call = f"__import__('{package}._reach', fromlist=['hit']).hit"
    texts: list[tuple[int, int, int, int, str]] = []  # where, end or start, the outer one first
    for number, x in places.items():
        length = x.stop - x.start
        if x.is_expression:
            texts.append((x.start, 1, -length, number, f"({call}({number}), ("))
            texts.append((x.stop, 0, length, -number, "))[1]"))
        else:
            texts.append((x.start, 1, -len(source), number, f"{call}({number}); "))
    for where, *_, text in sorted(texts, reverse=True):
        source = source[:where] + text.encode() + source[where:]
    return source


def plant(root: Path, mutants: Sequence[Mutant], package: str = PACKAGE) -> set[str]:
    """Plant a call at each place in the copy `root`, and return the keys of those that have one."""
    shutil.copy2(Path(__file__).parent / "reach.py", root / package / "_reach.py")
    files: dict[str, dict[int, Mutant]] = {}
    for number, mutant in enumerate(mutants):
        if mutant.is_planted:
            files.setdefault(mutant.file, {})[number] = mutant
    kept: set[str] = set()
    for file, places in files.items():
        source = (root / file).read_bytes()
        right = {n: x for n, x in places.items() if _compiles(planted(source, {n: x}, package))}
        if _compiles(text := planted(source, right, package)):
            (root / file).write_bytes(text)
            kept |= {x.key for x in right.values()}
    return kept


def _compiles(source: bytes) -> bool:
    """Not so at the number of a pattern, say."""
    try:
        compile(source, "planted", "exec")
    except SyntaxError:
        return False
    return True


def folder_of(mutant: Mutant, package: str = PACKAGE) -> str:
    """Return the folder of the package it is in, "" beside them."""
    inside = Path(mutant.file).relative_to(package)
    return inside.parts[0] if len(inside.parts) > 1 else ""


def tests_of(root: Path, mutant: Mutant, package: str = PACKAGE) -> list[list[str]]:
    """Return the tests of a mutant that each import runs, in the order in which they are run: first
    the files of the module's name, then its folder; of a file beside the folders the tests beside
    theirs."""
    folder, stem = folder_of(mutant, package), Path(mutant.file).stem
    tests = root / "tests"
    if folder and (tests / folder).is_dir():
        near = sorted(map(str, (tests / folder).rglob(f"test_{stem}*.py")))
        rest = [str(tests / folder)]
    else:
        near = sorted(map(str, tests.rglob(f"test_{stem}*.py"))) if folder else []
        rest = [] if folder else sorted(map(str, tests.glob("test_*.py")))
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


@dataclass(frozen=True)
class Ran:
    """A run of pytest. code: its exit code, None where the limit ended it. ends: of each test that
    ended, as `tests/reach.py` writes it. said: what it wrote."""

    code: int | None
    said: str = ""
    ends: tuple[dict, ...] = ()

    @property
    def failed(self) -> tuple[str, str, float]:
        """The first test, or file, that failed, its message, and its seconds."""
        for end in self.ends:
            if end["failed"]:
                return end["test"], end["failed"], end["seconds"]
        named = re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?= - |$)", self.said, re.M)
        return next(iter(named), ""), self.said.strip()[-200:], 0.0


def run_tests(root: Path, paths: Sequence[str], limit_s: float, options: Sequence[str] = ()) -> Ran:
    reach, plugin = root / "reach", root / "reach_plugin"
    shutil.rmtree(reach, ignore_errors=True)
    reach.mkdir()
    (reach / "now").write_bytes(bytes(8))
    plugin.mkdir(exist_ok=True)
    shutil.copy2(Path(__file__).parent / "reach.py", plugin / "_reach_plugin.py")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-p", "_reach_plugin", "-m", "not full", "--tb=short", *options, *paths]
    env = {**os.environ, "PYTHONPATH": f"{root}:{plugin}", "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(
        command, cwd=root, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Ran(None)
        finally:
            # ranks end with the server that pytest started, and it with pytest
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    ends = reach / "ends"
    lines = ends.read_text().splitlines() if ends.exists() else []
    return Ran(process.returncode, said, tuple(json.loads(line) for line in lines))


class TestSet:
    """The small set of a copy of a tree, and which of its tests come to which mutants."""

    __test__ = False

    def __init__(
        self, folder: Path, limit_s: float, mutants: Sequence[Mutant], package: str = PACKAGE
    ) -> None:
        self.folder = folder
        self.limit_s = limit_s
        self.mutants = mutants
        self.package = package
        self.planted: set[str] | None = None
        self.reach: dict[str, dict] = {}
        """Folder of tests -> `seconds` of each test, `hits` of each mutant: its tests."""
        self.known: dict[str, bool] = {}
        """Test, or file -> whether it fails without a mutant."""
        for file in sorted(folder.parent.glob(f"reach.{folder.name}.*.json")):
            self._learn(file.name.split(".")[2], json.loads(file.read_text()))

    def _learn(self, name: str, found: dict) -> None:
        self.reach[name] = found
        self.known.update(dict.fromkeys(found["seconds"], False))
        self.known.update(dict.fromkeys(found["failing"], True))

    def look(self, name: str) -> None:
        """Run the small set of `tests/<name>` once with a call planted at every mutant's place."""
        tree = self.folder.parent / f"{self.folder.name}.planted"
        if self.planted is None:
            shutil.rmtree(tree, ignore_errors=True)
            shutil.copytree(self.folder, tree)
            self.planted = plant(tree, self.mutants, self.package)
        ran = run_tests(
            tree, [f"tests/{name}"], 24 * self.limit_s, ["--continue-on-collection-errors"]
        )
        hits, tests = tree / "reach/hits", {x["number"]: x["test"] for x in ran.ends}
        broken = re.findall(r"^ERROR (\S+\.py)(?= - |$)", ran.said, re.M)
        found: dict = {"seconds": {}, "failing": broken, "hits": {key: [] for key in self.planted}}
        for end in ran.ends:
            found["seconds"][end["test"]] = end["seconds"]
            if end["failed"] and self._fails(end["test"]):
                found["failing"].append(end["test"])
        for line in hits.read_text().splitlines() if hits.exists() else ():
            place, number = map(int, line.split())
            if number in tests:
                found["hits"][self.mutants[place].key].append(tests[number])
        self._learn(name, found)
        state = self.folder.parent / f"reach.{self.folder.name}.{name}.json"
        state.write_text(json.dumps(found))

    def _fails(self, test: str) -> bool:
        options = [] if "::" in test else ["--collect-only"]
        return run_tests(self.folder, [test], self.limit_s, options).code not in (0, 5)

    def fails_alone(self, test: str) -> bool:
        """Whether `test` fails without a mutant, so that it tells nothing of one."""
        if test not in self.known:
            self.known[test] = self._fails(test)
        return self.known[test]

    def _tells_nothing(self, test: str) -> bool:
        return self.known.get(test, False) or self.known.get(test.partition("::")[0], False)

    def groups(self, mutant: Mutant, is_elsewhere: bool) -> list[list[str]]:
        """Return the tests of a mutant in the order in which they are run: of its own folder, or of
        the others that have been looked at."""
        own = folder_of(mutant, self.package)
        is_own = bool(own) and (self.folder / "tests" / own).is_dir()
        if is_own and own not in self.reach:
            self.look(own)
        if not mutant.is_planted:
            return [] if is_elsewhere and is_own else tests_of(self.folder, mutant, self.package)
        seconds: dict[str, float] = {}
        for name, found in self.reach.items():
            if mutant.key not in found["hits"]:  # its place could not have a call
                return [] if is_elsewhere else tests_of(self.folder, mutant, self.package)
            if (name == own) != is_elsewhere:
                hits = dict.fromkeys(found["hits"][mutant.key])
                seconds |= {test: found["seconds"][test] for test in hits}
        near = f"/test_{Path(mutant.file).stem}"
        tests = sorted(seconds, key=lambda x: (near not in x, seconds[x]))
        return [x for x in (tests[:FIRST], tests[FIRST:]) if x]

    def outcome(self, mutant: Mutant, is_elsewhere: bool = False) -> Outcome:
        """Run the tests of a mutant until one fails that passes without it."""
        begun_s = time.monotonic()
        groups = self.groups(mutant, is_elsewhere)
        for number, tests in enumerate(groups):
            is_named = "::" in tests[0]
            while tests := [test for test in tests if not self._tells_nothing(test)]:
                options = ["-x"]
                if not is_named:
                    failing = [test for test, fails in self.known.items() if fails]
                    options += [f"--ignore={x}" for x in groups[0] if number]
                    options += [f"--{'deselect' if '::' in x else 'ignore'}={x}" for x in failing]
                ran = self._with_mutant(mutant, tests, options)
                took_s = round(time.monotonic() - begun_s, 1)
                if ran.code is None:
                    return Outcome("time", tests[0], took_s)
                if ran.code in (0, 5):  # 5: no test is left to run
                    break
                by, message, seconds = ran.failed
                if by and self.fails_alone(by):
                    continue
                if not by or seconds > LONG_S or ABOUT_TIME.search(message):
                    again = self._with_mutant(mutant, [by] if by else tests, ["-x"])
                    is_right = run_tests(self.folder, [by] if by else tests, self.limit_s).code
                    if again.code in (0, 5, None) or is_right not in (0, 5):
                        if not by:
                            return Outcome("error", message, took_s)
                        self.known[by] = True  # it fails at times, so it tells nothing
                        continue
                return Outcome("killed", by or message, took_s)
        return Outcome("alive" if groups else "none", "", round(time.monotonic() - begun_s, 1))

    def _with_mutant(self, mutant: Mutant, tests: Sequence[str], options: Sequence[str]) -> Ran:
        file = self.folder / mutant.file
        original = file.read_bytes()
        file.write_bytes(mutant.applied(original))
        try:
            return run_tests(self.folder, tests, self.limit_s, options)
        finally:
            file.write_bytes(original)


def table(mutants: Sequence[Mutant], rows: dict[str, dict[str, list]], sets: Sequence[str]) -> str:
    """Return Markdown tables of what is known: of each mutant, and of each folder."""
    lines = [
        f"| mutant | change | {' | '.join(sets)} |",
        f"|---|---|{'---|' * len(sets)}",
    ]
    folders: dict[str, Counter[str]] = {}
    lost: list[str] = []
    for mutant in mutants:
        row = rows.get(mutant.key, {})
        outcomes = [Outcome(*row[name]) if name in row else None for name in sets]
        cells = [f"{x.verdict} {x.by}".strip() if x else "" for x in outcomes]
        change = f"{_cell(mutant.before)} becomes {_cell(mutant.after)}"
        lines.append(f"| {mutant.file}:{mutant.line} | {change} | {' | '.join(cells)} |")
        count = folders.setdefault(folder_of(mutant), Counter())
        count["drawn"] += 1
        count["run"] += outcomes[0] is not None
        for name, outcome in zip(sets, outcomes, strict=True):
            if outcome:
                count[f"{outcome.verdict} {name}"] += 1
        if len(sets) == 2 and outcomes[1] and outcomes[1].verdict == "killed":
            lost.append(mutant.key)
    columns = ["drawn", "run", *(f"{x} {name}" for name in sets for x in VERDICTS)]
    lines += ["", f"| folder | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    total = sum(folders.values(), Counter[str]())
    for name, count in [*sorted(folders.items()), ("all", total)]:
        lines.append(f"| {name} | {' | '.join(str(count[x]) for x in columns)} |")
    if len(sets) == 2:
        lines += ["", f"killed by the old set alone: {', '.join(lost) or 'none'}"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return f"`{short[:60]}`"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=15, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, help="run the first of them alone, a fair sample")
    parser.add_argument(
        "--old", metavar="COMMIT", help="run the tests of this commit on what is left alive"
    )
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
    kept = json.loads(state.read_text()) if state.exists() else {"rows": {}}
    names = ["new", "old"] if given.old else ["new"]
    sets: dict[str, TestSet] = {}
    for name in names:
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)  # which may hold the mutant of a run that ended
        copy_tree(folder, given.old if name == "old" else None)
        sets[name] = TestSet(folder, given.limit, mutants)
    (out / "mutants.json").write_text(json.dumps([asdict(x) for x in mutants], indent=1))
    rows: dict[str, dict[str, list]] = kept["rows"]
    for name, is_elsewhere in itertools.product(names, (False, True)):
        for number, mutant in enumerate(mutants[: given.first], 1):
            row, done = rows.setdefault(mutant.key, {}), kept.setdefault("done", [])
            step = f"{mutant.key} {name} {is_elsewhere}"
            if step in done or "killed" in (row.get(x, [""])[0] for x in names):
                continue
            outcome = sets[name].outcome(mutant, is_elsewhere)
            if not is_elsewhere or outcome.verdict != "none":
                row[name] = list(outcome)
            done.append(step)
            state.write_text(json.dumps(kept))
            (out / "table.md").write_text(table(mutants, rows, names))
            print(f"{number}/{len(mutants)} {step}: {outcome}", flush=True)
    print((out / "table.md").read_text().partition("\n\n")[2] + f"{out / 'table.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
