"""The table "Where something new goes" is followed row by row in a copy of the package: no file is
edited that the row does not name, and what was added works."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.contributing_edits import EDITS

ROOT = Path(__file__).parents[2]


def rows() -> dict[str, str]:
    """Return for each thing to add what CONTRIBUTING.md says to touch."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text[text.index("| to add | touch |") : text.index("## Words")]
    return dict(re.findall(r"^\| (a.*?|something.*?) \| (.*) \|$", table, re.MULTILINE))


@pytest.mark.parametrize("row", EDITS)
def test_a_row_names_every_file_that_is_edited(row: str):
    """After the first file of `train/` a row may name others of that folder without it."""
    named = re.findall(r"`([\w/]+(?:\.py|/))`", rows()[row])
    folders = [name for name in named if name.endswith("/")]
    for path, _, _ in EDITS[row]:
        files = [*named, *(f"train/{name}" for name in named)]
        assert path in files or any(path.startswith(folder) for folder in folders), path


DECLARED = (
    *("a collective", "an exchange over context", "a balance of experts", "an optimizer"),
    *("a source of token ids", "a format of data files", "a format of checkpoints"),
    "a logged value",
)


@pytest.mark.parametrize("row", DECLARED)
def test_what_declares_itself_takes_a_sentence_and_two_files(row: str):
    assert ". " not in rows()[row]
    assert len({path for path, _, _ in EDITS[row]}) <= 2


def test_a_flag_that_all_ranks_agree_on_is_one_line_at_its_owner():
    ((_, _, added),) = EDITS["a flag that all ranks agree on"]
    assert added.count("\n") == 1


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package in which all rows were followed."""
    copy = tmp_path_factory.mktemp("edited")
    shutil.copytree(ROOT / "torchdistpackage", copy / "torchdistpackage")
    for path, before, added in (edit for edits in EDITS.values() for edit in edits):
        file = copy / (path if path.startswith("configs/") else f"torchdistpackage/{path}")
        if not before:
            file.parent.mkdir(exist_ok=True)
            text = file.read_text("utf-8") if file.exists() else ""
            file.write_text(f"{text}\n\n{added}", "utf-8")
            continue
        text, count = re.subn(
            before, lambda m, new=added: m[0] + new, file.read_text("utf-8"), count=1
        )
        assert count, f"{path} has no {before}"
        file.write_text(text, "utf-8")
    return copy


def run(edited: Path, *words: str) -> str:
    """Run python with these words and the edited package; return what it prints."""
    done = subprocess.run(
        [sys.executable, *words], cwd=edited, env={**os.environ, "PYTHONPATH": str(edited)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


WITHOUT_TORCH = """
import sys
from pathlib import Path
from torchdistpackage import comm
from torchdistpackage.checkpoint.formats import table
from torchdistpackage.cli.main import main
from torchdistpackage.comm import collective_table
from torchdistpackage.config import data_section
from torchdistpackage.config.load import load
from torchdistpackage.config.slurm import OPTIONS
from torchdistpackage.data.tokens.documents import documents_of, pieces_of
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout import balances, exchanges
from torchdistpackage.plan import logged_values
assert main(["schedule", "fill-drain", "--stages", "2", "--microbatches", "3"]) == 0
assert main(["hello"]) == 0
assert "an-option" in OPTIONS
assert {"sum_parts", "start_sum_parts"} <= set(comm.__all__)
assert "sum_parts" in collective_table.COLLECTIVES
row = "| `sum_parts(x, dim, group)` | a part of the sum | `all_gather` |"
assert row in collective_table.page_rows()
assert "| `one_gather` | 6 | 6 | some | rarely |" in exchanges.page_rows()
assert "| `importance` | squares | a rank |" in balances.page_rows()
assert "| `lists` | JSON | JSON |" in table.page_rows()
assert "| `ranks` | ranks | how many there are |" in logged_values.page_rows()
changes = ["parallel.context=2", "parallel.cp_comm_type=one_gather", "model.moe.num_experts=4"]
assert main(["plan", "configs/flat.yaml", "--all", *changes, "model.moe.balance=importance"]) == 0
Path("rows.csv").write_text("id,words\\n1,a b\\n2,c")
section = load("configs/flat.yaml", ["data.path=rows.csv", "data.name=csv", "data.field=words",
    "data.tokenizer=tokenizer"]).data
(piece,) = pieces_of(section.name, Path(section.path))
assert [x.text for x in documents_of(section.name, piece, section.field)] == ["a b", "c"]
assert section.reading("x/rows.csv").name == "csv"
assert "| `csv` | a row | a header |" in data_section.page_rows()
try:
    load("configs/flat.yaml", ["data.counts_from=5"])
except ConfigError as error:
    assert "data.counts_from=5 has no effect with data.name=python_stdlib; remove it" in str(error)
