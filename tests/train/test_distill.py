"""`train.distill`: a student beside its teacher on every layout is the formula in one process."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.data.texts import save_lines, save_tokenizer
from tests.train import parity
from tests.train.test_transformers import MODELS, asked
from tests.train.transformers_ranks import (
    RUN,
    Answer,
    everywhere_float64,
    expect_answers,
    of_transformers,
    save_model,
    steps_of,
    trainer,
)
from torchdistpackage.cli._plan_summary import summary
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.derive import even_share
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.registry import spec_of
from torchdistpackage.parallel.tensor.divergence import (
    vocab_parallel_divergence,
    vocab_parallel_top_k,
    vocab_parallel_top_k_divergence,
)
from torchdistpackage.plan.logits_file import logits_identity, size_of, wrong_logits
from torchdistpackage.plan.run_plan import make_plan, stage_loads
from torchdistpackage.plan.teacher import other_tokenizer, teacher_config
from torchdistpackage.train.build import build_data, build_model
from torchdistpackage.train.logits_file import write_logits

FULL = (pytest.mark.full,)
TEACHER = {**MODELS["qwen3"], "hidden_size": 24, "num_hidden_layers": 4, "intermediate_size": 20}
KINDS = {
    "jsd": {"beta": 0.3, "temperature": 1.7, "kd_ratio": 0.6},
    "forward": {"beta": 0.0, "temperature": 2.0, "kd_ratio": 0.5},
    "reverse": {"beta": 1.0, "temperature": 0.8, "kd_ratio": 1.0},
}
TOP_K = {f"top{k}": {**KINDS["forward"], "top_k": k} for k in (5, 65)}
"""Of a file; the last has the whole vocabulary."""
LAYOUTS = {
    "one": {},
    "data2": {"data": 2},
    "data2-zero2": {"data": 2, "zero": 2},
    "data2-zero3": {"data": 2, "zero": 3},
    "tensor2": {"tensor": 2},
    "tensor2-sequence": {"tensor": 2, "sequence": 1},
    "pipe2": {"pipe": 2},
    "context2": {"context": 2},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
    "pipe2xcontext2-zero3": {"pipe": 2, "context": 2, "zero": 3},
}
_LAST = "parallel.order=[data, pipe, context, tensor]"
OWN = {
    "data2-tensor2": ({"data": 2}, {"tensor": 2}, []),
    "data2xpipe2-zero3-tensor2": ({"data": 2, "pipe": 2, "zero": 3}, {"tensor": 2}, []),
    "data2xtensor2-tensor4": ({"data": 2, "tensor": 2}, {"tensor": 4}, []),
    "data2xtensor2-sequence-tensor4": (
        {"data": 2, "tensor": 2, "sequence": 1},
        {"tensor": 4},
        [],
    ),
    "data4-zero2-tensor2": ({"data": 4, "zero": 2}, {"tensor": 2}, []),
    "data2xpipe2xtensor2-tensor4": (
        {"data": 2, "pipe": 2, "tensor": 2},
        {"tensor": 4},
        [_LAST],
    ),
    "data2-pipe2": ({"data": 2}, {"pipe": 2}, []),
    "data4-pipe2-tensor2": ({"data": 4}, {"pipe": 2, "tensor": 2}, []),
    "data4-zero3-pipe4": ({"data": 4, "zero": 3}, {"pipe": 4}, []),
    "tensor2-pipe2": ({"data": 2, "tensor": 2}, {"pipe": 2}, []),
    "pipe2-pipe1": ({"pipe": 2}, {"pipe": 1}, []),
    "data2xpipe2-pipe4": ({"data": 2, "pipe": 2}, {"pipe": 4}, []),
    "data2xpipe2-pipe1-tensor2": ({"data": 2, "pipe": 2}, {"pipe": 1, "tensor": 2}, []),
    "data2-zero3": ({"data": 2}, {"zero": 3}, []),
    "data2xpipe2-zero3": ({"data": 2, "pipe": 2}, {"zero": 3}, []),
    "context2xtensor2-zero3": ({"context": 2, "tensor": 2}, {"zero": 3}, []),
    "data4-zero3-pipe2-zero3": ({"data": 4, "zero": 3}, {"pipe": 2, "zero": 3}, []),
    "data4-tensor2-zero3": ({"data": 4}, {"tensor": 2, "zero": 3}, []),
}
"""Degrees of the model, the teacher's own, and other keys."""


