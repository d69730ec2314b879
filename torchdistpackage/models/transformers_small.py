"""Small copies of a model of transformers to try things on, and where a trial of one stopped."""

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.models.shrunk_config import shrunk, without_dropout
from torchdistpackage.models.transformers_meta import known_settings
from torchdistpackage.tools.undisturbed import keep_random_states

NUM_TOKENS = 12
"""Length of a sample."""
_LARGEST = 20_000_000
"""Most parameters of a copy."""


def small_models(config_dict: Mapping[str, Any], heads: int = 4) -> Iterator[nn.Module]:
    """Yield small copies of the model of a config.json, the smallest first; none if none is made.

    heads: attention heads of a copy, at most.
    Weights are drawn from a seed of their own, in float32 on the CPU.
    """
    from transformers import AutoModelForCausalLM

    settings = known_settings(config_dict).to_dict()
    for of_each_kind in (1, 2):
        try:
            small = shrunk(settings, of_each_kind=of_each_kind, heads=heads)
            config = known_settings(without_dropout(small))
            with keep_random_states():
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
