"""`tdp reference`: a run with the file is the run with the reference, on every layout; a file of
other data is refused by name.
"""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.data.texts import save_lines
from tests.tells import tells
from tests.train import parity
from tests.train.preference_ranks import RUN, data_keys, pair, preferred
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import everywhere_float64, save_model
from torchdistpackage.config.load import loads
from torchdistpackage.errors import CheckpointError
from torchdistpackage.plan.reference_file import identity, wrong_reference
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_data, build_model
from torchdistpackage.train.reference_cache import write_reference

RANKS_IMPORT = ("peft",)
ADAPTERS = "model.lora={r: 3, alpha: 6, target: [q_proj, v_proj, down_proj]}"
LAYOUTS = {
    "data2-zero3": ["parallel.data=2", "parallel.zero=3"],
    "pipe2xtensor2": ["parallel.pipe=2", "parallel.tensor=2"],
    "context2": ["parallel.context=2"],
    "data2-adapters": ["parallel.data=2", ADAPTERS],
    "data2-accumulate": ["parallel.data=2", "train.accumulate=2", "pipeline.microbatches=1"],
}


def write(overrides: list[str], path: str) -> dict[str, int]:
    import torch
    import torch.distributed as dist

    plan = make_plan(parity.config([*RUN, *overrides]), dist.get_world_size())
    model = build_model(plan, dist.get_rank(), torch.device("cpu"))
    with everywhere_float64():
        return write_reference(model, build_data(plan), Path(path), identity(plan.config), None)


def refusal(overrides: list[str]) -> str:
    with pytest.raises(CheckpointError) as error:
        preferred(overrides)
    return str(error.value)


@pytest.fixture(scope="module")
def keys(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cached")
    model = {**MODELS["llama"], "vocab_size": 300}
    ranks(1).run(save_model, model, str(folder / "model"))
    val = save_lines(folder / "val.jsonl", [pair(i) for i in range(40, 45)])
    return [*data_keys(folder), f"model.hf={folder / 'model'}", f"data.val_path={val}"]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=() if i < 2 else pytest.mark.full) for i, x in enumerate(LAYOUTS)],
)
def test_a_run_with_the_file_is_the_run_with_the_reference(ranks, keys, tmp_path, layout):
    size, path = 4 if "x" in layout else 2, tmp_path / "r.safetensors"
    words = [*keys, *LAYOUTS[layout]]
    truth = ranks(size).run(preferred, words)
    numbers = ranks(size).run(write, words, str(path))
    assert numbers[0] == {"train": 42, "val": 10}
    alone = tmp_path / "alone.safetensors"
    ranks(1).run(write, keys, str(alone))
    for name, values in load_file(alone).items():
        assert (load_file(path)[name] - values).abs().max() < 1e-10
    found = ranks(size).run(preferred, [*words, f"train.dpo.reference={path}"])
    for (mine, logged, val, values), (other, *more) in zip(found, truth, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=1e-12)
        assert (val, values) == (pytest.approx(more[1], rel=1e-12), pytest.approx(more[2]))
        assert logged[2] == pytest.approx(more[0][2], rel=1e-9)
    parity.expect_close([x.weights for x, *_ in found], [x.weights for x, *_ in truth])


def test_ranks_of_a_launcher_refuse_the_file_of_another_run(ranks, keys, tmp_path):
    path = tmp_path / "r.safetensors"
    ranks(2).run(write, [*keys, "parallel.data=2"], str(path))
    words = [*keys, "parallel.data=2", f"train.dpo.reference={path}", "data.seq_len=16"]
    assert all("data.seq_len (24 there, 16 here)" in x for x in ranks(2).run(refusal, words))


def test_the_command_writes_a_file_that_other_runs_are_refused(tdp, ranks, tmp_path):
    ranks(1).run(save_model, {**MODELS["llama"], "vocab_size": 300}, str(tmp_path / "model"))
    keys = [*RUN, *data_keys(tmp_path), f"model.hf={tmp_path / 'model'}"]
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}\n")
    path = tmp_path / "r.safetensors"
    command = ["reference", str(tmp_path / "run.yaml"), *keys]
    code, said = tdp([*command, "-o", str(path), "parallel.data=2"])
    assert code == 0 and "42 rows of train" in said, said

    def problem(*more: str) -> str:
        last = {x.partition("=")[0]: x for x in (*keys, f"train.dpo.reference={path}", *more)}
        found = wrong_reference(loads("launch: {local: {procs: null}}", overrides=[*last.values()]))
        return " ".join(x.text for x in found)

    assert not problem() and not problem("train.dpo.beta=0.2", "data.global_batch=8")
    other = save_lines(tmp_path / "other.jsonl", [pair(i) for i in range(9)])
    assert re.search(
        r"other contents of data.path \(\w+ there, \w+ here\);", problem(f"data.path={other}")
    )
    said = problem("data.seq_len=16", "data.eos=off")
    assert tells(said, "data.seq_len", "24 there", "16 here", "data.bos", "data.eos")
    said = problem("precision.dtype=float32", "data.template_date=2026-01-02")
    assert tells(said, "precision.dtype", "float64 there", "float32 here")
    assert tells(said, "data.template_date", "none there", "2026-01-02 here")
    packed = "model.lora={r: 3, target: [q_proj], load_in_4bit: true}"
    assert tells(problem(packed), "model.lora.load_in_4bit", "nf4")
    with (tmp_path / "model" / "config.json").open("a") as file:
        file.write(" ")
    assert "the reference model" in problem()
    path.write_text("x")
    assert "is not a file that tdp reference has written" in problem()
    code, said = tdp([*command, "train.dpo.loss=simpo"])
    assert code == 2 and "give -o FILE" in said and "loss=simpo" in said