def divergence(logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float) -> Tensor:
    """The loss of each token (...), as trl's `generalized_jsd_loss` has it."""
    p, q = (x.div(temperature).log_softmax(-1) for x in (logits, teacher_logits))
    if beta in (0, 1):
        mean, given = (p, q) if beta == 0 else (q, p)
        return F.kl_div(mean, given, reduction="none", log_target=True).sum(-1)
    mean = ((1 - beta) * p.exp() + beta * q.exp()).log()
    kl_q, kl_p = (F.kl_div(mean, x, reduction="none", log_target=True).sum(-1) for x in (q, p))
    return beta * kl_q + (1 - beta) * kl_p


def own_columns(beta: float, dtype: str = "float64", rows: int = 0):
    """(loss, gradient) of this rank's columns of an odd vocabulary, beside the formula of all.

    rows: as many more tokens of zeros, so that the rows do not fit in one block.
    """
    tpc.setup_process_groups([("tensor", tpc_size())])
    group, vocab = tpc.get_group("tensor"), 13
    draw = torch.Generator().manual_seed(3)
    x, y = (4 * torch.randn(5, 2, vocab, generator=draw, dtype=torch.float64) for _ in "xy")
    x, y = (F.pad(t, (0, 0, 0, 0, 0, rows)).to(getattr(torch, dtype)) for t in (x, y))
    first, number = even_share(vocab, group.size(), group.rank())
    mine = x[..., first : first + number].clone().requires_grad_()
    found = vocab_parallel_divergence(
        mine, y[..., first : first + number], group, beta=beta, temperature=1.7
    )
    x = x.double().requires_grad_()
    expected = divergence(x, y.double(), beta, 1.7)
    weights = torch.linspace(1, 2, expected.numel()).view(expected.shape).double()
    (found.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None and mine.grad is not None
    return found, expected, mine.grad, x.grad[..., first : first + number]


def tpc_size() -> int:
    return torch.distributed.get_world_size()


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=FULL)])
def test_each_rank_has_the_divergence_of_all_columns(ranks, size):
    for beta in (0.0, 0.3, 1.0):
        for found, expected, grad, expected_grad in ranks(size).run(own_columns, beta):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("beta", [0.0, 0.3, pytest.param(1.0, marks=FULL)])
def test_divergences_are_those_of_trl(beta, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", reason="trl is no dependency: its loss is the peer")
    from trl.experimental.gkd import GKDTrainer

    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(2, 5, 13, generator=draw, dtype=torch.float64) for _ in "xy")
    labels = torch.randint(13, (2, 5), generator=draw)
    labels[0, 1:3] = -100
    truth = GKDTrainer.generalized_jsd_loss(x, y, labels, beta=beta, temperature=1.7)
    found = vocab_parallel_divergence(x, y, None, beta=beta, temperature=1.7)
    counts = labels != -100
    torch.testing.assert_close((found * counts).sum() / counts.sum(), truth, rtol=1e-12, atol=0)


def distilled(overrides: list[str]) -> tuple[Answer, float | None]:
    run = trainer(overrides)
    return steps_of(run, range(1, 4)), run.evaluate()


def top_k_divergence(x: Tensor, y: Tensor, k: int, temperature: float) -> Tensor:
    """The forward divergence of each token (...) from the teacher's k most likely tokens alone."""
    values, ids = y.topk(k)
    q = values.div(temperature).log_softmax(-1)
    p = x.div(temperature).log_softmax(-1).gather(-1, ids)
    return (q.exp() * (q - p)).sum(-1)


def of_formula(folder: str, teacher: str, options: dict[str, float]) -> Answer:
    from transformers import AutoModelForCausalLM

    frozen = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()

    def loss(model, ids, targets):
        with torch.no_grad():
            teacher_logits = frozen(input_ids=ids, use_cache=False).logits
        logits, counts = model(input_ids=ids, use_cache=False).logits, targets >= 0
        if (k := options.get("top_k")) is not None:
            soft = top_k_divergence(logits, teacher_logits, int(k), options["temperature"])
        else:
            soft = divergence(logits, teacher_logits, options["beta"], options["temperature"])
        hard = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        ratio = options["kd_ratio"]
        return ratio * soft[counts].mean() + (1 - ratio) * hard

    return of_transformers(folder, loss)


