"""One rule of rounding: ranks that share a length have parts that differ by one at most."""

from dataclasses import replace

from tests.train.test_transformers import MODELS
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import even_sizes, feature_problems
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.transformers_layout import TransformersShape, layouts
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.topology.mesh import Mesh

VOCAB, MESH = 50257, Mesh((("tensor", 4),))
PARTS = (12565, 12564, 12564, 12564)


def parts(layout: Layout) -> tuple[int, ...]:
    (dim,) = (dim for dim, axes in enumerate(layout.split) if axes)
    return tuple(local_shape(layout, MESH, rank)[dim] for rank in range(4))


def test_50257_over_four_ranks_is_one_list_everywhere():
    gpt = GPTShape(layers=1, dim=8, heads=4, vocab=VOCAB, seq_len=8, tied=False)
    tied = {**MODELS["gpt2"], "vocab_size": VOCAB}
    apart = {**tied, "tie_word_embeddings": False}
    names = {"gpt2": "transformer.wte.weight", "head": "lm_head.weight"}
    listed = {
        "gpt, embedding": gpt_layout.layouts(gpt)["embed.weight"],
        "gpt, head": gpt_layout.layouts(gpt)["head.weight"],
        "gpt, tied": gpt_layout.layouts(replace(gpt, tied=True))["embed.weight"],
        "hf, tied": layouts(TransformersShape("gpt2", tied, 8))[names["gpt2"]],
        "hf, head": layouts(TransformersShape("gpt2", apart, 8))[names["head"]],
        "VocabParallelEmbedding": cut.vocab_embedding(VOCAB, 8, "tensor")["weight"],
        "FeatureParallelEmbedding": cut.feature_embedding(8, VOCAB, "tensor")["weight"],
        "ColumnLinear": cut.column(VOCAB, 8, True, "tensor")["weight"],
        "its bias": cut.column(VOCAB, 8, True, "tensor")["bias"],
        "RowLinear": cut.row(8, VOCAB, True, "tensor")["weight"],
    }
    assert {name: parts(layout) for name, layout in listed.items()} == dict.fromkeys(listed, PARTS)
    assert even_sizes(VOCAB, 4) == PARTS


def test_as_many_ranks_as_features_have_one_each():
    """torch.chunk's rule left the last of 4 ranks none of 9 features."""
    assert feature_problems("hidden", 9, 4) == []
    (text,) = feature_problems("hidden", 3, 4)
    assert "use 4" in text and "3 tensor ranks" in text
