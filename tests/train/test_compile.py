"""`train.compile`: the numbers of eager steps on every layout, said, kept, and refused by name."""

import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from tests.parallel.tensor.compiled_cases import use_own_cache
from tests.train import parity
from tests.train.test_transformers import MODELS
from torchdistpackage.config.load import load
from torchdistpackage.errors import ConfigError
from torchdistpackage.models.gpt import GPTBlock
from torchdistpackage.parallel.auto.draws import mark_alike, mark_split
from torchdistpackage.parallel.tensor.linear import ParallelMlp
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.compiled import compile_blocks, use_cache, warm_up
from torchdistpackage.train.staged_model import TrainStages

COMMON = [
    *("data.seq_len=16", "train.steps=2", "data.global_batch=4", "pipeline.microbatches=2"),
    *("optim.warmup_steps=1", "precision.dtype=float64", "train.eval_batches=1"),
]
RUN = ["model.layers=2", "model.dim=16", "model.heads=2", *COMMON]
LAYOUTS = {
    "tensor": ["parallel.tensor=2", "parallel.sequence_parallel=true", "train.recompute=blocks"],
    "dropout": ["parallel.tensor=2", "model.dropout=0.1"],
    "data": ["parallel.data=2", "train.recompute=offload"],
    "zero1": ["parallel.data=2", "parallel.zero=1"],
    "zero3": ["parallel.data=2", "parallel.zero=3"],
    "pipe": ["parallel.pipe=2"],
}
SMALL = ("zero3",)
FULL = [pytest.mark.full]
COMPILED = ["train.compile=blocks", "train.compile_backend=aot_eager"]
RANKS_IMPORT = ("torch._functorch.aot_autograd", "torch._inductor.compile_fx")


def trained(extra: list[str], base: list[str] = RUN) -> tuple[list[float], parity.Held, str]:
    """(losses of two steps, parameters, what warming up says)."""
    torch._dynamo.reset()
    use_own_cache()
    run = parity.trainer([*base, *extra])
    said = warm_up(run, 1) if run.stage.compiled else ""
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    held = parity.held(run, "data")
    run.close()
    return losses, held, said