@pytest.fixture(scope="session")
def models(ranks, tmp_path_factory):
    """(student, teacher), the folders of a llama and of a wider and deeper qwen3."""
    folder = tmp_path_factory.mktemp("distill")
    student = ranks(1).run(save_model, MODELS["llama"], str(folder / "student"))[0]
    return student, ranks(1).run(save_model, TEACHER, str(folder / "teacher"))[0]


@pytest.fixture(scope="session")
def truths(ranks, models):
    made: dict[str, Answer] = {}

    def of(kind: str) -> Answer:
        if kind not in made:
            options = {**KINDS, **TOP_K}[kind]
            made[kind] = ranks(1).run(of_formula, *models, options)[0]
        return made[kind]

    return of


def keys(models: tuple[str, str], options: dict[str, float]) -> list[str]:
    section = {"teacher": models[1], **options}
    return [f"model.hf={models[0]}", f"train.distill={json.dumps(section)}"]


SMALL_SET = {("jsd", "pipe2xtensor2"), ("forward", "data2-zero3")}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in SMALL_SET else FULL)
        for kind in KINDS
        for layout in LAYOUTS
    ],
)
def test_three_steps_are_those_of_the_formula(ranks, models, truths, kind, layout):
    truth = truths(kind)
    size, changes = asked(LAYOUTS[layout])
    results = ranks(size).run(distilled, [*keys(models, KINDS[kind]), *changes])
    expect_answers([mine for mine, _ in results], truth)


SMALL_OWN = {("jsd", "data2-pipe2"), ("jsd", "data4-tensor2-zero3")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in SMALL_OWN else FULL)
        for kind in KINDS
        for layout in OWN
    ],
)
def test_a_teacher_has_a_layout_of_its_own(ranks, models, truths, kind, layout):
    """65 ids, of which neither 2 nor 4 ranks have equal numbers."""
    truth, (degrees, own, more) = truths(kind), OWN[layout]
    size, changes = asked(degrees)
    changes += [*more, *(f"train.distill.teacher_{name}={n}" for name, n in own.items())]
    results = ranks(size).run(distilled, [*keys(models, KINDS[kind]), *changes])
    expect_answers([mine for mine, _ in results], truth)


def write(overrides: list[str], path: str, k: int) -> dict[str, int]:
    """What a rank of `tdp reference` does."""
    config = parity.config([*RUN, *overrides])
    plan = make_plan(teacher_config(config), torch.distributed.get_world_size())
    model = build_model(plan, torch.distributed.get_rank(), torch.device("cpu"))
    with everywhere_float64():
        header, size = logits_identity(config), size_of(config, k)
        data, batch = build_data(plan), config.data.global_batch
        return write_logits(
            model, data, Path(path), header, size, None, seed=config.run.seed, global_batch=batch
        )


SMALL_TOP_K = {("top65", "pipe2xtensor2"), ("top5", "data2-zero3")}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in SMALL_TOP_K else FULL)
        for kind in TOP_K
        for layout in LAYOUTS
    ],
)
def test_a_file_takes_the_place_of_the_teacher(ranks, models, truths, tmp_path, kind, layout):
    options = dict(TOP_K[kind])
    k, path = options.pop("top_k"), tmp_path / "t.safetensors"
    truth, (size, changes) = truths(kind), asked(LAYOUTS[layout])
    given = [*keys(models, options), *changes]
    assert ranks(size).run(write, given, str(path), k)[0] == {"train": 40}
    alone = tmp_path / "alone.safetensors"
    ranks(1).run(write, keys(models, options), str(alone), k)
    files = load_file(path), load_file(alone)
    torch.testing.assert_close(files[0]["log_probs"], files[1]["log_probs"], rtol=1e-9, atol=1e-10)
    assert files[0]["ids"].shape == (40, 12, k) and torch.equal(files[0]["ids"], files[1]["ids"])
    section = json.dumps({"logits": str(path), **options})
    given = [f"model.hf={models[0]}", f"train.distill={section}", *changes]
    assert make_plan(parity.config([*RUN, *given]), size).teacher is None
    results = ranks(size).run(distilled, given)
    expect_answers([mine for mine, _ in results], truth)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["one", "data2-zero3"])
