"""Mixtral: attention as in Llama; every rank has a part of each expert. No torch.

For `tensor_parallel(model)` alone: `model.hf` reads its experts from transformers (found.py).
"""

from dataclasses import replace

from torchdistpackage.families.llama import LLAMA, attention
from torchdistpackage.families.table import Settings, Sizes, Weights


def _mixtral_block(w: Weights, s: Settings, n: Sizes) -> None:
    attention(w, n, bias=False)
    num, both = s["num_local_experts"], (n.hidden, n.hidden)
    w.stacked(
        "experts",
        gate_up_proj=w.cut("", (num, sum(both), n.dim), 1, parts=both),
        down_proj=w.cut("", (num, n.dim, n.hidden), 2),
    )


MIXTRAL = replace(
    LLAMA,
    defaults={**LLAMA.defaults, "num_local_experts": 8},
    block=_mixtral_block,
)
