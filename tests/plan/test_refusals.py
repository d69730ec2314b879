"""A wrong file gets the problems of all checks at once, whichever command reads it."""

import pytest

from torchdistpackage.cli.main import main

FILE = """\
data: {name: text, path: /gone/x.txt, seq_len: 64}
train: {recompute: auto, memory_gb: 0.00001}
optim: {lrr: 0.1}
log: {callbacks: ["gone_module:x"]}
"""
JOB = ("launch.slurm.nodes=1", "launch.slurm.ntasks-per-node=1", "--dry-run")
COMMANDS = [("plan", ()), ("train", ()), ("submit", JOB)]


@pytest.mark.parametrize(("command", "more"), COMMANDS)
def test_a_command_lists_the_problems_of_file_plan_and_files(command, more, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    assert main([command, str(path), f"run.dir={tmp_path / 'runs'}", *more]) == 2
    text = capsys.readouterr().err
    of_file, of_plan, of_files = "optim.lrr", "train.memory_gb=1e-05", "/gone/x.txt"
    assert all(text.count(x) == 1 for x in (of_file, of_plan, of_files, "no module gone_module"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("command", "more"), COMMANDS)
def test_a_plan_of_wrong_keys_is_left_out(command, more, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    assert main([command, str(path), "model.dimm=3", f"run.dir={tmp_path / 'runs'}", *more]) == 2
    text = capsys.readouterr().err
    assert "train.memory_gb=" not in text and "/gone/x.txt" in text
    (left_out,) = [line for line in text.splitlines() if line.startswith("not checked")]
    assert "the plan" in left_out