else:
    raise AssertionError("a key of another source was taken")
assert "torch" not in sys.modules
"""
IN_ONE_SERVER = """
import tempfile
from pathlib import Path
from torchdistpackage.cli import comm
from torchdistpackage.launch import workers
from torchdistpackage.launch.fork_server_client import ForkServer

class Shared:
    "The one server, whose imports all runs share, with a folder for each run."
    def __init__(self, preload):
        self.folder = Path(tempfile.mkdtemp(dir="."))
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def __getattr__(self, name):
        return getattr(server, name)

comm._TEST = "on_ranks:train_and_test"
with ForkServer(["on_ranks", "torch._dynamo", "torchdistpackage.train.worker"]) as server:
    workers.ForkServer = Shared
    assert main(["comm", "test", "--axes", "data=2"]) == 1
    assert main(["train", *sys.argv[1:]]) == 0
"""
ON_RANKS = """
import sys
from pathlib import Path
import torch
sys.path.append("ROOT")
from tests.comm.collective_cases import cases
from tests.parallel.expert.one_process import train
from torchdistpackage import NaiveDDP, ZeroOptimizer, comm, tpc
from torchdistpackage.checkpoint.formats.importing import write_checkpoint
from torchdistpackage.checkpoint.formats.source import TensorSource, checkpoint_source
from torchdistpackage.cli.main import main
from torchdistpackage.ddp.comm_hooks import float32_compress
from torchdistpackage.harness.comm_test import run_comm_test
from torchdistpackage.parallel import context_attention
from torchdistpackage.parallel.tensor.scale import Scale

def train_and_test(*how):
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = NaiveDDP(Scale(4).double(), comm_hook=float32_compress)
    model(x).sum().backward()
    assert torch.allclose(model.module.weight.grad, x.sum(0))
    scale = Scale(4).double()
    zero = ZeroOptimizer(torch.optim.SGD(scale.parameters(), lr=1), scale, sum_factor=0.5)
    scale(x).sum().backward()
    zero.step()
    assert torch.allclose(scale.weight, 1 - x.sum(0) / 2)
    for check in (a_collective, an_exchange, a_format):
        tpc.setup_process_groups([("context", 2)])
        check()
        tpc.destroy()
    train((("data", 2),), 2, "importance", steps=1)
    tpc.destroy()
    return run_comm_test(*how)

def a_collective():
    case, *others = cases("sum_parts", 2)
    assert len(others) == 2 and not any(each.uneven for each in (case, *others))
    drawn = [case.draw(index) for index in range(2)]
    assert torch.equal(case.plain(drawn, 1), (drawn[0] + drawn[1])[2:])
    x = torch.arange(4.0, dtype=torch.float64, requires_grad=True)
    part = comm.sum_parts(x, 0, "context")
    assert part.tolist() == [[0.0, 2.0], [4.0, 6.0]][tpc.rank]
    (part * (tpc.rank + 1)).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert comm.start_sum_parts(x.detach(), "context").wait().tolist() == part.tolist()

