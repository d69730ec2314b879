"""Any file ends in a plan or in problems with file and line, soon, and runs nothing.

One child process reads them all under limits of the system; it says after each how it ended.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from torchdistpackage.config.load import KEYS

ROOT = Path(__file__).parents[2]
LIMIT_S, LIMIT_BYTES = 5, 1 << 30

HOSTILE = [
    *("1000000000", "-1", "1" * 90, "0x" + "f" * 5000, "1e999", ".inf", ".nan", "-0.0", "4.0"),
    *("null", "yes", "[]", "{}", "[1, 2]", "{a: b}", '""', "'4'", "a b", "*x", "&x 4"),
    *('"a\\0b"', '"\\ud800"', '"\\e[2J"', "x" * 100_000, "/dev/zero", "/", "../..", "a" * 300),
    *("!!python/object/apply:os.system ['touch RAN']", "!!python/name:os.system", "!!binary aGk="),
    *("!!set {a, b}", "!!timestamp 2024-01-01", "!x y", "[" * 3000, "{a: " * 3000, "|\n  a\n  b"),
]
TOPS = [
    *("a: &a {<<: *a}", "a: &a [*a]", "<<: {run: {name: x}}", "\ufeffrun: {}", "---\n...\n---"),
    *("%YAML 9.9\n---", "? [a]\n: b", "1: 2", "run: {name: a}\nrun: {name: b}", "\tx: y"),
    "\n".join(
        ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    ),
]

CHILD = f"""
import json, os, resource, signal, sys, time
from pathlib import Path
from torchdistpackage.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))
def late(*_):
    raise SystemExit(99)
signal.signal(signal.SIGALRM, late)
for number, arguments in enumerate(json.loads(sys.stdin.read())):
    signal.setitimer(signal.ITIMER_REAL, 4 * {LIMIT_S})
    began = time.process_time()
    with open(f"{{number}}.err", "w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
        try:
            code = main(["plan", *arguments])
        except BaseException as error:
            code = repr(error)[:300]
    signal.setitimer(signal.ITIMER_REAL, 0)
    line = json.dumps([code, time.process_time() - began])
    os.write(1, (line + "\\n").encode())
"""


def mutated(draw: random.Random, text: str) -> bytes:
    """A configuration with one to three things wrong, or none."""
    lines = text.splitlines()
    for _ in range(draw.randint(1, 3)):
        kind, at = draw.randrange(6), draw.randrange(len(lines))
        if kind < 3 and ": " in lines[at]:
            lines[at] = f"{lines[at].partition(': ')[0]}: {draw.choice(HOSTILE)}"
        elif kind == 3:
            lines.insert(at, draw.choice(TOPS))
        elif kind == 4:
            lines.insert(at, draw.choice(lines))
        else:
            lines[at] = f"{draw.choice(['  ', '    ', '- '])}{lines[at]}"
    content = bytearray(draw.choice(["\n", "\n", "\r\n", "\r"]).join(lines).encode())
    for _ in range(draw.choice([0, 0, 1, 5])):
        at = draw.randrange(len(content))
        content[at : at + 1] = draw.choice(
            [draw.randbytes(1), b"", b"\0", b"\xff", b"\xef\xbb\xbf"]
        )
    return bytes(content)


def ends_well(folder: Path, asked: list[list[str]]) -> set[int]:
    """Plan all of these in one limited child; the codes."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    ends = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(ends) == len(asked)
    for number, (arguments, (code, seconds)) in enumerate(zip(asked, ends, strict=True)):
        said, which = (folder / f"{number}.err").read_text(errors="replace"), str(arguments)[:200]
        assert code in (0, 2), f"{which} ended with {code}\n{said[-2000:]}"
        assert seconds < LIMIT_S, f"{which} took {seconds:.1f} s"
        assert len(said) < 500_000
        first, *problems = said.splitlines() or [""]
        if code == 2 and "problem" in first:
            places = tuple(f"  {place}" for place in (arguments[0], "command line: "))
            # behind the problems are notes of what was not checked, or is refused later
            listed = [line for line in problems if line.startswith("  ")]
            assert f" {len(listed)} problem" in first and listed == problems[: len(listed)], said
            assert listed and all(line.startswith(places) for line in listed), said
    assert {path.suffix for path in folder.iterdir()} == {".yaml", ".err"}, "something was run"
    return {code for code, _ in ends}


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.full)])
def test_any_file_ends_in_a_plan_or_in_problems(tmp_path: Path, examples: int) -> None:
    sources = [path.read_text() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    draw = random.Random(17)
    asked = [["0.yaml"]]
    (tmp_path / "0.yaml").write_text(sources[0])
    for number in range(1, examples):
        asked.append([f"{number}.yaml"])
        (tmp_path / asked[-1][0]).write_bytes(mutated(draw, draw.choice(sources)))
    assert ends_well(tmp_path, asked) == {0, 2}


@pytest.mark.parametrize(
    ("keys", "values"),
    [(10, 2), pytest.param(len(KEYS), len(HOSTILE), marks=pytest.mark.full)],
)
def test_any_key_takes_or_refuses_any_value(tmp_path: Path, keys: int, values: int) -> None:
    (tmp_path / "run.yaml").write_text("")
    draw = random.Random(17)
    asked = [
        ["run.yaml", f"{key}={value}"]
        for key in draw.sample(list(KEYS), keys)
        for value in draw.sample(HOSTILE, values)
    ]
    asked.append(["run.yaml", "run.seed=1"])  # that a draw has a value which is taken is luck
    assert ends_well(tmp_path, asked) == {0, 2}
