"""`train.label_smoothing` and `train.neftune_noise_alpha` on every layout are as in one process, by
torch's loss and transformers' hook.
"""

import math

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.train import parity
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import RUN, everywhere_float64, save_model, trainer

GPT = ["model.layers=2", "model.dim=16", "model.heads=4", "model.vocab=65"]
SMOOTH = "train.label_smoothing=0.2"
NOISE = "train.neftune_noise_alpha=9"
LAYOUTS = {
    "tensor2": ["parallel.tensor=2"],
    "pipe2xcontext2": ["parallel.pipe=2", "parallel.context=2"],
    "data2-zero3": ["parallel.data=2", "parallel.zero=3"],
    "sequence2": ["parallel.tensor=2", "parallel.sequence_parallel=true"],
    "pipe2xtensor2": ["parallel.pipe=2", "parallel.tensor=2"],
}
TELLING = [("smooth", "llama", "tensor2"), ("smooth", "gpt", "pipe2xcontext2")]
TELLING += [("noise", "llama", "pipe2xtensor2"), ("noise", "gpt", "sequence2")]
CASES = [*TELLING]
CASES += [("smooth", m, x) for m in ("gpt", "llama") for x in LAYOUTS]
# ranks along data and context draw apart, as for dropout
ALIKE = ("tensor2", "sequence2", "pipe2xtensor2")
CASES += [("noise", m, x) for m in ("gpt", "llama") for x in ALIKE]


def two_steps(overrides: list[str]) -> tuple[parity.Held, list[float]]:
    """Weights after two steps; the losses of these, and that of a validation."""
    run = trainer([*overrides, "train.eval_batches=1"])
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    with everywhere_float64():
        return parity.held(run, "data"), [*losses, run.evaluate()]


def two_steps_by_hand(overrides: list[str]) -> tuple[parity.Held, list[float]]:
    """The same in one process: torch's smoothed loss, and transformers' hook for the noise."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    run = trainer([*overrides, "train.eval_batches=1"])
    train, stage = run.plan.config.train, run.stage
    smoothing, alpha = train.label_smoothing, train.neftune_noise_alpha
    plain = run.loss

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not stage.training:
            return plain(outputs, targets)
        module = stage.get_submodule("0")
        logits = module.whole_logits(outputs).flatten(0, 1)  # type: ignore
        total = F.cross_entropy(
            logits, targets.flatten(), label_smoothing=smoothing, reduction="sum"
        )
        return total, (targets != -100).sum()

    run.loss = loss
    if alpha is not None:
        module = stage.get_submodule("0")
        if hasattr(module, "embed"):
            embedding, module.embed.noise = module.embed, None  # type: ignore
        else:
            embedding = module.decoder.base.get_input_embeddings()  # type: ignore
            embedding._forward_hooks.clear()
        embedding.neftune_noise_alpha = alpha
        embedding.register_forward_hook(neftune_post_forward_hook)
        if hasattr(module, "embed"):  # it has (S, B, D), so the scale is that of (B, D)
            embedding.neftune_noise_alpha *= math.sqrt(4 / 12)
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    with everywhere_float64():
        return parity.held(run, "data"), [*losses, run.evaluate()]


@pytest.fixture(scope="module")
def answers(ranks, tmp_path_factory):
    made: dict[tuple[str, str], tuple] = {}
    folder = tmp_path_factory.mktemp("llama")

    def of(key: str, model: str) -> tuple[list[str], tuple]:
        if (key, model) not in made:
            words = [*RUN, SMOOTH if key == "smooth" else NOISE]
            if model == "gpt":
                words += GPT
            else:
                words.append(f"model.hf={folder / 'model'}")
                if not (folder / "model").exists():
                    ranks(1).run(save_model, MODELS["llama"], str(folder / "model"))
            made[key, model] = words, ranks(1).run(two_steps_by_hand, words)[0]
        return made[key, model]

    return of


@pytest.mark.parametrize(
    ("key", "model", "layout"),
    [
        pytest.param(*case, marks=() if case in TELLING else pytest.mark.full)
        for case in dict.fromkeys(CASES)
    ],
)
def test_two_steps_are_those_of_torch_and_transformers(ranks, answers, key, model, layout):
    words, (weights, losses) = answers(key, model)
    size = 4 if "x" in layout else 2
    found = ranks(size).run(two_steps, [*words, *LAYOUTS[layout]])
    parity.expect_close([held for held, _ in found], [weights])
    for _, own in found:
        assert own == pytest.approx(losses, rel=1e-9)
    assert abs(losses[0] - losses[2]) > 1e-3
