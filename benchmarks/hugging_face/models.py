"""Llamas with random weights, as transformers saves them, and the tokens they train on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Size:
    """A Llama whose heads have 64 channels, two queries for each key."""

    dim: int
    layers: int
    vocab: int = 8192

    def config(self) -> LlamaConfig:
        num_heads = self.dim // 64
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.dim,
            intermediate_size=self.dim * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            max_position_embeddings=1024,
            bos_token_id=0,
            eos_token_id=None,
        )

    @property
    def parameters(self) -> int:
        per_layer = self.dim * self.dim * 3 + 3 * self.dim * (self.dim * 11 // 4) + 2 * self.dim
        return self.layers * per_layer + 2 * self.vocab * self.dim + self.dim


SMALL = Size(512, 2)
"""What each side loads ahead, so that nobody pays for imports."""


def size_of(gigabytes: float) -> Size:
    """The Llama whose float32 weights come closest."""
    dim, vocab = (2048, 32_000) if gigabytes >= 1 else (512, 8192)
    ends, one = (Size(dim, layers, vocab).parameters for layers in (0, 1))
    layers = round((gigabytes * 1e9 / _FLOAT_BYTES - ends) / (one - ends))
    return Size(dim, max(1, layers), vocab)


def save(size: Size, folder: str, file_mb: int) -> None:
    """The folder of a model, in files of so many MB at most."""
    torch.manual_seed(0)
    LlamaForCausalLM(size.config()).save_pretrained(folder, max_shard_size=f"{file_mb}MB")


class Samples(Dataset):
    """Drawn tokens, as Hugging Face's Trainer reads them and as a source of this package.

    Sample i of a step is the same for both, whoever reads it.
    """

    def __init__(self, number: int, seq_len: int, vocab: int):
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocab, (number, seq_len + 1), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, targets = self.tokens[index, :-1], self.tokens[index, 1:]
        return {"input_ids": ids, "labels": targets, "shift_labels": targets}

    def batch(
        self, split: Any, seed: int, step: int, data_index: int, num_data: int, per_rank: int,
        *, first: int = 0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(ids, targets), (per_rank, seq_len) each, of a step of one round."""
        begin = (max(step - 1, 0) * num_data + data_index) * per_rank + first
        rows = self.tokens[torch.arange(begin, begin + per_rank) % len(self.tokens)]
        return rows[:, :-1], rows[:, 1:]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
