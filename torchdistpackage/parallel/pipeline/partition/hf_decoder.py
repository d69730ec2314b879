"""A Hugging Face decoder cut into stages along its list of blocks.

One rule: a stage is the model itself with fewer blocks. It runs the family's own forward, which
makes masks and rotary tables as ever, and the last one the family's own head and loss. Activations
enter where the first of its blocks is called and leave where the last one returns, so that what the
family does before and behind its blocks is done once. What other stages run there is left out.
Whether the stages in a row compute what the model does is tried when they are made, so a family
whose blocks share anything else is refused.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.fewer_blocks import (
    BlockActivations,
    BlockNeighbours,
    cut_blocks,
    path_to_blocks,
)
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost
from torchdistpackage.parallel.pipeline.stages import in_eval

NUM_TOKENS = 8
"""Of the sequence on which stages are compared with their model."""
_OPTIONS = {"use_cache": False, "return_dict": True}


class DecoderStage(nn.Module):
    """Consecutive blocks of a decoder; the first stage embeds, the last has the norm and the head.

    Parameters keep the model's names. Calls of all stages take the same keywords.
    """

    def __init__(
        self, model: nn.Module, base: nn.Module, passage: BlockActivations, ends: Sequence[bool]
    ):
        """base: the model's, cut. passage: of its blocks. ends: is it the first, the last stage?"""
        super().__init__()
        self.config, self._prefix = model.config, model.base_model_prefix
        self._passage, (self._is_first, self._is_last) = passage, ends
        self.add_module(self._prefix, base)
        if self._is_last:
            for name, child in model.named_children():
                if name != self._prefix:
                    self.add_module(name, child)
            # not a module of ours, or names would change; whoever replaces one here does so there
            self.__dict__["_whole"] = whole = copy(model)
            whole.__dict__["_modules"] = self._modules

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """ids (B, S) on the first stage, else activations (B, S, D) as the stage before gave them.

        attention_mask, position_ids (B, S): of the model, the same for every stage. Returns
        activations; on the last stage logits (B, S, V), or with labels (B, S) the model's loss.
        """
        given: dict[str, Any] = {"input_ids" if self._is_first else "inputs_embeds": x, **_OPTIONS}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        if position_ids is not None:
            given["position_ids"] = position_ids
        passage = self._passage
        passage.enters = None if self._is_first else x
        try:
            if not self._is_last:
                getattr(self, self._prefix)(**given)
                return passage.take()
            whole = self.__dict__["_whole"]
            whole.training = self.training
            if labels is None:
                return whole(**given).logits
            return whole(**given, labels=labels).loss
        finally:
            passage.enters = passage.left = None


def decoder_stages(
    model: nn.Module,
    placement: Sequence[int],
    *,
    costs: Sequence[float] | None = None,
    check: bool = True,
) -> list[DecoderStage]:
    """The stages of a causal language model of transformers, in order; they share its parameters.

    The model runs once on a few tokens, without dropout. placement: for each stage the pipe index
    that runs it. costs: of each block, the embedding's ahead and the head's behind; None: by the
    matrices that a token is multiplied with. check: compare logits and loss of the stages in a row
    with the model's, unless it is on the meta device.

    Raises:
        ScheduleError: no list of blocks is found, it is shorter than the stages, or the stages do
            not compute what the model does.
    """
    base = getattr(model, model.base_model_prefix)
    path = path_to_blocks(base)
    num = len(base.get_submodule(path))
    costs = _costs(model, base.get_submodule(path)) if costs is None else costs
    if len(costs) != num + 2 or num < len(placement):
        raise ScheduleError(
            f"{type(model).__name__} with {num} blocks cannot be cut into {len(placement)} stages "
            f"by {len(costs)} costs; every stage needs a block, and costs are those of embedding, "
            f"blocks and head"
        )
    # the embedding stays with the first block, the head with the last
    joined = list(costs[1:-1])
    joined[0] += costs[0]
    joined[-1] += costs[-1]
    ranges = split_by_cost(joined, len(placement), placement=placement)
    around = BlockNeighbours(base, path)
    expected = _run(model, around)
    stages = []
    for s, blocks in enumerate(ranges):
        passage, ends = BlockActivations(), (s == 0, s == len(ranges) - 1)
        cut = cut_blocks(base, path.split("."), blocks, ends, around, passage)
        stages.append(DecoderStage(model, cut, passage, ends))
    if check and expected is not None:
        _compare(model, stages, expected)
    return stages


def _costs(model: nn.Module, blocks: Sequence[nn.Module]) -> list[float]:
    def matrices(module: nn.Module) -> float:
        return float(sum(p.numel() for p in module.parameters() if p.dim() > 1))

    heads = (m for name, m in model.named_children() if name != model.base_model_prefix)
    return [0.0, *map(matrices, blocks), sum(map(matrices, heads))]


# -- is it the model? ----------------------------------------------------------------------------


def _tokens(model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    return torch.arange(NUM_TOKENS, device=device).reshape(1, -1) % model.config.vocab_size


def _run(model: nn.Module, around: BlockNeighbours) -> tuple[Tensor, Tensor] | None:
    """Logits and loss of the model on a few tokens; None on the meta device."""
    ids = _tokens(model)
    try:
        with torch.no_grad(), in_eval(model), around.seen():
            output = model(input_ids=ids, labels=ids, **_OPTIONS)
    except (RuntimeError, NotImplementedError):
        if ids.is_meta:  # where not all can be run
            return None
        raise
    return None if ids.is_meta else (output.logits, output.loss)


def _compare(
    model: nn.Module, stages: Sequence[DecoderStage], expected: tuple[Tensor, Tensor]
) -> None:
    """Raises where the stages in a row differ from the model."""
    x = ids = _tokens(model)
    *rest, last = stages
    with torch.no_grad(), in_eval(*stages):
        for stage in rest:
            x = stage(x)
        found = last(x), last(x, labels=ids)
    for what, a, b in zip(("logits", "loss"), found, expected, strict=True):
        if a.shape != b.shape or not torch.equal(a, b):
            difference = (a - b).abs().max().item() if a.shape == b.shape else "shape"
            raise ScheduleError(
                f"the {len(stages)} stages do not compute what {type(model).__name__} does "
                f"(largest difference of {what}: {difference}): its blocks share more than their "
                f"activations, masks and positions, or its loss is not of the logits alone (that "
                f"of routers, output_router_logits); cut it with flatten_model"
            )
