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


SRUN = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "2"}  # fmt: skip
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
OF_RANK_1 = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
RIGHT_FILE = FILE.replace("optim: {lrr: 0.1}\n", "")


@pytest.mark.parametrize(
    ("env", "file"),
    [(SRUN, RIGHT_FILE), (SRUN | OF_RANK_1, FILE), (TORCHRUN, FILE)],
    ids=["srun-0-right-file", "srun-1", "torchrun-0"],
)
def test_a_rank_of_a_launcher_lists_the_same_before_it_imports_torch(
    env, file, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "run.yaml"
    path.write_text(file)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(path), f"run.dir={tmp_path / 'runs'}"]) == 2
    text = capsys.readouterr().err
    in_file = () if file == RIGHT_FILE else ("optim.lrr",)
    for problem in (*in_file, "train.memory_gb=1e-05", "/gone/x.txt", "no module gone_module"):
        assert text.count(problem) == 1
    assert not (tmp_path / "runs").exists()
