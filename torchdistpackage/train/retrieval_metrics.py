"""Retrieval metrics: how well anchors find their positives among all texts, by cosine similarity. ¶
They equal those of sentence-transformers' InformationRetrievalEvaluator.
"""

import numpy as np
import numpy.typing as npt

RECALLS, BEST = (1, 10), 10
_AT_ONCE = 1 << 24
"""Number of similarities held at a time."""


def retrieval_metrics(
    vectors: npt.NDArray[np.float64], texts: npt.NDArray[np.int64], rows_per_sample: int
) -> dict[str, float]:
    """Return recall@1, recall@10, mrr@10 and ndcg@10, means over different anchors.

    vectors: (N, D); each `rows_per_sample` of them are an anchor, its positive and its negatives.
    texts: (N,) a number for each distinct text; negative for a row without text. A text that occurs
    several times counts once, and an anchor may have several positives.
    """
    rows = np.arange(len(texts)).reshape(-1, rows_per_sample)
    rows = rows[texts[rows[:, 0]] >= 0]
    relevant: dict[int, set[int]] = {}
    for anchor, positive in rows[:, :2].tolist():
        relevant.setdefault(int(texts[anchor]), set()).add(int(texts[positive]))
    anchors = {int(texts[x]): x for x in rows[:, 0].tolist()}
    documents = {int(texts[x]): x for x in rows[:, 1:].ravel().tolist()}
    if not anchors:
        return {}
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    names = np.asarray(list(documents))
    corpus, queries = unit[list(documents.values())], unit[list(anchors.values())]
    most, step = min(BEST, len(names)), max(_AT_ONCE // len(names), 1)
    sums = np.zeros(len(RECALLS) + 2)
    for first in range(0, len(queries), step):
        scores = queries[first : first + step] @ corpus.T
        ranked = names[np.argsort(-scores, axis=1, kind="stable")[:, :most]]
        for name, nearest in zip(list(anchors)[first : first + step], ranked, strict=True):
            sums += _of_query(np.isin(nearest, list(relevant[name])), len(relevant[name]))
    keys = (*(f"recall@{k}" for k in RECALLS), f"mrr@{BEST}", f"ndcg@{BEST}")
    return dict(zip(keys, (sums / len(queries)).tolist(), strict=True))


def _of_query(hits: npt.NDArray[np.bool_], num_relevant: int) -> npt.NDArray[np.float64]:
    """Return the metrics of one anchor. hits: whether each of its nearest texts, nearest first, is
    a positive of it.
    """
    recalls = [hits[:k].sum() / num_relevant for k in RECALLS]
    reciprocal = 1 / (1 + hits.argmax()) if hits.any() else 0.0
    discounts = 1 / np.log2(np.arange(2, BEST + 2))
    gain, ideal = hits @ discounts[: len(hits)], discounts[: min(num_relevant, BEST)].sum()
    return np.asarray([*recalls, reciprocal, gain / ideal])
