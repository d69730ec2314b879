"""What ranks do with texts to compare, and the same on transformers' base model in one process."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.data.texts import WORDS, save_lines, save_tokenizer
from tests.train import parity
from tests.train.encoders import ENCODERS
from tests.train.head_ranks import with_adapters
from tests.train.lora_ranks import plain
from tests.train.preference_ranks import trainer
from tests.train.transformers_ranks import (
    Answer,
    adam_of,
    everywhere_float64,
    logged_steps,
    set_rate,
    whole,
)
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_data

STEPS = 3
RUN = [
    *("data.name=embedding", "data.seq_len=24", "data.global_batch=4", "data.num_negatives=1"),
    *("train.dpo={}", "precision.dtype=float64", "optim.clip=0.0", "optim.lr=0.01"),
    *("optim.warmup_steps=0", "train.steps=5", "data.val_fraction=0.3", "train.eval_batches=2"),
]


def row(number: int, num_negatives: int = 1) -> dict:
    words = [WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(3 + number % 6)]
    negatives = [" ".join(words[i + 1 :]) + f" no {number}" for i in range(num_negatives)]
    return {"anchor": f"{number} " + " ".join(words[:2]), "positive": " ".join(words)} | (
        {"negatives": negatives} if num_negatives else {}
    )


def data_keys(folder: Path, num_negatives: int = 1, number: int = 24) -> list[str]:
    path = save_lines(folder / "rows.jsonl", [row(i, num_negatives) for i in range(number)])
    tokenizer = save_tokenizer(folder / "tokenizer")
    keys = [f"data.path={path}", f"data.tokenizer={tokenizer}", f"data.cache={folder}/cache"]
    return [*RUN, *keys, f"data.num_negatives={num_negatives}", "model.vocab=300"]


def embedded(overrides: list[str]) -> tuple[Answer, list[dict[str, float]], float | None, dict]:
    """Three steps, what the log has of them, and a validation."""
    run = trainer(overrides)
    answer, logged = logged_steps(run)
    return answer, logged, run.evaluate(), dict(run.val_task)


def initial(overrides: list[str]) -> parity.Held:
    return parity.held(trainer(overrides), "data")


def pooled(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    if pooling == "mean":
        return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    at = mask.sum(1) - 1 if pooling == "last" else torch.zeros(len(mask), dtype=torch.int64)
    return hidden[torch.arange(len(mask)), at]


def ranking_loss(vectors: Tensor, ids: Tensor, section: RunConfig) -> Tensor:
    """MultipleNegativesRankingLoss within MatryoshkaLoss, as their papers have them; the same text
    as a positive is no negative.
    """
    options, rows = section.train.embedding, section.data.rows_per_sample
    dims = options.matryoshka_dims or (vectors.shape[-1],)
    weights = options.matryoshka_weights or [1.0] * len(dims)
    total = vectors.new_zeros(())
    for dim, weight in zip(dims, weights, strict=True):
        unit = F.normalize(vectors[:, :dim], dim=-1)
        anchors = unit[::rows]
        candidates = torch.cat([unit[i::rows] for i in range(1, rows)])
        texts = torch.cat([ids[i::rows] for i in range(1, rows)])
        same = (texts == ids[1::rows].unsqueeze(1)).all(-1)
        same.fill_diagonal_(False)
        scores = (options.scale * anchors @ candidates.t()).masked_fill(same, -torch.inf)
        total = total + weight * F.cross_entropy(scores, torch.arange(len(anchors)))
    return total


def of_transformers(
    overrides: list[str], adapters: dict[str, Tensor] | None = None
) -> tuple[Answer, float]:
    """(three steps, loss of a validation). adapters: with peft's, which begin with these values."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    section = parity.config(overrides)
    is_encoder = AutoConfig.from_pretrained(section.model.hf).model_type in ENCODERS
    auto = AutoModel if is_encoder else AutoModelForCausalLM
    model = auto.from_pretrained(section.model.hf, dtype=torch.float64).train()
    if adapters is not None:
        model = with_adapters(model, adapters, "FEATURE_EXTRACTION")
    named = {plain(n): p for n, p in model.named_parameters()}
    trained = {n: p for n, p in named.items() if not n.startswith(("lm_head.", "pooler."))}
    trained = {n: p for n, p in trained.items() if p.requires_grad}
    adam = adam_of(trained, section)
    gradients, losses = [], []

    def loss_of(split: str, step: int) -> Tensor:
        ids, targets = _batch(section, split, step)
        mask = targets >= 0
        with everywhere_float64():
            base = (model if is_encoder else model.model)(ids, attention_mask=mask.long())
            vectors = pooled(base.last_hidden_state, mask, section.train.embedding.pooling)
            return ranking_loss(vectors, ids, section)

    for step in range(1, STEPS + 1):
        adam.zero_grad()
        loss = loss_of("train", step)
        loss.backward()
        gradients.append(whole({name: p.grad for name, p in trained.items()}))
        losses.append(loss.item())
        set_rate(adam, section, step)
        adam.step()
    with torch.no_grad():
        vals = [loss_of("val", step).item() for step in range(section.train.eval_batches)]
    return Answer(whole(named), gradients, losses), sum(vals) / len(vals)


def _batch(section: RunConfig, split: str, step: int) -> tuple[Tensor, Tensor]:
    data = build_data(make_plan(section, 1))
    num = section.data.global_batch * section.data.rows_per_sample
    return data.batch(split, section.run.seed, step, 0, 1, num)[:2]  # its mask is in the targets


def own_embeddings(overrides: list[str]):
    """(ids of the rows of the first step, their embeddings) by the loss of a run."""
    run = trainer(overrides)
    batch = run.batches.of_training(1, 0)
    with everywhere_float64(), torch.no_grad():
        hidden = run.forward(0, batch.inputs, batch.position_ids)
        vectors, _ = run.task._embedded(hidden, batch.targets)
    section = parity.config(overrides).train.embedding
    torch.testing.assert_close(vectors, pooled(hidden, batch.targets >= 0, section.pooling))
    return batch.inputs, vectors
