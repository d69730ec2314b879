"""What a shell sees: the exit code, texts instead of tracebacks, and nothing imported in vain."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchdistpackage import errors
from torchdistpackage.cli.main import COMMANDS, main
from torchdistpackage.train import job

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TINY = str(ROOT / "configs" / "gpt_tiny.yaml")
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.TorchDistError)
]
REFUSALS = {
    errors.ConfigError,
    errors.TopologyError,
    errors.LayoutError,
    errors.ScheduleError,
    errors.HeldError,
}

WATCHED = """
import sys
sys.modules["torch"] = None  # importing it raises
from torchdistpackage.cli.main import main
code = main(sys.argv[1:])
names = [name.split(".") for name in sys.modules]
print(*sorted({".".join(n[:depth]) for n in names for depth in (1, 2)}), file=sys.stderr)
sys.exit(code)
"""
"""Runs a command without torch and ends with the packages it imported, and what is in them."""


def tdp(*args: str) -> subprocess.CompletedProcess[str]:
    """A real run, as `python -m torchdistpackage`."""
    command = [sys.executable, "-m", "torchdistpackage", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def packages(*args: str) -> set[str]:
    """What a successful command imports, torch being out of reach."""
    command = [sys.executable, "-c", WATCHED, *args]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return set(run.stderr.split())


@pytest.mark.parametrize("command", [*COMMANDS, "sch"])
def test_what_a_terminal_would_obey_is_shown_as_an_escape(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for odd, shown in (("\u202ex", "\\u202ex"), ("\x1b[31m", "\\x1b[31m"), ("\u2066", "\\u2066")):
        for word in (f"a{odd}.yaml", f"--{odd}"):
            if command == "train" and word.startswith("-"):
                continue  # its output is that of ranks
            assert main([f"{command}{odd}" if command == "sch" else command, word, word]) != 0
            said = capsys.readouterr()
            assert odd[0] not in said.out + said.err
            assert shown in said.err or command in ("comm", "jobs", "data", "checkpoint", "report")


def test_a_mistake_is_told_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", TINY]) == 1
    said = capsys.readouterr().err
    assert said == "tdp: there is no sbatch here; submit from where it is, on a login node\n"
    assert main(["report", "nothere"]) == 2
    assert capsys.readouterr().err.startswith("tdp: 1 problem in tdp report:\n  nothere: there is")


def test_the_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines()] == list(
        COMMANDS
    )


def test_the_file_of_the_command_line_is_a_program_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-m", "torchdistpackage.cli.main", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "") and main(["--help"]) == 0
    assert run.stdout == capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_in_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    todo = [[command]]
    while todo:
        words = todo.pop()
        assert main([*words, "--help"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"Usage: tdp {' '.join(words)}")
        assert words != [command] or COMMANDS[command] in " ".join(shown.split())
        assert max(map(len, shown.splitlines())) <= 80
        listed = shown.partition("Commands:\n")[2].splitlines()
        assert not [line for line in listed if line.endswith("...")], "cut off"
        todo += [[*words, line.split()[0]] for line in listed]


def test_a_name_that_is_nearly_a_command_is_answered_with_it(capsys):
    assert main(["pln"]) == 2
    assert "Did you mean 'plan'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["plan"], "CONFIG"),
        (["plan", TINY, "--wrld", "4"], "--wrld"),
        (["plan", TINY, "--procs", "four"], "--procs"),
        (["plan", TINY, "--procs", "0"], "--procs"),
        (["schedule", "1f1b", "--stages", "4"], "--microbatches"),
        (["train", TINY, "--procs", "two"], "--procs"),
    ],
)
def test_a_wrong_usage_names_the_argument(args, named, capsys):
    assert main(args) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert not said.out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_errors_of_the_package_are_texts_and_codes(kind, monkeypatch, capsys):
    def fail(*_: object) -> int:
        raise kind("rank 3 on host a: what and why")

    monkeypatch.setattr(job, "launch", fail)
    assert main(["train", TINY]) == (2 if kind in REFUSALS else 1)
    assert capsys.readouterr().err == "tdp: rank 3 on host a: what and why\n"


def test_an_interrupt_is_130(monkeypatch):
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "launch", interrupt)
    assert main(["train", TINY]) == 130


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(job, "launch", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train", TINY])


@pytest.mark.parametrize(
    "path",
    [p if p.stem == "gpt_slurm" else pytest.param(p, marks=pytest.mark.full) for p in CONFIGS],
    ids=lambda path: path.stem,
)
def test_plan_imports_no_more_than_it_needs(path):
    """This is what keeps `tdp plan` under half a second."""
    slow = {"numpy", "rich", "safetensors", "submitit", "matplotlib", "multiprocessing", "asyncio"}
    loaded = packages("plan", str(path))
    assert "pydantic" in loaded
    assert not loaded & slow
    of_a_job = {"torchdistpackage.launch", "torchdistpackage.harness"}
    assert path.stem.endswith("_slurm") or not loaded & of_a_job


def test_schedule_and_schema_import_less():
    schedule = packages("schedule", "1f1b", "--stages", "2", "--microbatches", "2")
    assert not schedule & {"numpy", "rich"}
    assert not packages("schema") & {"numpy", "rich"}
    assert not packages("--help") & {"numpy", "rich", "pydantic", "yaml"}


def test_a_refusal_of_the_module_is_a_text_without_traceback():
    run = tdp("plan", TINY, "optim.lrr=1")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith(f"tdp: 1 problem in {TINY}:\n")
    assert "Traceback" not in run.stderr


def test_a_reader_that_leaves_early_is_no_error_message():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchdistpackage", "plan", TINY]
    run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writing)
    assert run.returncode == 1
    assert run.stderr == ""


@pytest.mark.parametrize(
    ("line", "offered"),
    [("pl", "plan"), ("plan --pro", "--procs"), ("comm be", "bench")],
)
def test_a_shell_completes_commands_and_options(line, offered, monkeypatch, capsys):
    monkeypatch.setenv("_TDP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"tdp {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    assert main([]) == 0
    assert offered in capsys.readouterr().out.split()


def test_the_test_command_has_a_usage_text():
    done = subprocess.run([ROOT / "scripts" / "test", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "scripts/test tests/ddp -k unused" in done.stdout
