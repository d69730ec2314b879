"""Embeddings beside sentence-transformers: its losses, its metrics, and what it loads."""

import shutil
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.texts import save_lines, save_tokenizer
from tests.train import parity
from tests.train.embedding_ranks import RUN, embedded, own_embeddings, row
from tests.train.encoders import ENCODERS
from tests.train.head_ranks import save_head
from tests.train.test_transformers import MODELS, NO_GRADIENT
from tests.train.transformers_ranks import everywhere_float64, save_model, whole
from torchdistpackage.models.sentence_transformers_folder import add_sentence_transformers
from torchdistpackage.train.retrieval_metrics import retrieval_metrics

# found but not imported here: it starts threads, and the pool of ranks forks
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        find_spec("sentence_transformers") is None,
        reason="sentence-transformers is no dependency: it is the peer",
    ),
]
NUM = 4


@pytest.fixture(params=["llama", "bert", "roberta", "modernbert"])
def run(ranks, tmp_path, request):
    """(overrides of a run with all lines in each step, those lines, the folder of its model)"""
    model = str(tmp_path / "model")
    if request.param == "llama":
        ranks(1).run(save_model, {**MODELS["llama"], "vocab_size": 300}, model)
    else:
        ranks(1).run(save_head, ENCODERS[request.param], model, "", 0)
    rows = [row(i, 2) for i in range(NUM)]
    path, val = save_lines(tmp_path / "a.jsonl", rows), save_lines(tmp_path / "b.jsonl", rows)
    tokenizer = save_tokenizer(tmp_path / "tokenizer", bos=True)
    keys = [f"data.path={path}", f"data.val_path={val}", f"data.tokenizer={tokenizer}"]
    keys += [f"data.cache={tmp_path}/cache", f"data.global_batch={NUM}", "model.vocab=300"]
    keys += ["pipeline.microbatches=2", "data.num_negatives=2", "data.seq_len=9"]
    return [*RUN, *keys, f"model.hf={model}"], rows, model


def loaded(folder: str, overrides: list[str], copy_to) -> Any:
    """The folder as sentence-transformers loads it, with the files that an export adds."""
    from sentence_transformers import SentenceTransformer

    shutil.copytree(folder, copy_to)
    add_sentence_transformers(copy_to, parity.config(overrides), 16)
    return SentenceTransformer(str(copy_to), device="cpu", model_kwargs={"dtype": torch.float64})


@pytest.mark.parametrize(
    "options",
    ["{pooling: mean, scale: 7.0}", "{pooling: last, matryoshka_dims: [16, 6, 3]}"],
)
def test_the_loss_and_its_gradient_are_those_of_sentence_transformers(
    ranks, run, tmp_path, options
):
    from sentence_transformers import losses

    overrides, rows, folder = run
    overrides = [*overrides, f"train.embedding={options}"]
    section = parity.config(overrides).train.embedding
    ((mine, _, _, _),) = ranks(1).run(embedded, overrides)
    with everywhere_float64():
        model = loaded(folder, overrides, tmp_path / "st").train()
        loss = losses.MultipleNegativesRankingLoss(model, scale=section.scale)
        if section.matryoshka_dims:
            loss = losses.MatryoshkaLoss(model, loss, list(section.matryoshka_dims))
        columns = [[x["anchor"] for x in rows], [x["positive"] for x in rows]]
        columns += [[x["negatives"][i] for x in rows] for i in range(2)]
        value = loss([model.tokenize(x) for x in columns], torch.zeros(NUM))
        value.backward()
    assert mine.losses[0] == pytest.approx(value.item(), rel=1e-9)
    prefix = "model." if "llama" in str(type(model[0].auto_model)).lower() else ""
    named = model[0].auto_model.named_parameters()
    gradients = {prefix + n: p.grad for n, p in named if not n.startswith("pooler.")}
    parity.expect_close([mine.gradients[0]], [whole(gradients)], least=NO_GRADIENT)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_sentence_transformers_loads_equal_embeddings(ranks, run, tmp_path, pooling):
    overrides, rows, folder = run
    overrides = [*overrides, f"train.embedding={{pooling: {pooling}}}"]
    ids, expected = ranks(1).run(own_embeddings, overrides)[0]
    with everywhere_float64():
        model = loaded(folder, overrides, tmp_path / "st")
        texts = [t for x in rows for t in (x["anchor"], x["positive"], *x["negatives"])]
        found = torch.tensor(model.encode(texts, batch_size=3)).double()
    by_ids = {tuple(x[x != 0].tolist()): v for x, v in zip(ids, expected, strict=True)}
    for text, vector in zip(texts, found, strict=True):
        tokens = tuple(model.tokenizer(text, truncation=True, max_length=9).input_ids)
        largest = by_ids[tokens].abs().max().item()
        torch.testing.assert_close(vector, by_ids[tokens], rtol=0, atol=1e-9 * largest)


def test_metrics_are_those_of_sentence_transformers():
    from sentence_transformers import util
    from sentence_transformers.evaluation import InformationRetrievalEvaluator

    draw = np.random.default_rng(3)
    rows, dim = 3, 5
    texts = draw.integers(0, 60, (40, rows))
    texts[:, 0] += 100  # anchors: some have several positives
    texts[:, 0] %= 117
    texts[:, 0] += 100
    texts = texts.ravel()
    of_text = draw.standard_normal((300, dim))
    found = retrieval_metrics(of_text[texts], texts, rows)
    by_sample = texts.reshape(-1, rows)
    relevant: dict[str, set[str]] = {}
    for anchor, positive, _ in by_sample.tolist():
        relevant.setdefault(str(anchor), set()).add(str(positive))
    evaluator = InformationRetrievalEvaluator(
        {x: x for x in relevant},
        {str(x): str(x) for x in by_sample[:, 1:].ravel().tolist()},
        relevant,
        score_functions={"cosine": util.cos_sim},
    )

    class Model:
        similarity_fn_name = "cosine"

        def encode_query(self, texts, **_):
            return torch.tensor(of_text[[int(x) for x in texts]])

        encode_document = encode_query

    scores = evaluator.compute_metrices(Model())["cosine"]
    assert found["recall@1"] == pytest.approx(scores["recall@k"][1])
    assert found["recall@10"] == pytest.approx(scores["recall@k"][10])
    assert found["mrr@10"] == pytest.approx(scores["mrr@k"][10])
    assert found["ndcg@10"] == pytest.approx(scores["ndcg@k"][10])
