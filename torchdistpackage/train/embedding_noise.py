"""Noise on token embeddings in training: NEFTune (Jain et al., arXiv:2310.05914). ¶ Numbers and
draws equal transformers' `neftune_post_forward_hook`.

The noise comes from torch's default generator, as dropout does (docs/random.md): ranks along
tensor, which hold equal vectors, add equal noise, and a rank that embeds draws what one process
would.
"""

import math

from torch import Tensor


class EmbeddingNoise:
    """Adds uniform noise of up to alpha / sqrt(seq_len x channels) to each number.

    seq_len: length of full sequences; ranks along context have slices of them.
    """

    def __init__(self, alpha: float, seq_len: int):
        self._scale = alpha / math.sqrt(seq_len)

    def __call__(self, vectors: Tensor, index: int = 0, number: int = 1) -> Tensor:
        """Return `vectors` (..., D) with noise.

        They are slice `index` of `number` along dim 0; each rank draws the noise of all slices.
        """
        bound, rows = self._scale / math.sqrt(vectors.shape[-1]), vectors.shape[0]
        noise = vectors.new_empty(number * rows, *vectors.shape[1:])
        return vectors + noise.uniform_(-bound, bound).narrow(0, index * rows, rows)
