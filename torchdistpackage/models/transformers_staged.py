"""Whether the blocks of a found family can stand on several stages: tried on a small copy.

Every cut of the copy is run as two stages in a row and compared with the copy itself, logits and
the gradient of every parameter, so that blocks that share anything but what they hand on, or know
their place otherwise, are refused.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.hf_decoder import (
    BlockNeighbours,
    decoder_stage,
    path_to_blocks,
)

_TOLERANCE = 1e-5
"""Of float32, relative to the largest element."""
_OPTIONS = {"use_cache": False, "return_dict": True}


def try_stages(model: Any, ids: Tensor, blocks: str) -> tuple[str | None, tuple[str, ...]]:
    """(why it cannot be staged, or None; paths of what runs before the blocks).

    model: a small copy in float32, in eval mode. ids (B, S). blocks: path of its list of blocks.
    """
    name, prefix = type(model).__name__, model.base_model_prefix
    if not blocks or not prefix or not hasattr(model, prefix):
        return f"{name} has no list of blocks", ()
    base = getattr(model, prefix)
    try:
        path = path_to_blocks(base)
        if f"{prefix}.{path}" != blocks:
            return f"the blocks of {name} are not in its {prefix}", ()
        num = len(base.get_submodule(path))
        around = BlockNeighbours(base, path)
        with around.seen(), torch.no_grad():
            model(input_ids=ids, **_OPTIONS)
        if problem := _shared(model, blocks, around):
            return problem, ()
        expected = _logits_and_gradients(
            model, lambda: model(input_ids=ids, **_OPTIONS).logits, ids
        )
        for cut in range(1, num):
            first = decoder_stage(model, range(cut))
            last = decoder_stage(model, range(cut, num))
            for stage in (first, last):
                stage.eval()
            found = _logits_and_gradients(model, lambda a=first, b=last: b(a(ids)), ids)
            for what, x in expected.items():
                if (off := _distance(found.get(what), x)) > _TOLERANCE:
                    return (
                        f"the stages of {name} cut behind block {cut} of {num} do not compute what "
                        f"it does: {what} of a small copy is off by {off:.1e}, so its blocks share "
                        f"more than the activations that they hand on"
                    ), ()
    except ScheduleError as error:
        return f"{name}: {error}", ()
    except Exception as error:  # of a class that nobody has seen, whatever its forward raises
        return f"{name} cut into stages fails on a small copy: {error!r}", ()
    finally:
        model.zero_grad()
    return None, tuple(sorted(f"{prefix}.{x}" for x in around.before))


def _shared(model: Any, blocks: str, around: BlockNeighbours) -> str | None:
    """What is trained beside the blocks, and neither before nor behind them."""
    prefix = model.base_model_prefix
    sides = tuple(f"{prefix}.{x}." for x in (*around.before, *around.behind))
    for name, _ in model.named_parameters():
        inside = name.startswith((f"{blocks}.", *sides)) or not name.startswith(f"{prefix}.")
        if not inside:
            return f"{name} of {type(model).__name__} is used all along its blocks"
    return None


def _logits_and_gradients(model: nn.Module, run: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = run()
    F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
    found = {"logits": logits.detach()}
    return found | {
        f"the gradient of {name}": p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _distance(found: Tensor | None, expected: Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    scale = expected.abs().max().clamp(min=1e-6)
    return ((found - expected).abs().max() / scale).item()
