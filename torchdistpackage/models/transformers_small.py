"""Small copies of a model of transformers to try things on, what they are tried on, and where a
trial of one stopped.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.config.head_tasks import ModelHead
from torchdistpackage.models.shrunk_config import shrunk, without_dropout
from torchdistpackage.models.transformers_meta import (
    auto_class,
    known_settings,
    score_all_positions,
    scores_positions,
)
from torchdistpackage.tools.undisturbed import keep_random_states

NUM_TOKENS = 12
"""Length of a sample."""
_LARGEST = 20_000_000
"""Most parameters of a copy."""


def small_models(
    config_dict: Mapping[str, Any], heads: int = 4, head: ModelHead | None = None
) -> Iterator[nn.Module]:
    """Yield small copies of the model of a config.json, the smallest first; none if none is made.

    heads: attention heads of a copy, at most. head: in place of the one for the next token.
    Weights are drawn from a seed of their own, in float32 on the CPU.
    """
    settings = known_settings(config_dict, head).to_dict()
    for of_each_kind in (1, 2):
        try:
            small = shrunk(settings, of_each_kind=of_each_kind, heads=heads)
            config = known_settings(without_dropout(small), head)
            with keep_random_states():
                torch.manual_seed(0)
                # float32: a trial compares its numbers, and bf16 would hide a difference
                model = auto_class(head).from_config(config, dtype=torch.float32)
            if head is not None and scores_positions(model, head):
                score_all_positions(model)
        except Exception:
            # any error of a class that nobody has seen: its settings hang together in another way
            continue
        if sum(p.numel() for p in model.parameters()) <= _LARGEST:
            yield model


def sample_ids(config: Any, num_tokens: int = NUM_TOKENS) -> Tensor:
    """Return (2, num_tokens) token ids of the vocabulary of a model with this config."""
    vocab = getattr(config.get_text_config(), "vocab_size", None)
    vocab = vocab if type(vocab) is int and vocab > 0 else 1
    draw = torch.Generator().manual_seed(0)
    return torch.randint(min(3, vocab - 1), vocab, (2, num_tokens), generator=draw)


@dataclass(frozen=True)
class Sample:
    """The tokens that a small copy is tried on. ids (B, S) int64.

    mask: (B, S) int64, 0 where a token is padding; None: there is none. is_causal: the copy
    predicts tokens, and has no other head.
    """

    ids: Tensor
    mask: Tensor | None = None
    is_causal: bool = True

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The keywords of a forward that say what is padding."""
        return {} if self.mask is None else {"attention_mask": self.mask}

    def outputs(self, model: Any) -> Tensor:
        """Return the logits of `model`, or the hidden states of a base class."""
        # classes that write no text know no cache
        options = {"use_cache": False} if self.is_causal else {}
        output = model(input_ids=self.ids, return_dict=True, **self.inputs, **options)
        return output.logits if hasattr(output, "logits") else output.last_hidden_state

    def loss(self, outputs: Tensor) -> Tensor:
        """Return a loss that each of the outputs moves: of the ids, where these are predicted."""
        if self.is_causal:
            # as transformers, which computes losses in float32
            return F.cross_entropy(outputs.flatten(0, 1).float(), self.ids.flatten())
        draw = torch.Generator().manual_seed(1)
        return (outputs * torch.randn(outputs.shape, generator=draw)).mean()


@torch.no_grad()
def moved_away(model: nn.Module) -> nn.Module:
    """Return a copy of `model` with its weights moved away from their initial values, so that those
    that begin at zero count.
    """
    moved = deepcopy(model)
    with keep_random_states():
        torch.manual_seed(2)
        for parameter in moved.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return moved


def module_of(error: BaseException, *models: nn.Module) -> str:
    """Return the innermost module of `models` that was at work, as `path (Class)`.

    The text of an exception says what a class that nobody has seen ran into, such as an index, and
    not which of its modules is to blame; the frames that it went through do.
    """
    frames: list[FrameType] = []
    step = error.__traceback__
    while step is not None:
        frames.append(step.tb_frame)
        step = step.tb_next
    at_work = [frame.f_locals.get("self") for frame in frames]
    # a trial may run a copy of a model, which has other modules under the same paths
    copies = [x for x in at_work if isinstance(x, nn.Module) and type(x) is type(models[0])]
    roots = [*models, *copies]
    paths = {id(module): path for root in roots for path, module in root.named_modules()}
    for module in reversed(at_work):
        if isinstance(module, nn.Module) and paths.get(id(module)):
            return f"{paths[id(module)]} ({type(module).__name__})"
    return type(models[0]).__name__
