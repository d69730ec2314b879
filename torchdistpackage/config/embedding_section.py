"""The section `train.embedding`: how texts become vectors, and the loss that compares them. No
torch.
"""

from pydantic import Field

from torchdistpackage.config import types as k
from torchdistpackage.config.types import Section


class EmbeddingSection(Section):
    """Contrastive training of text embeddings, as MultipleNegativesRankingLoss of
    sentence-transformers."""

    pooling: k.Pooling = Field(
        default="mean",
        description="How the hidden states of a text become its embedding: mean over its tokens, "
        "that of the last token, or that of the first one (cls).",
    )
    scale: k.Positive = Field(
        default=20.0,
        description="Factor on cosine similarities before the softmax, the inverse of a "
        "temperature. Raise it to care more about the hardest negatives.",
    )
    matryoshka_dims: k.Dims = Field(
        default=(),
        description="Numbers of leading dimensions of an embedding that have a loss of their own, "
        "such as [768, 256, 64]. Empty: only the full embedding.",
    )
    matryoshka_weights: k.Weights = Field(
        default=(),
        description="Weight of the loss of each of matryoshka_dims. Empty: 1 each.",
    )
