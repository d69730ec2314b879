"""Names of options and functions before today's are still taken; the help shows today's alone."""

import pytest

import torchdistpackage
from torchdistpackage import comm
from torchdistpackage.cli import comm_bench, jobs, submit
from torchdistpackage.cli.main import main
from torchdistpackage.train import submitit_task

EARLIER = [
    (("comm", "bench"), "--alone", "--isolated", "-1"),
    (("comm", "bench"), "--over", "--axis", None),
    (("jobs", "monitor", "a"), "--every", "--interval", "0"),
    (("jobs", "monitor", "a"), "--wait", "--delay", "-1"),
    (("submit", "run.yaml"), "--parallel", "--max-parallel", "0"),
]
"""Command, earlier name, today's, a value that is refused."""
CASES = pytest.mark.parametrize(("command", "earlier", "today", "refused"), EARLIER, ids=str)


class Reached(Exception):
    """The command has its options."""


@CASES
@pytest.mark.parametrize("written", ["{} {}", "{}={}"])
def test_an_earlier_option_is_todays(monkeypatch, command, earlier, today, refused, written):
    def reach(*args: object, **kwargs: object) -> None:
        raise Reached(repr((args, kwargs)))

    monkeypatch.setattr(comm_bench, "Request", reach)
    monkeypatch.setattr(jobs, "ResubmitLimits", reach)
    monkeypatch.setattr(submit, "prepare", reach)
    monkeypatch.setattr(submit, "_checked", lambda *_: ("a", []))
    found = []
    for name in (earlier, today):
        value = "pipe" if today == "--axis" else "7"
        words = [*command, *written.format(name, value).split()]
        with pytest.raises(Reached) as reached:
            main([*words, "--sweep", "run.seed=1,2"] if command[0] == "submit" else words)
        assert "pipe" in str(reached.value) or "7" in str(reached.value)
        found.append(str(reached.value))
    assert found[0] == found[1]


@CASES
def test_the_help_and_refusals_name_todays_alone(capsys, command, earlier, today, refused):
    assert main([*command[:2], "--help"] if command[0] != "submit" else ["submit", "--help"]) == 0
    shown = capsys.readouterr().out.split()
    assert today in shown and earlier not in shown
    if refused is not None:
        assert main([*command, earlier, refused]) == 2
        said = capsys.readouterr().err
        assert f"'{today}'" in said and earlier not in said.replace(today, "")


def test_a_value_that_looks_like_an_earlier_option_of_another_command_stays():
    assert main(["plan", "--every"]) == 2
    assert main(["jobs", "monitor", "--parallel=2"]) == 2


def test_earlier_public_names_are_todays():
    assert torchdistpackage.run_here is torchdistpackage.run_or_launch
    assert torchdistpackage.same_place is torchdistpackage.replica_group
    assert comm.Pending is comm.Work
    assert submitit_task.Training is submitit_task.TrainingTask
