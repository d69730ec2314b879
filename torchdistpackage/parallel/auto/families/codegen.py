"""CodeGen: weights of q, v, k in four blocks, each with a quarter of the heads."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.auto.actions import TakeChunks
from torchdistpackage.parallel.auto.families.rules import FamilyRules
from torchdistpackage.parallel.auto.rules import Config

BLOCKS = 4
"""Devices of the first training, by which the weights are arranged and the code computes."""


def get_codegen_config(model_config: Any, devices: Sequence[Any]) -> Config:
    """Plan of CodeGen with `model_config` on `devices`. A shard has heads of each block.

    Raises:
        LayoutError: a block has fewer heads than there are shards.
    """
    num_heads, dim = model_config.num_attention_heads, model_config.hidden_size
    rules, each = FamilyRules(len(devices)), num_heads // BLOCKS
    if each < rules.world_size:
        raise LayoutError(
            f"codegen has {num_heads} attention heads in {BLOCKS} blocks of {each}, which "
            f"{rules.world_size} shards cannot share; use at most {each}"
        )
    mine, start = [], 0
    for size in even_sizes(each, rules.world_size):
        mine.append(range(start, start + size))
        start += size
    fused = [
        [
            (block * 3 + part) * each + head
            for block in range(BLOCKS)
            for part in range(3)
            for head in h
        ]
        for h in mine
    ]
    merged = [[block * each + head for block in range(BLOCKS) for head in h] for h in mine]
    head_dim = dim // num_heads
    rules.column("attn\\.qkv_proj", TakeChunks(0, head_dim, fused))
    rules.row("attn\\.out_proj", TakeChunks(1, head_dim, merged))
    rules.enter("attn", "hidden_states")
    rules.attribute(
        "attn",
        num_attention_heads=lambda value, *, rank: len(merged[rank]),
        embed_dim=lambda value, *, rank: len(merged[rank]) * head_dim,
    )
    rules.column("mlp\\.fc_in")
    rules.row("mlp\\.fc_out")
    rules.enter("mlp")
    rules.embedding("wte", dim)
    rules.head("lm_head", model_config)
    rules.key_heads = merged
    rules.draws_apart("attn")
    return rules.config()