def test_a_file_serves_rounds_of_other_sizes(ranks, models, tmp_path, layout):
    """The whole vocabulary is the teacher itself, to the last steps and a validation."""
    size, changes = asked(LAYOUTS[layout])
    given = [*keys(models, KINDS["forward"]), *changes]
    path = tmp_path / "t.safetensors"
    ranks(1).run(write, keys(models, KINDS["forward"]), str(path), 65)
    more = [*given, "train.accumulate=2", "pipeline.microbatches=1"]
    truth = ranks(size).run(distilled, more)
    section = json.dumps({"logits": str(path), "teacher": models[1], **KINDS["forward"]})
    found = ranks(size).run(distilled, [*more, f"train.distill={section}"])
    for (mine, val), (other, other_val) in zip(found, truth, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=1e-12)
        assert val == pytest.approx(other_val, rel=1e-12)
    parity.expect_close([x.weights for x, _ in found], [x.weights for x, _ in truth])


def top_k_of_own_columns(k: int):
    """(divergence, gradient) of this rank's columns from a teacher's k tokens, and the formula."""
    tpc.setup_process_groups([("tensor", tpc_size())])
    group, vocab = tpc.get_group("tensor"), 13
    draw = torch.Generator().manual_seed(3)
    x, y = (4 * torch.randn(5, 2, vocab, generator=draw, dtype=torch.float64) for _ in "xy")
    first, number = even_share(vocab, group.size(), group.rank())
    own = slice(first, first + number)
    log_probs, ids = vocab_parallel_top_k(y[..., own], group, k, vocab)
    torch.testing.assert_close(log_probs, y.log_softmax(-1).topk(k)[0], rtol=1e-12, atol=1e-13)
    mine = x[..., own].clone().requires_grad_()
    found = vocab_parallel_top_k_divergence(
        mine, log_probs, ids.int(), group, vocab=vocab, temperature=1.7
    )
    x.requires_grad_()
    expected = top_k_divergence(x, y, k, 1.7)
    weights = torch.linspace(1, 2, expected.numel()).view(expected.shape).double()
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None and mine.grad is not None
    return found.detach(), expected.detach(), mine.grad, x.grad[..., own]


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=FULL)])
def test_each_rank_has_the_divergence_from_the_likeliest_tokens(ranks, size):
    for k in (1, 6, 13):
        for found, expected, grad, expected_grad in ranks(size).run(top_k_of_own_columns, k):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-13)


