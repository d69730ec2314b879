"""`train.distill`: a student beside its teacher on every layout is the formula in one process."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.data.texts import save_tokenizer
from tests.train import parity
from tests.train.test_transformers import MODELS, asked
from tests.train.transformers_ranks import (
    RUN,
    Answer,
    of_transformers,
    save_model,
    steps_of,
    trainer,
)
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.derive import even_share
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.registry import spec_of
from torchdistpackage.parallel.tensor.divergence import vocab_parallel_divergence
from torchdistpackage.plan.run_plan import make_plan, stage_loads
from torchdistpackage.plan.teacher import other_tokenizer

FULL = (pytest.mark.full,)
TEACHER = {**MODELS["qwen3"], "hidden_size": 24, "num_hidden_layers": 4, "intermediate_size": 20}
KINDS = {
    "jsd": {"beta": 0.3, "temperature": 1.7, "kd_ratio": 0.6},
    "forward": {"beta": 0.0, "temperature": 2.0, "kd_ratio": 0.5},
    "reverse": {"beta": 1.0, "temperature": 0.8, "kd_ratio": 1.0},
}
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


def of_formula(folder: str, teacher: str, options: dict[str, float]) -> Answer:
    from transformers import AutoModelForCausalLM

    frozen = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()

    def loss(model, ids, targets):
        with torch.no_grad():
            teacher_logits = frozen(input_ids=ids, use_cache=False).logits
        logits, counts = model(input_ids=ids, use_cache=False).logits, targets >= 0
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
            made[kind] = ranks(1).run(of_formula, *models, KINDS[kind])[0]
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
    for step, expected in enumerate(truth.gradients):
        parity.expect_close([mine.gradients[step] for mine, _ in results], [expected])
    parity.expect_close([mine.weights for mine, _ in results], [truth.weights])
    for mine, _ in results:
        assert mine.losses == pytest.approx(truth.losses, rel=1e-9)


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