AXES = {
    "data": ["parallel.data=2"],
    "tensor": ["parallel.tensor=2"],
    "pipe": ["parallel.pipe=2"],
}
FOUND = {"model_type": "llama", **dict.fromkeys(("vocab_size", "max_position_embeddings"), 64)}
FOUND |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
FOUND |= {"num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 64, "n_embd": 16, "n_layer": 2}
GPT2 |= {"n_head": 4, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}


class OwnBlock(nn.Module):
    """One with a layer that tensor ranks share."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), ParallelMlp(width, 2 * width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def own_chain(width: int) -> nn.Module:
    ends = nn.Linear(4, width), nn.Linear(width, 1)
    return nn.Sequential(ends[0], OwnBlock(width), OwnBlock(width), ends[1])


def settings_of(kind: str, folder: Path) -> list[str]:
    if kind == "own":
        named = "model.target=tests.train.test_compile:own_chain", "model.args={width: 8}"
        data = (
            "model.loss=tests.train.sources:squared_error",
            "data.target=tests.train.sources:Line",
        )
        return ["model.name=null", *named, *data]
    (folder / "config.json").write_text(json.dumps(FOUND if kind == "llama" else GPT2))
    data = "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 64}"
    return [f"model.hf={folder}/config.json", *data]


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
@pytest.mark.parametrize(
    ("kind", "axis", "backend"),
    [
        pytest.param(
            *(kind, axis, backend),
            marks=[] if (kind, axis, backend) == ("own", "tensor", "aot_eager") else FULL,
        )
        for kind in ("own", "llama", "gpt2")
        for axis in AXES
        # Llama's norms round to float32, which inductor does elsewhere
        for backend in ("aot_eager", *(() if kind == "llama" else ("inductor",)))
    ],
)
def test_other_models_train_to_the_same_numbers(ranks, tmp_path, kind, axis, backend):
    """A chain of one's own, Llama and GPT-2 of transformers: losses and weights of two steps."""
    extra = [*settings_of(kind, tmp_path), *AXES[axis]]
    how = ["train.compile=blocks", f"train.compile_backend={backend}"]
    plain = ranks(2).run(trained, extra, COMMON)
    again = ranks(2).run(trained, [*extra, *how], COMMON, timeout_s=400)
    for (losses, held, said), (want_losses, want, nothing) in zip(again, plain, strict=True):
        assert losses == pytest.approx(want_losses, abs=1e-12, rel=0) and not nothing
        for (name, _, _, x), (same, _, _, y) in zip(held, want, strict=True):
            assert name == same
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
        num = 2 if axis == "pipe" else 4  # of both ranks, each of which has one graph
        assert f"compiled {num} blocks in 2 graphs" in said


class Drawing(nn.Module):
    """With the marks that layers which ranks share have."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)
        mark_split(self.inner)
        mark_alike(self.drop)
        mark_split(self.drop)

    def forward(self, x):
        return self.drop(self.inner(x))


def test_blocks_that_draw_share_a_graph():
    """Torch counts hooks over all modules, and a compiler asks for the numbers of some."""
    blocks = [Drawing() for _ in range(3)]
    torch._dynamo.reset()
    counters.clear()
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
        with torch.no_grad():  # else dynamo warns of the gradient that an activation has not
            block(torch.ones(2, 4))
    assert counters["stats"]["unique_graphs"] == 1
    called = [part._forward_hooks_always_called for part in (blocks[0].inner, blocks[0].drop)]
    assert [list(ids) for ids in called] == [[-1], [-1, -2]]  # also where a forward raises


def said_of(extra: list[str]) -> str:
    torch._dynamo.reset()
    run = parity.trainer([*COMMON, *extra, *COMPILED])
    said = warm_up(run, 1)
    run.close()
    return said


SHARED = ("llama", "qwen3", "mistral", "gemma2", "falcon", "opt")
SPLIT = {
    "tensor": ["parallel.tensor=2"],
    "sequence": ["parallel.tensor=2", "parallel.sequence_parallel=true"],
    "zero3": ["parallel.data=2", "parallel.zero=3"],
}


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("family", SHARED)
def test_the_blocks_of_every_family_share_one_graph(ranks, tmp_path, family, split):
    config = {**MODELS[family], "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 16, vocab: 64}"
    keys = [f"model.hf={tmp_path}/config.json", *data, *SPLIT[split]]
    said = ranks(2).run(said_of, keys, timeout_s=300)
    assert all("compiled 6 blocks in 2 graphs" in text for text in said), said


@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in SMALL else [pytest.mark.full]) for x in LAYOUTS]
)
def test_compiled_blocks_train_to_the_numbers_of_eager_ones(ranks, layout):
    extra = LAYOUTS[layout]
    plain = ranks(2).run(trained, extra)
    again = ranks(2).run(trained, [*extra, *COMPILED], timeout_s=400)
    for (losses, held, said), (want_losses, want, nothing) in zip(again, plain, strict=True):
        assert losses == pytest.approx(want_losses, abs=1e-12) and not nothing
        for (name, _, _, x), (same, _, _, y) in zip(held, want, strict=True):
            assert name == same
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
        num = 3 if layout == "pipe" else 4  # the cut goes through a block
        assert re.search(rf"compiled {num} blocks in \d+ graphs?, .* s before the first step", said)


class Reads(nn.Module):
    """Goes by a number, which no graph can."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


def chain(*blocks: nn.Module) -> TrainStages:
    return TrainStages({0: nn.Sequential(*blocks)})


def test_what_cannot_be_compiled_is_refused_by_name_or_left_as_it_is():
    x = torch.ones(2, 4)
    stages = chain(Reads())
    compile_blocks(stages, "eager")
    with pytest.raises(ConfigError, match=r"0\.0 \(Reads\) cannot be compiled .*[Dd]ata-dependent"):
        stages(0, x)
    stages = chain(Reads())
    expected = stages(0, x)
    (block,) = compile_blocks(stages, "eager", "auto")
    assert torch.equal(stages(0, x), expected)
    assert "ata-dependent" in block.refused


def test_a_block_that_is_tried_runs_as_it_is_and_only_says_why_not():
    x, runs = torch.ones(2, 4), []
    for inside in (Reads(), nn.Sequential(nn.Linear(4, 4))):
        stages = chain(inside)
        expected = stages(0, x)
        (block,) = compile_blocks(stages, lambda graph, _: runs.append(graph), "auto")
        block.is_tried = True
        assert torch.equal(stages(0, x), expected) and not runs
        assert ("ata-dependent" in block.refused) == isinstance(inside, Reads)


def trained_apart(extra: list[str]) -> list[str]:
    """Rank 1 has a block that no graph can hold."""
    own = GPTBlock.forward

    def forward(self, x, *args, **kwargs):
        return own(self, x, *args, **kwargs) if x.sum() != 0.5 else x

    GPTBlock.forward = forward if dist.get_rank() == 1 else own
    try:
        losses, _, _ = trained([x for x in extra if "compile" not in x])
        torch._dynamo.reset()
        run = parity.trainer([*RUN, *extra])
        said = [warm_up(run, 1), *(block.refused for block in run.stage.compiled)]
        assert losses == [run.train_step(step).wait().loss for step in (1, 2)]
        run.close()
    finally:
        GPTBlock.forward = own
    return said


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_ranks_leave_the_same_blocks_as_they_are(ranks):
    auto = ["parallel.tensor=2", "train.compile=auto", "train.compile_backend=eager"]
    first, second = ranks(2).run(trained_apart, auto, timeout_s=300)
    assert first[0] == second[0] and "compiled 0 blocks in 0 graphs" in first[0]
    assert re.search(r"4 blocks are as they were, such as 0.* \(GPTBlock\): ", first[0])
    assert all("rank 1 cannot compile it: Data-dependent" in why for why in first[1:])
    assert all("Data-dependent" in why for why in second[1:])


class Softplus(nn.Module):
    """Its backward takes a view of what torch traces with other strides than it gets."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 4)

    def forward(self, x):
        return nn.functional.softplus(self.inner(x)).transpose(1, 2).contiguous()


def test_a_gradient_through_a_softplus_comes_back():
    torch._dynamo.reset()
    stages, x = chain(Softplus()), torch.linspace(-1, 1, 30).view(2, 3, 5).requires_grad_()
    stages(0, x).sin().sum().backward()
    expected, x.grad = x.grad, None
    compile_blocks(stages, "aot_eager")
    stages(0, x).sin().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_hooks_inside_a_block_are_refused_by_name():
    stages = chain(nn.Sequential(nn.Linear(4, 4)))
    stages[str(0)][0][0].register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"1 of 1 blocks have .* hooks .* 0\.0 \(Linear\)"):
        compile_blocks(stages, "eager")
    (block,) = compile_blocks(stages, "eager", "auto")
    assert block.refused == "it has hooks inside: Linear"


def test_ever_other_lengths_are_refused_by_name():
    stages = chain(nn.Sequential(nn.Linear(4, 4)))
    compile_blocks(stages, "eager")
    with pytest.raises(ConfigError, match=r"0\.0 \(Sequential\) .* \[\(9, 4\)\].*data.seq_len"):
        for length in range(1, 12):
            stages(0, torch.ones(length, 4))


def test_a_split_backward_and_an_unknown_backend_are_refused_before_ranks_start():
    keys = ["parallel.data=1", "parallel.pipe=2", "pipeline.schedule=zb-h1"]
    config = load("configs/gpt_tiny.yaml", [*keys, "train.compile=auto", "launch.local.procs=2"])
    with pytest.raises(ConfigError, match=r"train.compile=auto with pipeline.schedule=zb-h1"):
        make_plan(config, 2)
    with pytest.raises(ConfigError, match=r"train.compile_backend.*inductor.*aot_eager.*eager"):
        load("configs/gpt_tiny.yaml", ["train.compile_backend=nvfuser"])


def test_graphs_of_a_run_on_several_nodes_stay_on_the_node(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    run, names = tmp_path / "runs" / "one", ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

    def places(**options: bool) -> list[str]:
        for name in names:
            monkeypatch.setenv(name, "")  # and so it is again what it was, after the test
            monkeypatch.delenv(name)
        use_cache(run, 3, **options)
        return [os.environ[name] for name in names]

    version = f"torch-{torch.__version__}"
    here = tmp_path / "runs" / ".compiled" / version / "rank3"
    assert places() == [str(here), str(here / "triton")]
    own = tmp_path / "node" / f"tdp-{os.getuid()}"
    assert places(several_nodes=True)[0] == str(own / "compiled" / version / "rank3")
    assert own.stat().st_mode & 0o077 == 0
    # graphs are code: none is loaded from where others can write
    own.chmod(0o777)
    other = places(several_nodes=True)[0]
    assert own not in Path(other).parents and other.startswith(str(tmp_path / "node" / "tdp-"))
    monkeypatch.setenv(names[0], str(tmp_path / "named"))
    use_cache(run, 3, several_nodes=True)
    assert os.environ[names[0]] == str(tmp_path / "named" / version / "rank3")


@pytest.mark.full
def test_a_run_goes_on_to_the_bit_with_the_same_setting(tdp, tmp_path):
    keys = [x for x in RUN if not x.startswith("train.steps")]
    keys += ["parallel.data=1", "parallel.pipe=1", "launch.local.procs=1", *COMPILED]
    keys += [f"run.dir={tmp_path}", "train.generate_tokens=0", "optim.schedule=constant"]
    losses: dict[str, list[float]] = {}
    for name, starts in (("once", (3,)), ("twice", (2, 3))):
        for steps in starts:
            more = [f"run.name={name}", f"train.steps={steps}", "log.every=1"]
            code, said = tdp(["train", "configs/gpt_tiny.yaml", *keys, *more])
            assert code == 0 and re.search(r"compiled 2 blocks in \d+ graphs?", said), said
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["loss"] for row in map(json.loads, rows) if "loss" in row]
    assert len(losses["once"]) == 3 and losses["once"] == losses["twice"]


@pytest.mark.full
def test_a_second_start_reads_what_the_first_compiled_and_ranks_end(tdp, tmp_path):
    keys = [x for x in RUN if not x.startswith(("precision", "train.steps"))]
    keys += ["parallel.data=1", "parallel.pipe=1", "parallel.tensor=2", "launch.local.procs=2"]
    keys += [f"run.dir={tmp_path}", "train.compile=blocks", "train.generate_tokens=0"]
    for start, steps in enumerate((2, 3)):
        code, said = tdp(["train", "configs/gpt_tiny.yaml", *keys, f"train.steps={steps}"])
        assert code == 0, said
        read = re.search(r"blocks in \d+ graphs?, (\d+) of them read from", said)
        assert read is not None and (int(read[1]) > 0) == (start == 1), said
    keys = [x for x in keys if not x.startswith("train.compile")]
    code, said = tdp(
        ["train", "configs/gpt_tiny.yaml", *keys, "train.steps=4", "train.compile=off"]
    )
    assert "train.compile=off (was blocks)" in said
