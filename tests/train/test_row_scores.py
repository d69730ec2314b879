"""Log-probabilities of given tokens: those of transformers, on every layout."""

import math

import pytest
import torch

from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_ranks import VOCAB
from tests.train.inference_ranks import row_scores
from torchdistpackage.cli._inference import source_of
from torchdistpackage.train.row_scores import RowScore, ScoredRow

LAYOUTS = {
    "one": {},
    "tensor2": {"tensor": 2},
    "pipe2": {"pipe": 2},
    "data2": {"data": 2},
    "context2": {"context": 2},
    "data2xpipe2": {"data": 2, "pipe": 2},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
}
SMALL_SET = ("one", "tensor2", "pipe2", "data2")
EACH = [n if n in SMALL_SET else pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS]


def rows(name: str) -> list[ScoredRow]:
    """Rows of many lengths; the last ends with the tokens that the model finds likeliest."""
    draw = torch.Generator().manual_seed(7)
    lengths = [(2, 1), (9, 3), (5, 4), (12, 11), (3, 1)]
    every = [
        ScoredRow(tuple(torch.randint(VOCAB, (length,), generator=draw).tolist()), scored)
        for length, scored in lengths
    ]
    ids = every[1].ids
    for _ in range(2):
        ids = (*ids, int(folders.in_float64(name, torch.tensor([ids]))[0, -1].argmax()))
    return [*every, ScoredRow(ids, 2)]


def of_transformers(name: str, row: ScoredRow) -> RowScore:
    ids = torch.tensor([row.ids])
    logits = folders.in_float64(name, ids[:, :-1])[0, -row.num_scored :]
    tokens = ids[0, -row.num_scored :]
    log_probs = logits.log_softmax(-1).gather(-1, tokens[:, None])
    return RowScore(log_probs.sum().item(), bool((logits.argmax(-1) == tokens).all()))


@pytest.mark.parametrize("layout", EACH)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_rows_have_the_log_probabilities_of_transformers(ranks, tmp_path, name, layout):
    source = source_of(folders.save(name, tmp_path / "source"), None)
    ones = {"data": 1, "pipe": 1, "context": 1, "tensor": 1}
    degrees = {f"parallel.{axis}": size for axis, size in {**ones, **LAYOUTS[layout]}.items()}
    keys = {**degrees, "pipeline.microbatches": 1, "data.global_batch": degrees["parallel.data"]}
    config = source.config(keys, ["precision.dtype=float64"])
    given = rows(name)
    truth = [of_transformers(name, row) for row in given]
    assert [score.is_greedy for score in truth][-1] and not truth[1].is_greedy
    number = math.prod(LAYOUTS[layout].values())
    for scores in ranks(number).run(row_scores, config, source.weights, given, 2):
        assert [x.is_greedy for x in scores] == [x.is_greedy for x in truth]
        assert [x.log_prob for x in scores] == pytest.approx([x.log_prob for x in truth], rel=1e-9)