def test_the_command_writes_a_file_that_other_runs_are_refused(tdp, ranks, tmp_path):
    for name, given in {"student": MODELS["llama"], "teacher": TEACHER}.items():
        ranks(1).run(save_model, {**given, "vocab_size": 300}, str(tmp_path / name))
    texts = save_lines(tmp_path / "texts.jsonl", [{"text": f"{i} and {i + 1}"} for i in range(40)])
    tokenizer, path = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "t.safetensors"
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}\n")
    distill = {"teacher": str(tmp_path / "teacher")}
    keys = [
        *("data.name=jsonl", f"data.path={texts}", f"data.tokenizer={tokenizer}", "train.epochs=1"),
        *("data.seq_len=16", "data.global_batch=4", "pipeline.microbatches=1"),
        *(
            f"data.cache={tmp_path}/cache",
            f"model.hf={tmp_path / 'student'}",
            "data.val_fraction=0.3",
        ),
    ]
    command = ["reference", str(tmp_path / "run.yaml"), *keys, "parallel.tensor=2"]
    command.append(f"train.distill={json.dumps(distill)}")
    code, said = tdp([*command, "-o", str(path), "--top-k", "7"])
    assert code == 0 and "train.distill.logits=" in said, said
    stated = re.search(r"takes ([\d.]+e?-?\d*) GB: (\d+) samples of 16 tokens, 7 of each", said)
    assert stated is not None, said
    tensors = load_file(path)
    assert tensors["ids"].shape == tensors["log_probs"].shape == (int(stated[2]), 16, 7)
    assert int(stated[2]) * 16 * 7 * 8 == pytest.approx(1e9 * float(stated[1]), rel=1e-2)

    def problem(*more: str) -> str:
        section = f"train.distill={json.dumps({**distill, 'logits': str(path)})}"
        given = [*keys, section, *more]
        found = wrong_logits(parity.config(given))
        return " ".join(f"{x.path} {x.text}" for x in found)

    assert not problem() and not problem("train.accumulate=4", "optim.lr=0.5")
    other = save_lines(tmp_path / "other.jsonl", [{"text": f"{i} and"} for i in range(40)])
    said = problem(f"data.path={other}", "data.seq_len=8", "run.seed=5", "data.global_batch=8")
    assert said.startswith("train.distill.logits ") and "the contents of data.path (" in said
    assert all(f"{x} there" in said for x in ("data.seq_len (16", "data.global_batch (4"))
    assert "run.seed" in said and "teacher" not in said.partition("another run: ")[2]
    changed = save_tokenizer(tmp_path / "other_tokenizer", bos=True)
    assert "data.tokenizer (" in problem(f"data.tokenizer={changed}")
    assert "train.steps=400 takes 1,600" in problem("train.epochs=null")
    with (tmp_path / "teacher" / "config.json").open("a") as file:
        file.write(" ")
    assert "train.distill.teacher (" in problem()
    path.write_text("x")
    assert "is not a file that tdp reference has written" in problem()
    code, said = tdp([*command, "--top-k", "301", "train.distill.beta=0.5"])
    assert code == 2 and "give -o FILE" in said and "--top-k 301" in said and "beta=0.5" in said


@pytest.mark.full
def test_a_validation_measures_the_data_alone(ranks, models):
    """No step was made, so with a teacher it is what it is without."""
    ((_, val),) = ranks(1).run(distilled, [*keys(models, KINDS["jsd"]), "optim.lr=1e-30"])
    ((_, expected),) = ranks(1).run(distilled, [f"model.hf={models[0]}", "optim.lr=1e-30"])
    assert val == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tensor2", "pipe2xtensor2", "data2-zero3"])
def test_our_gpt_learns_alike_from_a_folder_on_every_layout(ranks, models, layout):
    student = ["model.layers=4", "model.dim=16", "model.heads=2", "model.vocab=65"]
    given = [*student, keys(models, KINDS["jsd"])[1]]
    ((truth, _),) = ranks(1).run(distilled, given)
    size, changes = asked(LAYOUTS[layout])
    results = ranks(size).run(distilled, [*given, *changes])
    parity.expect_close([mine.weights for mine, _ in results], [truth.weights])
    assert results[0][0].losses == pytest.approx(truth.losses, rel=1e-9)


def test_a_plan_counts_the_weights_of_the_teacher(models):
    given = [*RUN, f"model.hf={models[0]}", "parallel.tensor=2"]
    plain = make_plan(parity.config(given), 2)
    plan = make_plan(parity.config([*given, keys(models, KINDS["jsd"])[1]]), 2)
    (before,), (load,) = stage_loads(plain), stage_loads(plan)
    assert plan.teacher is not None
    teacher = stage_loads(plan.teacher)[0].num_parameters
    assert load.memory.weights_bytes - before.memory.weights_bytes == 8 * teacher


