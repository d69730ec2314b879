"""A Hugging Face decoder cut into stages along its list of blocks.

One rule: a stage is the model itself with fewer blocks. It runs the family's own forward, which
makes masks and rotary tables as ever, on activations in place of token ids; what stands before the
first and behind the last block is left out of the other stages. Whether the stages in a row compute
what the model does is tried when they are made, so a family of another kind is refused.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.split import split_by_cost

NUM_TOKENS = 8
"""Of the sequence on which stages are compared with their model."""


class DecoderStage(nn.Module):
    """Consecutive blocks of a decoder; the first stage embeds, the last has the norm and the head.

    Parameters keep the model's names. Calls of all stages take the same keywords.
    """

    def __init__(self, model: nn.Module, blocks: range, is_first: bool, is_last: bool):
        super().__init__()
        prefix = model.base_model_prefix
        base = _shortened(getattr(model, prefix), blocks, is_first, is_last)
        self.add_module(prefix, base)
        self.config, self._prefix = model.config, prefix
        self._is_first, self._is_last = is_first, is_last
        self._loss: Callable[..., Tensor] = model.loss_function
        if is_last:
            for name, child in model.named_children():
                if name != prefix:
                    self.add_module(name, child)

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
        given = {"input_ids" if self._is_first else "inputs_embeds": x}
        x = getattr(self, self._prefix)(
            **given,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
            return_dict=True,
        ).last_hidden_state
        if not self._is_last:
            return x
        logits = self.get_submodule(_head_name(self))(x)
        if labels is None:
            return logits
        return self._loss(logits=logits, labels=labels, vocab_size=self.config.vocab_size)


def decoder_stages(
    model: nn.Module,
    placement: Sequence[int],
    *,
    costs: Sequence[float] | None = None,
    check: bool = True,
) -> list[DecoderStage]:
    """The stages of a causal language model of transformers, in order; they share its parameters.

    placement: for each stage the pipe index that runs it. costs: of each block, the embedding's
    ahead and the head's behind; None: by the matrices that a token is multiplied with. check:
    compare with the model on a few tokens, which runs it twice.

    Raises:
        ScheduleError: no list of blocks is found, it is shorter than the stages, or the stages do
            not compute what the model does.
    """
    blocks = _blocks(getattr(model, model.base_model_prefix))[1]
    costs = _costs(model, blocks) if costs is None else costs
    num = len(blocks)
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
    last = len(placement) - 1
    stages = [DecoderStage(model, r, s == 0, s == last) for s, r in enumerate(ranges)]
    if check:
        _compare(model, stages)
    return stages


def _shortened(base: nn.Module, blocks: range, is_first: bool, is_last: bool) -> nn.Module:
    """`base` with some of its blocks, which keep their names, and without what others run."""
    short, name = copy(base), _blocks(base)[0]
    short._modules = dict(base._modules)
    kept = nn.ModuleList()
    for i in blocks:
        kept.add_module(str(i), base._modules[name][i])
    short._modules[name] = kept
    short.config = copy(base.config)
    short.config.num_hidden_layers = len(blocks)
    if (kinds := getattr(base.config, "layer_types", None)) is not None:
        short.config.layer_types = [kinds[i] for i in blocks]
    names = list(base._modules)
    for i, child in enumerate(names):
        before = i < names.index(name)
        if child == name or not any(True for _ in base._modules[child].parameters()):
            if before and not is_first and isinstance(base._modules[child], nn.Dropout):
                short._modules[child] = nn.Identity()
        elif (before and not is_first) or (not before and not is_last):
            short._modules[child] = _Zeros() if before else nn.Identity()
    return short


class _Zeros(nn.Module):
    """An embedding that adds nothing: activations already hold it."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros((), device=ids.device)


def _blocks(base: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of modules right below `base`, by name."""
    lists = [(n, m) for n, m in base.named_children() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ScheduleError(
            f"{type(base).__name__} has no list of blocks; its children are "
            f"{', '.join(n for n, _ in base.named_children())}; cut it with flatten_model"
        )
    return max(lists, key=lambda found: len(found[1]))


def _costs(model: nn.Module, blocks: Sequence[nn.Module]) -> list[float]:
    def matrices(module: nn.Module) -> float:
        return float(sum(p.numel() for p in module.parameters() if p.dim() > 1))

    return [0.0, *map(matrices, blocks), matrices(model.get_submodule(_head_name(model)))]


def _head_name(model: Any) -> str:
    """Of the module that makes logits: the one below the whole model, beside its base."""
    prefix = model._prefix if isinstance(model, DecoderStage) else model.base_model_prefix
    return next(name for name, _ in model.named_children() if name != prefix)


def _compare(model: nn.Module, stages: Sequence[DecoderStage]) -> None:
    """Raises where the stages in a row differ from the model, without dropout."""
    weight = next(model.parameters())
    if weight.is_meta:
        return
    ids = torch.arange(NUM_TOKENS, device=weight.device).reshape(1, -1) % model.config.vocab_size
    modes = [(m, m.training) for part in (model, *stages) for m in part.modules()]
    try:
        for part in (model, *stages):
            part.eval()
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False, return_dict=True).logits
            x = ids
            for stage in stages:
                x = stage(x)
    finally:
        for module, mode in modes:
            module.training = mode
    if x.shape != expected.shape or not torch.equal(x, expected):
        difference = (x - expected).abs().max().item() if x.shape == expected.shape else "shape"
        raise ScheduleError(
            f"the {len(stages)} stages do not compute what {type(model).__name__} does (largest "
            f"difference: {difference}): it changes activations before its first block or behind "
            f"its last; cut it with flatten_model"
        )
