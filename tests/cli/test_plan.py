"""The printed plan says what the values behind it say, and a wrong file says all that is wrong.

No torch.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.data.chat_shapes import PLAIN, said, save_chat_tokenizer
from tests.data.texts import save_lines
from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.topology.mesh import Mesh, topology

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = str(CONFIGS / "gpt_tiny.yaml")
ORDERS = [("data", "pipe", "context", "tensor"), ("tensor", "context", "data", "pipe")]


@pytest.fixture
def brief(capsys):
    """The text that `tdp plan` prints for a right file."""

    def run(*args: str) -> str:
        assert main(["plan", *args]) == 0
        said = capsys.readouterr()
        assert not said.err
        return said.out

    return run


@pytest.fixture
def plan(brief):
    """The same with every table."""
    return lambda *args: brief(*args, "--all")


@pytest.fixture
def refusal(capsys):
    """The text that a command prints for a wrong file."""

    def run(*args: str) -> str:
        assert main([*args]) == 2
        said = capsys.readouterr()
        assert not said.out
        assert said.err.startswith("tdp: ")
        assert "Traceback" not in said.err
        return said.err

    return run


def coordinates(text: str) -> dict[int, dict[str, int]]:
    lines = text.split("\n\n")[1].splitlines()
    names = lines[0].split()[1:]
    rows = [list(map(int, line.split())) for line in lines[1:] if not line.startswith("...")]
    return {rank: dict(zip(names, row, strict=True)) for rank, *row in rows}


def groups(text: str, kind: str) -> list[list[int]]:
    body = re.split(r"\n  (?=\w)", text.split("\n\n")[2])
    line = next(line for line in body if line.split()[0] == kind)
    return [
        [int(rank) for rank in re.findall(r"\d+", one)] for one in re.findall(r"\[[^]]*\]", line)
    ]


def stages(text: str) -> list[tuple[int, float]]:
    """(parameters, MiB) of each pipe index."""
    rows = re.findall(r"^ +\d+ +([\d,]+)((?: +[\d,]+\.\d{3}){4})$", text, re.MULTILINE)
    sizes = [[float(x.replace(",", "")) for x in row.split()] for _, row in rows]
    assert all(abs(sum(parts) - total) < 0.003 for *parts, total in sizes)
    return [(int(p.replace(",", "")), mib[-1]) for (p, _), mib in zip(rows, sizes, strict=True)]


def eight(order: tuple[str, ...]) -> list[str]:
    degrees = ["parallel.data=2", "parallel.pipe=2", "parallel.tensor=2"]
    return [TINY, "--procs", "8", f"parallel.order=[{', '.join(order)}]", *degrees]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_coordinates_are_those_of_the_mesh(plan, order):
    sizes = {"data": 2, "pipe": 2, "tensor": 2}
    mesh = Mesh(tuple((axis, sizes.get(axis, 1)) for axis in order))
    shown = coordinates(plan(*eight(order)))
    assert shown == {rank: mesh.coord(rank) | {"expert": 0} for rank in range(8)}


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_groups_of_each_kind_are_those_of_the_topology(plan, order):
    text = plan(*eight(order))
    sizes = {"data": 2, "pipe": 2, "tensor": 2}
    world = topology([(axis, sizes.get(axis, 1)) for axis in order], 8)
    for kind in ("data", "pipe", "tensor", "model", "expert_data"):
        mesh, axes = world.named(kind)
        assert groups(text, kind) == [list(ranks) for ranks in mesh.groups(axes)]
    assert groups(text, "context") == groups(text, "expert") == []


def test_stages_hold_the_whole_model_at_sixteen_bytes_a_parameter(plan):
    text = plan(TINY, "model.tied=false", "parallel.data=1", "parallel.pipe=4", "--procs", "4")
    total = int(re.search(r"^([\d,]+) parameters;", text, re.MULTILINE)[1].replace(",", ""))
    held = stages(text)
    assert len(held) == 4
    assert sum(count for count, _ in held) == total
    assert all(abs(mib - 16 * count / 2**20) < 0.001 for count, mib in held)


@pytest.mark.parametrize(("stage", "words"), [(1, "shards optimizer"), (3, "shards weights")])
def test_zero_is_said_with_what_it_leaves_in_parts(plan, stage, words):
    more = ["parallel.data=4", "parallel.pipe=1", "pipeline.microbatches=1"]
    whole, parts = (
        plan(TINY, *more, f"parallel.zero={zero}", "--procs", "4") for zero in (0, stage)
    )
    assert "full gradients too" in plan(
        TINY, *more[:2], "parallel.zero=2", "pipeline.microbatches=2"
    )
    assert f"ZeRO stage {stage} {words}" in parts and "ZeRO" not in whole
    ((_, before),), ((_, after),) = stages(whole), stages(parts)
    assert after / before == pytest.approx({1: 10 / 16, 3: 4 / 16}[stage], rel=0.01)


def test_the_tied_weight_is_held_at_both_ends(plan):
    text = plan(TINY)
    total = int(re.search(r"^([\d,]+) parameters;", text, re.MULTILINE)[1].replace(",", ""))
    assert sum(count for count, _ in stages(text)) == total + 256 * 128


def test_the_schedule_is_described(plan):
    text = plan(TINY)
    assert "1f1b, 4 x 4 samples" in text  # 32 samples over data 2 and 4 microbatches
    # (p-1)/(m+p-1) = 20 % of equal stages; the one with the head has 7 % more to compute
    assert "predicted bubble   21.6%   (from" in text
    assert "live microbatches  2 1 " in text


def test_of_several_stages_a_rank_each_has_its_line(plan):
    text = plan(TINY, "pipeline.schedule=zb-v")
    assert "chunks             2   (stages on a pipe rank, 4 in all)" in text
    rows = re.findall(r"^ +(\d+ +[\d.]+% +)?(\d) +(\S+ to \S+)$", text, re.MULTILINE)
    assert [int(stage) for _, stage, _ in rows] == [0, 3, 1, 2]
    assert rows[0][2].startswith("embed to") and rows[1][2].endswith("to head")
    assert "(at most, of all stages of a pipe rank)" in text
    assert "held until weight gradients are computed" in text


def test_the_world_is_that_of_the_command_line_or_of_the_file_or_of_the_degrees(plan):
    def world(*args: str) -> int:
        return len(coordinates(plan(*args)))

    assert world(TINY) == 4
    assert world(TINY, "--procs", "8", "parallel.data=4") == 8
    assert world(TINY, "parallel.data=8") == 16
    assert world(TINY, "parallel.data=auto") == 2
    assert world(TINY, "parallel.data=auto", "launch.local.procs=6", "data.global_batch=48") == 6
    data4 = (str(CONFIGS / "gpt_data4.yaml"), "parallel.data=auto")
    assert world(*data4, "--procs", "2") == 2
    assert world(*data4, "--world", "2", "launch.local.procs=4") == 2  # its former name


def test_long_lists_are_cut_unless_all_is_asked_for(brief):
    args = [str(CONFIGS / "gpt_data4.yaml"), "parallel.data=auto", "parallel.tensor=2"]
    args += ["--procs", "256"]
    args.append("data.global_batch=256")
    text = brief(*args, "--groups")
    assert list(coordinates(text)) == list(range(64))
    assert tells(text, "192", "--all")
    assert len(groups(text, "tensor")) == 32
    assert groups(text, "data") == [list(range(0, 128, 2))]
    whole = brief(*args, "--all")
    assert list(coordinates(whole)) == list(range(256))
    assert sum(map(len, groups(whole, "tensor"))) == sum(map(len, groups(whole, "data"))) == 256
    assert "..." not in whole


def test_groups_that_cross_nodes_are_warned_of(plan):
    args = [TINY, "parallel.data=1", "parallel.tensor=4", "parallel.pipe=2", "--procs", "8"]
    crossed = plan(*args, "--ranks-per-node", "2")
    assert tells(crossed, "2", "2 tensor", "4 ranks", "2 ranks")
    assert "stay inside nodes of 4 ranks" in plan(*args, "--ranks-per-node", "4")
    assert "warning" not in plan(*args)


def test_a_model_of_the_user_has_stages_only_once_built(plan, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("parallel: {pipe: 2, data: 2}\nmodel: {target: 'my.net:build'}\n")
    text = plan(str(path))
    assert "known only after my.net:build" in text
    assert len(coordinates(text)) == 4


def test_what_ranks_do_not_share_of_a_users_model_is_a_warning(plan, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("model: {target: 'my.net:build'}\ndata: {target: 'my.data:Rows'}\n")
    command = (str(path), "data.seq_len=16", "parallel.data=1")
    said = " ".join(plan(*command).partition("warning")[2].split())
    assert "my.net:build: there is no module my here or on the import path" in said
    assert "splits only" not in said and "of each sequence" not in said
    said = " ".join(plan(*command, "parallel.tensor=2", "parallel.context=2").split())
    assert "parallel.tensor=2 splits only what my.net:build says" in said
    assert "return tensor_parallel(model)" in said
    assert tells(said, "parallel.context=2", "my.net:build", "2 parts")


def test_every_broken_rule_is_listed_at_once(refusal):
    said = refusal("plan", TINY, "--procs", "6", "model.heads=3", "model.vocab=100", "optim.lr=no")
    assert said.startswith(f"tdp: 4 problems in {TINY}:\n")
    for part in ("must use all 6 ranks but uses 4", "model.heads=3", "model.vocab=100", "optim.lr"):
        assert part in said


WRONG = {
    "unknown": ("train:\n  stepz: 3\n", [":2: train.stepz: unknown key; did you mean"]),
    "duplicate": ("log:\n  every: 3\n  every: 4\n", [":3: log.every: duplicate key"]),
    "misplaced": ("train:\n  lr: 3\n", [":2: train.lr: misplaced key; did you mean optim.lr?"]),
    "wrong type": ("train:\n  steps: many\n", [":2: train.steps: wants a whole number, 1 or more"]),
    "wrong value": (
        "pipeline: {schedule: 1f2b}\n",
        [":1: pipeline.schedule: wants gpipe or 1f1b", "did you mean 1f1b?"],
    ),
    "not yaml": ("train: {steps: 3\nlog: [\n", ["not valid YAML"]),
    "no mapping": ("- 3\n", [":1: wants a mapping of sections"]),
    "rule": ("parallel:\n  tensor: 5\n", [":2: parallel.tensor: model.heads=4 cannot be shared"]),
    "procs": (
        "parallel: {data: 3}\nlaunch: {local: {procs: 4}}\n",
        [":2: launch.local.procs: data=3 x pipe=1 x context=1 x tensor=1 needs 3 processes but "],
    ),
    "several": (
        "log: {evry: 3}\nmodel:\n  dim: 129\n  tied: 3\n",
        [":1: log.evry: unknown", ":3: model.dim: model.dim=129 is", ":4: model.tied: wants true"],
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_wrong_file_is_answered_with_its_lines_and_starts_nothing(
    refusal, tmp_path, monkeypatch, command, kind
):
    text, expected = WRONG[kind]
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(text)
    said = refusal(command, "r.yaml")
    assert all(
        re.search(rf"^  r\.yaml.*{re.escape(part)}", said, re.MULTILINE) for part in expected
    )
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_file_that_is_not_there_is_answered_with_the_nearest(refusal, command):
    said = refusal(command, TINY.replace("tiny", "tny"))
    assert f"there is no such file; did you mean {TINY}?" in said


@pytest.mark.parametrize("command", ["plan", "train"])
def test_overrides_pass_the_same_checks(refusal, command):
    said = refusal(command, TINY, "train.stepz=3", "optim.lr", "model.dim=wide")
    assert "command line: train.stepz=3: unknown key" in said
    assert "write an override as section.key=value" in said
    assert "wants a whole number" in said


SLURM = ["launch.slurm.nodes=2", "launch.slurm.partition=gpu", "parallel.data=4"]


def test_a_job_ends_with_its_batch_script(plan):
    text = plan(TINY, *SLURM)
    body, bang, script = text.partition("#!/bin/bash\n")
    assert bang and "batch script" in body.splitlines()[-2]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    for line in ("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=4", "#SBATCH --partition=gpu"):
        assert f"{line}\n" in script
    assert len(coordinates(text)) == 8
    assert "stay inside nodes of 4 ranks" in text


def test_the_script_is_there_when_it_is_asked_for_or_all_of_a_job_is(plan, brief):
    assert "#SBATCH" not in plan(TINY) and "#SBATCH" not in brief(TINY, *SLURM)
    assert tells(brief(TINY, *SLURM), "2 nodes", "4 tasks", "--sbatch")
    for option in ("--sbatch", "--script"):
        assert "#SBATCH --ntasks-per-node=4\n" in brief(TINY, option)
    assert "#SBATCH" not in plan(TINY, *SLURM, "--procs", "8")
    text = plan(
        *(TINY, "launch.slurm.nodes=1-2", "launch.slurm.ntasks-per-node=4", "parallel.data=auto")
    )
    assert tells(" ".join(text.split()), "grant 1", "4 ranks", "2", "8 ranks")


def test_problems_of_the_job_are_listed_with_the_others(refusal):
    said = refusal("plan", TINY, "launch.slurm.tiem=5", "launch.slurm.output=x", "model.heads=3")
    assert "3 problems" in said
    assert "did you mean time?" in said and "set run.dir" in said and "model.heads=3" in said
    said = refusal("plan", TINY, "launch.slurm.nodes=3")
    assert tells(said, "4 ranks", "nodes=3")
    assert "x 3 tasks" in refusal("plan", TINY, "launch.slurm.ntasks-per-node=3")


def test_what_is_recomputed_is_said(plan, refusal):
    assert "recompute" not in plan(TINY)
    assert "recompute          every block, in its" in plan(TINY, "train.recompute=blocks")
    offloaded = plan(TINY, "train.recompute=offload", "--memory")
    assert "recompute          nothing: activations of every block wait in" in offloaded
    assert "predicted peak of rank" in offloaded
    text = plan(TINY, "train.recompute=auto", "train.memory_gb=2", "parallel.pipe=2")
    assert re.search(r"recompute +auto: .*measured at the start", text)
    assert "2 GB in all on a rank" in text
    left = [float(x) for x in re.findall(r"([\d.]+) GB for activations at pipe \d", text)]
    assert len(left) == 2 and all(1.9 < x < 2 for x in left)
    text = refusal("plan", TINY, "train.recompute=auto", "train.memory_gb=0.001")
    assert "leaves nothing of train.memory_gb=0.001 for activations; allow more, split" in text


LARGE = [
    *("model.dim=8192", "model.layers=80", "model.heads=64", "parallel.data=16", "parallel.pipe=8"),
    *("data.global_batch=1024", "--procs", "512", "--ranks-per-node", "3"),
]
WIDE = {path.stem: [str(path)] for path in CONFIGS.glob("*.yaml")} | {
    "large": [str(CONFIGS / "gpt_slurm.yaml"), *LARGE],
    "zero2": [
        *(TINY, "parallel.zero=2", "train.recompute=auto", "train.memory_gb=2"),
        *("launch.slurm.nodes=1-2", "launch.slurm.ntasks-per-node=4", "parallel.data=auto"),
    ],
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", WIDE)
def test_every_line_fits_a_terminal_of_80_columns(brief, plan, monkeypatch, case):
    monkeypatch.setenv("COLUMNS", "80")
    summary = brief(*WIDE[case]).splitlines()
    assert len(summary) <= 30 and max(map(len, summary)) <= 80
    shown, _, script = plan(*WIDE[case]).partition("#!/bin/bash\n")
    comments = [line for line in script.splitlines() if line.lstrip().startswith("# ")]
    lines = [*shown.splitlines(), *comments]
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []


def test_a_data_file_that_is_not_here_is_a_warning(plan, refusal, tmp_path):
    absent, source = f"data.path={tmp_path}/none.txt", "data.name=text"
    (warning,) = [x for x in plan(TINY, source, absent).split("\n\n") if x.startswith("warning")]
    assert f"{tmp_path}/none.txt does not exist" in " ".join(warning.split())
    assert "none.txt does not exist" in refusal("train", TINY, source, absent)
    tokenizer = f"data.tokenizer={tmp_path}/nowhere"
    assert f"{tmp_path}/nowhere does not exist" in " ".join(
        plan(TINY, source, absent, tokenizer).split()
    )


def test_keys_of_chats_that_nobody_uses_are_a_warning(plan, tmp_path):
    """Of the first rows; a start says it of all."""
    chat = [said("user", "alpha"), {**said("assistant", "beta"), "scored": 3}]
    row = {"messages": chat, "chat_template_kwargs": {"think": True}, "source": "web"}
    data = {"name": "jsonl", "field": "messages", "path": str(tmp_path / "chats.jsonl")}
    data["tokenizer"] = str(save_chat_tokenizer(tmp_path / "tokenizer", PLAIN["chatml"]))
    save_lines(tmp_path / "chats.jsonl", [row] * 120)
    own = [f"data.{key}={value}" for key, value in data.items()]
    said_of = " ".join(plan(TINY, *own, "model.vocab=400", "data.seq_len=16").split())
    assert tells(said_of, "data.path", "100 rows")
    for key in ("'scored' of messages (100)", "'think' of chat_template_kwargs (100)"):
        assert key in said_of
    assert "'source' of rows (100)" in said_of
    save_lines(tmp_path / "chats.jsonl", [{"messages": [*chat[:1], said("assistant", "b")]}])
    assert "not used" not in plan(TINY, *own, "model.vocab=400", "data.seq_len=16")


def test_the_summary_has_the_numbers_of_the_tables(brief, plan):
    """One line for each question; the tables are printed where they are asked for."""
    text, tables = brief(TINY), plan(TINY)
    assert len(text.splitlines()) <= 15
    total = re.search(r"^([\d,]+) parameters;", tables, re.MULTILINE)[1]
    assert f"parameters         {total}\n" in text
    most = max(mib for _, mib in stages(tables))
    assert f"memory of a rank   {most:.4g} MiB (pipe 1, the largest): weights 1.639 MiB" in text
    assert "predicted bubble   21.6%\n" in text
    assert tells(text, "data 1.514", "MiB", "pipe 1", "MiB")
    for option, head in {"--groups": "rank  pipe  data", "--bytes": "axis        call"}.items():
        assert head not in text and head in brief(TINY, option) and head in tables
    many = brief(TINY, "parallel.zero=1", *(f"launch.slurm.{x}" for x in ("nodes=2", "time=60")))
    assert "ZeRO stage 1" in many and "job " in many


def test_the_summary_names_the_warnings(brief):
    crossed = brief(TINY, "parallel.data=1", "parallel.tensor=4", "--ranks-per-node", "2")
    assert tells(crossed, "2", "2 tensor", "4 ranks", "2 ranks")
