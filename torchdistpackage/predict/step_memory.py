"""The most bytes that a rank of a published run holds, by kind: the sum beside `step_time`.

It describes the software of the published rows, not this package, whose own peak plan/peak.py adds
up layer by layer. That is Megatron-LM with the fused kernels of Transformer Engine, whose attention
keeps queries, keys, values and its output, or with ZeRO 3 FSDP2 of PyTorch. Bytes are those of
tensors; NCCL's buffers are besides, and what the allocator holds is `reserved_bytes`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torchdistpackage.errors import ConfigError
from torchdistpackage.predict.workload import StepLayout, TransformerSizes

ALLOCATOR_SHARE = 0.045
"""Share of the bytes of tensors that the caching allocator holds besides, without expandable
segments: least squares over the published rows marked fit, which a test holds it to."""
WORKSPACE_BYTES = 96 << 20
"""Three workspaces of 32 MiB, as cuBLAS and Transformer Engine have them on Hopper and later."""


def step_memory(sizes: TransformerSizes, layout: StepLayout) -> dict[str, float]:
    """Return the bytes of the rank of a pipeline that needs most, by kind.

    Raises:
        ConfigError: no published row stands for such a run.
    """
    if (why := _unpredicted(sizes, layout)) is not None:
        raise ConfigError(f"the memory of this published run is not predicted: {why}")
    stages = [_stage(sizes, layout, stage) for stage in range(layout.pipe)]
    return max(stages, key=lambda kinds: sum(kinds.values()))


def reserved_bytes(kinds: Mapping[str, float]) -> float:
    """Return what the caching allocator takes of the device for the bytes of `step_memory`."""
    return (1 + ALLOCATOR_SHARE) * sum(kinds.values())


def _unpredicted(sizes: TransformerSizes, layout: StepLayout) -> str | None:
    if sizes.num_experts:
        return "it has experts"
    if layout.lora or layout.float8 or layout.dropout:
        return "it has adapters, float8 or dropout"
    if layout.recompute not in ("none", "blocks", "matmuls"):
        return f"it recomputes {layout.recompute}"
    if sizes.layers % (layout.pipe * layout.chunks):
        return f"{layout.pipe * layout.chunks} stages do not share {sizes.layers} layers evenly"
    return None


def _stage(sizes: TransformerSizes, layout: StepLayout, stage: int) -> dict[str, float]:
    """Return the bytes of one rank of the pipe."""
    x, has_head, num_blocks = layout, stage == layout.pipe - 1, sizes.layers // layout.pipe
    block = (sizes.attention_parameters + sizes.mlp_parameters) / x.tensor
    table = sizes.vocab_parameters / x.tensor
    num = num_blocks * block + ((stage == 0) + has_head) * table
    kept_bytes, full_bytes = _block(sizes, x)
    wide = x.tokens * sizes.dim * x.item_bytes
    logits = x.tokens * sizes.vocab / x.tensor
    blocks_kept = _live(x, stage) * num_blocks * kept_bytes
    if x.zero == 3:
        # a table and the blocks before and behind have their bfloat16 weights, and gradients
        state = _StageState(*(n * num / x.sharers for n in (4, 4, 8)))
        # float32: what log_softmax kept, the gradient of that, and of its input
        loss = has_head * 3 * 4 * logits
        beside = {"gathered parameters": 2 * max(table, 3 * block)}
        inside = full_bytes - kept_bytes + wide
    else:
        per_rank = x.sharers if x.zero else 1
        state = _StageState(2 * num, 4 * num, 12 * num / per_rank)
        # the gradient takes the place of the logits, that of the weight lies beside
        gathered = wide * (1 + 1 / x.tensor)
        loss = has_head * (2 * logits + 2 * table + gathered)
        beside = {
            # Transformer Engine keeps an empty gradient of each shape of a weight
            "empty gradients": 2.0 * block,
            "workspaces and gathered rows": WORKSPACE_BYTES + wide * (x.tensor > 1),
        }
        # gate and up have their gradient while all but the last matmul's input is there
        mlp = (2 if sizes.gated else 1) * sizes.hidden / x.tensor
        inside = full_bytes - kept_bytes + x.tokens * mlp * x.item_bytes
    at_loss, in_block = loss, inside
    return {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer state": state.optimizer,
        "activations": blocks_kept,
        "logits and loss": at_loss * (at_loss >= in_block),
        "temporary tensors": in_block * (at_loss < in_block),
        **beside,
    }


class _StageState(NamedTuple):
    """Bytes of weights, gradients and the optimizer's state."""

    weights: float
    gradients: float
    optimizer: float


def _live(layout: StepLayout, stage: int) -> float:
    """Return how many micro-batches a rank holds at once of all its blocks."""
    pipe, chunks = layout.pipe, layout.chunks
    if pipe == 1:
        return 1
    if chunks == 1:
        return min(pipe - stage, layout.num_microbatches)
    forwards = 2 * (pipe - stage - 1) + (chunks - 1) * pipe + 1
    return min(forwards, layout.num_microbatches * chunks) / chunks


def _block(sizes: TransformerSizes, layout: StepLayout) -> tuple[float, float]:
    """Return what a block keeps of a micro-batch, and what it keeps while its backward runs."""
    x, width = layout, sizes.heads * sizes.head_dim
    kv, hidden = sizes.kv_heads * sizes.head_dim, sizes.hidden
    stream = sizes.dim / (x.tensor if x.sequence_parallel else 1)
    # input and output of both norms; queries, keys, values and the joined heads, which the
    # exchange of heads over context ranks keeps a second time
    elements = 4 * stream + ((2 + (x.context > 1)) * width + 2 * kv) / x.tensor
    elements += (3 if sizes.gated else 2) * hidden / x.tensor
    logsumexp = 4 * sizes.heads / x.tensor
    full_bytes = x.tokens * (elements * x.item_bytes + logsumexp)
    if x.recompute == "blocks":
        return x.tokens * stream * x.item_bytes, full_bytes
    if x.recompute == "matmuls":  # the input, every second matmul, and attention
        elements = stream + (2 * width + kv + hidden) / x.tensor + stream
        return x.tokens * (elements * x.item_bytes + logsumexp), full_bytes
    return full_bytes, full_bytes
