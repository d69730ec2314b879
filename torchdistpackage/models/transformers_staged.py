"""Whether the blocks of a found family can stand on several stages: tried on a small copy.

Every cut of the copy is run as two stages in a row and compared with the copy itself, logits and
the gradient of every parameter. Of blocks that cannot be cut, `unstaged_because` says which module
is in the way.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.equivalence.compare import first_difference
from torchdistpackage.equivalence.match import elementwise_within
from torchdistpackage.equivalence.record import ParityRecord, parts_of, recording
from torchdistpackage.families.table import StageSides
from torchdistpackage.models.transformers_blocks import BlockCalls, unstaged_because
from torchdistpackage.models.transformers_stops import module_of
from torchdistpackage.parallel.pipeline.partition.hf_decoder import (
    BlockNeighbours,
    base_name,
    decoder_stage,
    stage_modules,
)

_WITHIN = elementwise_within(1e-5, least_noise=1e-11)
"""The same operations in another order of calls, in float32."""
_OPTIONS = {"use_cache": False, "return_dict": True}


def neighbours(model: Any, around: StageSides) -> BlockNeighbours:
    """Return what stands around the blocks of `model`, as a small copy has shown it."""
    prefix = base_name(model)
    blocks = around.blocks.removeprefix(f"{prefix}.")
    found = BlockNeighbours(model.get_submodule(prefix), blocks)
    found.before = {path.removeprefix(f"{prefix}.") for path in around.before}
    found.behind = {path.removeprefix(f"{prefix}.") for path in around.behind}
    found.writes_input = around.writes_input
    return found


def try_stages(
    model: Any, ids: Tensor, blocks: str, unreached: tuple[str, ...] = ()
) -> tuple[str | None, StageSides]:
    """(why it cannot be staged, or None; what stands around its blocks).

    model: a small copy in float32, in eval mode. ids (B, S). blocks: path of its list of blocks.
    unreached: paths of what token ids do not reach, which no stage runs.
    """
    name, sides = type(model).__name__, StageSides(blocks)
    if not blocks:
        return f"{name} has no list of blocks", sides
    prefix = base_name(model)
    if not blocks.startswith(f"{prefix}."):
        return f"the blocks of {name} are not in its {prefix}", sides
    base, path = model.get_submodule(prefix), blocks.removeprefix(f"{prefix}.")
    around, calls = BlockNeighbours(base, path), BlockCalls(model, blocks)
    with around.seen(), calls.seen():
        expected = _recorded(
            model, parts_of(model), lambda: model(input_ids=ids, **_OPTIONS).logits, ids
        )
    # what no token reaches stands on the last stage, or its parameters would be on several
    around.behind |= {x.removeprefix(f"{prefix}.") for x in unreached} - around.before
    problem = _shared(model, blocks, around, unreached) or _differs(model, ids, around, expected)
    if problem is not None:
        return unstaged_because(model, blocks, calls, ids) or problem, sides
    both = (tuple(sorted(f"{prefix}.{x}" for x in y)) for y in (around.before, around.behind))
    return None, StageSides(blocks, *both, around.writes_input)


def _differs(
    model: Any, ids: Tensor, around: BlockNeighbours, expected: ParityRecord
) -> str | None:
    """Where stages in a row do not compute what the model does."""
    name, path = type(model).__name__, f"{base_name(model)}.{around.path}"
    num = len(list(model.get_submodule(path).children()))
    for cut in range(1, num):
        stages = [decoder_stage(model, part, around) for part in (range(cut), range(cut, num))]
        for stage in stages:
            stage.eval()

        def run(first: Any = stages[0], last: Any = stages[1]) -> Tensor:
            x = first(ids)
            version = x._version
            logits = last(x)
            around.writes_input |= x._version != version
            return logits

        behind = f"cut behind block {cut} of {num}"
        try:
            found = _recorded(model, stage_modules(stages), run, ids)
            if around.writes_input and not stages[1].copies_input:
                return _differs(model, ids, around, expected)
        except Exception as error:  # of a class that nobody has seen, whatever its forward raises
            at = module_of(error, *stages)
            return (
                f"{name} does not go on from activations in place of token ids: a small copy "
                f"that is {behind} stops in {at}"
            )
        if (finding := first_difference(expected, [found], {}, _WITHIN)) is not None:
            return (
                f"the stages of {name} {behind} do not compute what a small copy of it does "
                f"({finding.brief}), so its blocks share more than the activations that they hand "
                f"on"
            )
    return None


def _shared(
    model: Any, blocks: str, around: BlockNeighbours, unreached: tuple[str, ...]
) -> str | None:
    """What is trained beside the blocks, and neither before nor behind them."""
    prefix = base_name(model)
    sides = tuple(f"{prefix}.{x}." for x in (*around.before, *around.behind))
    sides = (f"{blocks}.", *sides, *(f"{path}." for path in unreached))
    for name, _ in model.named_parameters():
        if not name.startswith(sides) and name.startswith(f"{prefix}."):
            module = name.rpartition(".")[0]
            kind = type(model.get_submodule(module)).__name__
            return (
                f"{name} stands beside the blocks in {module} ({kind}), and not in what runs "
                f"before or behind them, so it belongs to no stage"
            )
    return None


def _recorded(
    model: nn.Module, modules: Mapping[str, nn.Module], run: Callable[[], Tensor], ids: Tensor
) -> ParityRecord:
    """Return the logits of `run`, what `modules` got and gave, and the gradients of the model."""
    record = ParityRecord({})
    model.zero_grad()
    with recording(modules, record, first_call=True):
        logits = run()
    F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten()).backward()
    record.results = [logits.detach()]
    named = model.named_parameters()
    record.grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
    record.initial = dict(model.named_parameters())
    model.zero_grad()
    return record
