"""Recurrent layers of transformers whose states cross context ranks: steps in float64."""

from copy import deepcopy

import pytest
import torch

from tests.models import coverage
from tests.models.found_cases import FULL, STACKED
from tests.models.test_transformers_found_plans import plan_of
from tests.train.transformers_ranks import everywhere_float64
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.models.transformers_calls import arguments_of
from torchdistpackage.models.transformers_context import found_context
from torchdistpackage.models.transformers_small import (
    Sample,
    moved_away,
    sample_ids,
    small_models,
)
from torchdistpackage.parallel.context import recurrent
from torchdistpackage.parallel.context.hugging_face import attend_over, attending, inputs_of
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.sequence import gather_sequence
from torchdistpackage.plan.traffic import uncounted
from torchdistpackage.thread_ranks.run import run_ranks
from torchdistpackage.topology.mesh import topology

pytestmark = STACKED  # transformers 4 has its recurrences inside of forwards
LENGTH, STEPS = 48, 3
SCANNED = {
    "mamba2": "Mamba2Mixer",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "minimax": "MiniMaxLightningAttention",
    "mamba": "MambaMixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "bamba": "BambaMixer",
    "zamba": "ZambaMambaMixer",
    "zamba2": "Zamba2MambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "bailing_hybrid": "BailingHybridDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
}
MORE = {"lfm2": {"layer_types": ["conv", "full_attention"]}}  # its defaults have no convolution


def settings(family):
    return coverage.settings(family, **MORE.get(family, {}))


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("mamba2", 4),
        ("qwen3_next", 2),
        *(
            pytest.param(family, size, marks=FULL)
            for family in SCANNED
            for size in (2, 4, 8)
            if (family, size) not in (("mamba2", 4), ("qwen3_next", 2))
        ),
    ],
)
def test_three_steps_are_those_of_one_process(family, size):
    way = found_context(settings(family))
    assert (way.scanned, way.gathered, way.problem) == ((SCANNED[family],), (), "")
    difference = largest_difference(settings(family), way, size)
    assert difference < 1e-9


def test_a_state_that_stays_on_its_rank_is_seen(monkeypatch):
    """The trial then gathers the layer."""
    before = recurrent.states_before
    monkeypatch.setattr(recurrent, "states_before", lambda *args: before(*args) * 0)
    found_context.__globals__["_found"].cache_clear()
    way = found_context(settings("mamba2"))
    found_context.__globals__["_found"].cache_clear()
    assert (way.scanned, way.gathered) == ((), ("Mamba2Mixer",))


def test_a_plan_says_whose_states_cross(tmp_path):
    plan = plan_of(tmp_path, "mamba2", "parallel.context=2")
    assert plan.model is not None
    assert "states of Mamba2Mixer cross the ranks" in dict(plan.model.goes_with())["context"]
    assert uncounted(plan) == "not counted for Mamba2Mixer over parts of a sequence"


def largest_difference(given, way, size):
    """Of losses, gradients and weights, relative to the largest number of a tensor."""
    small = next(iter(small_models(given)))
    model = moved_away(small).double().train()
    for module in model.modules():
        if hasattr(module, "config"):  # torch has no grouped matmuls in float64
            module.config._experts_implementation = "eager"
        if hasattr(module, "decay_factors"):  # tables that were rounded to float32
            tables = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = tables
    sample = Sample(sample_ids(small.config, LENGTH))
    twins = [deepcopy(model) for _ in range(size)]
    targets = sample.ids.roll(-1, 1)

    def steps(module, forward, reduce):
        adam, answers = torch.optim.AdamW(module.parameters(), lr=0.01), []
        for _ in range(STEPS):
            adam.zero_grad()
            loss = torch.nn.functional.cross_entropy(forward().flatten(0, 1), targets.flatten())
            loss.backward()
            named = [(n, p) for n, p in module.named_parameters() if p.grad is not None]
            for _, parameter in named:
                parameter.grad = reduce(parameter.grad)
            answers.append({"loss": loss.detach()} | {n: p.grad.clone() for n, p in named})
            adam.step()
        return [*answers, {n: p.detach() for n, p in module.named_parameters()}]

    def on_rank(rank):
        group = tpc.get_group("context")
        sequence, twin = ContextSequence(group, "all_gather"), twins[rank]
        attend_over(twin, sequence, way.attends, way.gathered, way.swaps, way.scanned)
        ids = sequence.part(sample.ids)
        mask, positions = inputs_of(sequence, way.attends, ids.shape[1], len(ids), None, ids.device)
        options = {"position_ids": positions} if way.positions else {}
        options = arguments_of(twin, options | {"use_cache": False})
        options |= {} if mask is None else {"attention_mask": mask}

        def forward():
            with attending(sequence, None):
                logits = twin(input_ids=ids, return_dict=True, **options).logits
            return gather_sequence(logits, 1, seq_len=LENGTH, group=group)

        return steps(twin, forward, lambda x: primitives.all_reduce(x.clone(), group))

    with everywhere_float64():
        truth = steps(model, lambda: sample.outputs(model), lambda x: x)
        layout = topology([("context", size)], size)
        run = run_ranks(on_rank, layout, limit_s=300, queued=False)
    assert run.finding is None, run.finding
    worst = 0.0
    for answers in run.results:
        for answer, expected in zip(answers, truth, strict=True):
            assert answer.keys() == expected.keys()
            for name, x in expected.items():
                scale = float(x.abs().max().clamp(min=1e-6))
                worst = max(worst, float((answer[name] - x).abs().max()) / scale)
    return worst