def an_exchange():
    draw = torch.Generator().manual_seed(tpc.rank)
    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64, generator=draw)
    results = []
    for comm_type in ("one_gather", "p2p"):
        parts = [x.clone().requires_grad_() for x in (q, k, v)]
        y = context_attention(*parts, is_causal=True, comm_type=comm_type)
        y.square().sum().backward()
        results.append([y, *(x.grad for x in parts)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)

def a_format():
    if tpc.rank:
        return
    write_checkpoint(TensorSource({"w": ("float32", (2,))}, lambda name: torch.ones(2)), Path("a"))
    assert main(["checkpoint", "export", "a", "w.json", "--to", "lists"]) == 0
    assert Path("w.json").read_text() == '{"w": [1.0, 1.0]}'
    assert main(["checkpoint", "import", "w.json", "b", "--from", "lists", "--step", "3"]) == 0
    assert checkpoint_source(Path("b/step_000003")).read("w").tolist() == [1.0, 1.0]
"""


def test_what_was_added_works_on_ranks_and_in_a_run(edited: Path):
    """One start of all of it: torch is imported once, and the check that fails is the last one."""
    (edited / "on_ranks.py").write_text(ON_RANKS.replace("ROOT", str(ROOT)), "utf-8")
    changes = (
        "pipeline.schedule=fill-drain",
        "optim.an_example=0.5",
        "optim.name=adagrad",
        "train.steps=2",
        "--procs=2",
    )
    small = ("model.layers=2", "model.dim=16", "model.heads=2", "optim.warmup_steps=0")
    less = ("log.plot=false", "data.seq_len=16", "parallel.pipe=2", "data.global_batch=8")
    less += ("train.eval_batches=1", "checkpoint.save_every=0")
    less += ("data.name=counting", "data.counts_from=3")
    words = ("configs/flat.yaml", *changes, *small, *less)
    shown = run(edited, "-c", WITHOUT_TORCH + IN_ONE_SERVER, *words)
    assert "fill-drain" in shown and "hello" in shown
    assert "context            one_gather, 2 ranks" in shown
    assert "a check that fails" in shown and "rank 1 of" not in shown
    assert "noise of the update: 0.5" in shown
    shows = r"bubble [\d.]+% \(predicted [\d.]+%\)  2 ranks"
    assert re.search(shows, shown), "a value of the log line"
    (metrics,) = edited.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    assert [(row["ranks"], row["mean_rank"], row["greeting"]) for row in rows] == [
        (2.0, 0.5, "hello")
    ] * 2
    assert [row["nats"] for row in rows] == pytest.approx([128 * math.log(256)] * 2)
    assert rows[-1]["bigram"] < rows[-1]["unigram"] / 2, "of numbers that follow each other"
    assert [row["odd"] for row in rows] == [2.0, 0.0], "a flag, summed over the ranks"
    assert [row["loss"] for row in rows] == pytest.approx([math.log(256)] * 2), "of equal logits"


FAMILY = """
import json, sys, torch
from copy import deepcopy
from transformers import Starcoder2Config, Starcoder2ForCausalLM
from torchdistpackage.compat.tensor_parallel import tensor_parallel
from torchdistpackage.models.transformers_layout import layouts, shape_of_section
from torchdistpackage.compat.tensor_parallel.engine.explain import explain
torch.manual_seed(0)
torch.set_num_threads(1)
config = Starcoder2Config(vocab_size=256, hidden_size=24, intermediate_size=37, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0,
    eos_token_id=1)
model = Starcoder2ForCausalLM(config).double()
config.save_pretrained(sys.argv[1])
cuts = layouts(shape_of_section({"hf": sys.argv[1]}, 8, False))
shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
assert {name: cut.shape for name, cut in cuts.items()} == shapes
plan = {row.name: row.cut for row in explain(model, 2).parameters}
assert {n for n, cut in plan.items() if cut == "whole"} == {n for n in cuts if "norm" in n}
ids = torch.arange(14).view(2, 7)
split = tensor_parallel(deepcopy(model), ["cpu"] * 2)
assert torch.allclose(split(ids).logits, model(ids).logits, rtol=0, atol=1e-11)
"""


@pytest.mark.full
def test_a_family_of_transformers(edited: Path, tmp_path: Path):
    """One table of it gives layouts and the plan of `tensor_parallel`."""
    pytest.importorskip("transformers")
    run(edited, "-c", FAMILY, str(tmp_path))


@pytest.mark.full
def test_a_family_of_transformers_trains_on_ranks_and_is_exported(edited: Path, tmp_path: Path):
    """With sequence parallelism and a split loss, in float64 of one process' numbers."""
    from transformers import AutoModelForCausalLM

    run(edited, "-c", FAMILY, str(tmp_path))
    (edited / "family.yaml").write_text("data: {name: python_stdlib}\n", "utf-8")
    found: list[tuple[list[float], dict]] = []
    for tensor in (1, 2):
        name = f"family-{tensor}"
        options = (
            f"model.hf={tmp_path}/config.json",
            f"run.name={name}",
            f"parallel.tensor={tensor}",
        )
        options += (f"parallel.sequence_parallel={str(tensor > 1).lower()}", f"--procs={tensor}")
        options += ("precision.dtype=float64", "data.seq_len=16", "data.global_batch=4")
        options += ("train.steps=3", "train.eval_batches=1", "log.plot=false")
        options += ("optim.warmup_steps=0", "checkpoint.save_every=0", "checkpoint.export=hf")
        run(edited, "-m", "torchdistpackage", "train", "family.yaml", *options)
        (folder,) = edited.glob(f"runs/*{name}*")
        rows = map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())
        (exported,) = folder.rglob("hf/")
        weights = AutoModelForCausalLM.from_pretrained(exported).state_dict()
        found.append(([row["loss"] for row in rows], weights))
    (losses, weights), (split_losses, split_weights) = found
    assert len(losses) == 3 and split_losses == pytest.approx(losses, rel=0, abs=1e-9)
    assert weights.keys() == split_weights.keys()
    assert all(weights[key].allclose(split_weights[key], rtol=0, atol=1e-9) for key in weights)


@pytest.mark.full
def test_a_collective_is_measured(edited: Path):
    options = ("--axes", "data=2", "--operations", "sum_parts", "--sizes", "4KiB")
    shown = run(edited, "-m", "torchdistpackage", "comm", "bench", *options, "--iterations", "1")
    assert "every element verified" in shown and "sum_parts" in shown