def test_a_shared_teacher_takes_less_memory(models):
    given = [*RUN, *keys(models, KINDS["jsd"])]
    own = ([], *([f"train.distill.teacher_{x}"] for x in ("tensor=2", "pipe=2", "zero=3")))
    plans = [make_plan(parity.config([*given, "parallel.data=2", *more]), 2) for more in own]
    whole, shared, staged, sharded = (stage_loads(x)[0].memory.weights_bytes for x in plans)
    assert whole > staged > 0 and (0, 1) in {x.ranks for x in plans[2].creations(1)}
    assert plans[1].teacher is not None and plans[1].teacher.topology.dense.axis_size("tensor") == 2
    numbers = [stage_loads(x.teacher)[0].num_parameters for x in plans if x.teacher is not None]
    assert whole - shared == 8 * (numbers[0] - numbers[1]) > 0
    assert whole - sharded == 8 * numbers[0] // 2
    shown = summary(plans[2], None, [], [])
    assert re.search(rf"^teacher +{numbers[0]:,} parameters .*data=1 x pipe=2", shown, re.M), shown
    assert (0, 1) in {x.ranks for x in plans[1].creations(0)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["parallel.data=2", "train.distill.teacher_tensor=3"],
            ["=3", "parallel.data=2", "1 or 2"],
        ),
        (
            ["parallel.tensor=2", "train.distill.teacher_tensor=3"],
            ["=3", "parallel.tensor=2", "2 or 4"],
        ),
        (
            ["parallel.context=2", "train.distill.teacher_tensor=2"],
            ["parallel.context=2", "reference"],
        ),
        (["train.distill.logits=x", "train.distill.teacher_tensor=2"], ["train.distill.logits"]),
        (
            ["parallel.data=2", "train.distill.teacher_pipe=3"],
            ["teacher_pipe=3", "parallel.data=2", "a divisor of 2"],
        ),
        (
            ["parallel.context=2", "train.distill.teacher_pipe=2"],
            ["parallel.context=2", "reference"],
        ),
        (
            ["parallel.pipe=2", "train.distill.teacher_pipe=1", "pipeline.microbatches=8"],
            ["global_batch"],
        ),
        (["train.distill.logits=x", "train.distill.teacher_zero=3"], ["train.distill.logits"]),
    ],
)
def test_degrees_of_a_teacher_that_ranks_cannot_have_are_refused(models, changes, words):
    given = [*RUN, *keys(models, KINDS["forward"]), *changes]
    with pytest.raises(ConfigError, match=r"train\.distill") as error:
        config = parity.config(given)
        make_plan(config, 2)
    assert all(x in str(error.value) for x in words), error.value


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 67}, "has a vocabulary of 67 ids, but the model has 65"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "parallel.tensor=2"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_by_name(ranks, models, tmp_path, changes, words):
    folder = ranks(1).run(save_model, {**TEACHER, **changes}, str(tmp_path))[0]
    given = [*RUN, f"model.hf={models[0]}", "parallel.tensor=2"]
    with pytest.raises(ConfigError, match=r"train\.distill\.teacher") as error:
        make_plan(parity.config([*given, f"train.distill.teacher={folder}"]), 2)
    assert words in str(error.value) and folder in str(error.value)


def test_a_loss_of_routers_is_not_left_out(models, tmp_path):
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    settings = {"model_type": "mixtral", "output_router_logits": True, "vocab_size": 65}
    student = tmp_path / "config.json"
    student.write_text(json.dumps({**settings, **sizes, **heads, "num_hidden_layers": 2}))
    given = [f"model.hf={student}", f"train.distill.teacher={models[1]}"]
    model = spec_of(parity.config([*RUN, *given]))
    for ratio, is_refused in ((1, True), (0.5, False)):
        config = parity.config([*RUN, *given, f"train.distill.kd_ratio={ratio}"])
        problems = dict(model.refusals(ModelUse.of(config)))
        assert ("output_router_logits" in problems.get("train.distill.kd_ratio", "")) == is_refused


def test_a_teacher_with_another_tokenizer_is_refused_by_name(models, tmp_path):
    own = save_tokenizer(tmp_path / "own")
    teacher = save_tokenizer(tmp_path / "teacher", bos=True)
    same = save_tokenizer(tmp_path / "same")
    changed = json.loads((same / "tokenizer.json").read_text())
    (same / "tokenizer.json").write_text(json.dumps(changed))  # other bytes
    given = ["data.name=text", "data.path=x", f"data.tokenizer={own}", "model.vocab=300"]

    def problems(folder) -> list[str]:
        config = parity.config([*given, f"train.distill.teacher={folder}"])
        return [f"{x.path}: {x.text}" for x in other_tokenizer(config)]

    assert problems(same) == [] and problems(tmp_path) == []
    (text,) = problems(teacher)
    assert (
        text.startswith("train.distill.teacher: ") and str(own) in text and "'!': 3 and 2" in text
    )
