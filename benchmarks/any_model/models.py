"""The models and inputs of the cases: random weights, alike on all ranks, and no dropout."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 8192


@dataclass(frozen=True)
class Case:
    """A model and what a turn does with it.

    batch sequences of seq_len tokens are trained on; after one prompt of num_prompt tokens
    num_new are generated.
    """

    family: str
    dim: int
    layers: int
    batch: int = 2
    seq_len: int = 64
    num_prompt: int = 16
    num_new: int = 16
    ranks: int = 2


CASES = {
    "Llama 256": Case("llama", 256, 4),
    "Llama 512": Case("llama", 512, 6),
    "GPT-2 512": Case("gpt2", 512, 6),
    "Llama 512, 4 ranks": Case("llama", 512, 6, ranks=4),
}


def make(case: Case) -> Any:
    """The model of a case, whole."""
    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": None}
    num_heads = case.dim // 64
    if case.family == "llama":
        config = LlamaConfig(
            hidden_size=case.dim,
            intermediate_size=case.dim * 11 // 4,
            num_hidden_layers=case.layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            max_position_embeddings=1024,
            **common,
        )
        return LlamaForCausalLM(config)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    heads = {"n_embd": case.dim, "n_layer": case.layers, "n_head": num_heads}
    return GPT2LMHeadModel(GPT2Config(**heads, **drops, **common))


def trained_on(case: Case) -> Tensor:
    """(batch, seq_len) token ids."""
    return torch.randint(
        VOCABULARY, (case.batch, case.seq_len), generator=torch.Generator().manual_seed(1)
    )


def prompt(case: Case) -> Tensor:
    """(1, num_prompt) token ids."""
    return torch.randint(
        VOCABULARY, (1, case.num_prompt), generator=torch.Generator().manual_seed(2)
    )
