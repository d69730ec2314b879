"""Try on a small copy whether a model's blocks can be split over several stages.

Every cut of the copy is run as two stages in a row and compared with the copy itself, logits and
the gradient of every parameter. A stage runs its blocks once, in their order, and is given the
activations of the block before its first one and nothing else: where a class has it otherwise, the
calls of the blocks in one forward of the copy show which module is in the way.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm.nested import leaves_of
from torchdistpackage.equivalence.compare import first_difference
from torchdistpackage.equivalence.match import elementwise_within
from torchdistpackage.equivalence.record import ParityRecord, parts_of, recording
from torchdistpackage.families.table import StageSides
from torchdistpackage.models.transformers_small import Sample, module_of
from torchdistpackage.parallel.pipeline.partition.hf_decoder import (
    BlockNeighbours,
    base_name,
    base_prefix,
    decoder_stage,
    stage_modules,
)
from torchdistpackage.parallel.pipeline.partition.side_inputs import first_of

_WITHIN = elementwise_within(1e-5, least_noise=1e-11)
"""The same operations in another order of calls, in float32."""


def neighbours(model: Any, around: StageSides) -> BlockNeighbours:
    """Return the modules around the blocks of `model`, as a small copy has shown them."""
    prefix = base_prefix(model)
    blocks = around.blocks.removeprefix(prefix)
    result = BlockNeighbours(model.get_submodule(base_name(model)), blocks)
    result.before = {path.removeprefix(prefix) for path in around.before}
    result.behind = {path.removeprefix(prefix) for path in around.behind}
    result.writes_input, result.token_dim = around.writes_input, around.token_dim
    return result


def try_stages(
    model: Any, sample: Sample, blocks: str, unreached: tuple[str, ...] = ()
) -> tuple[str | None, StageSides]:
    """Return (why the model cannot be staged, or None; what stands around its blocks).

    model: a small copy in float32, in eval mode. blocks: path of its list of blocks. unreached:
    paths of what token ids do not reach, which no stage runs.
    """
    name, sides = type(model).__name__, StageSides(blocks)
    if not blocks:
        return f"{name} has no list of blocks", sides
    prefix = base_prefix(model)
    if not blocks.startswith(prefix):
        return f"the blocks of {name} are not in its {base_name(model)}", sides
    base, path = model.get_submodule(base_name(model)), blocks.removeprefix(prefix)
    around, calls = BlockNeighbours(base, path), BlockCalls(model, blocks)
    with around.seen(), calls.seen():
        expected = _recorded(model, parts_of(model), lambda: sample.outputs(model), sample)
    around.token_dim = calls.token_dim(sample.ids)
    # what no token reaches stands on the last stage, or its parameters would be on several
    around.behind |= {x.removeprefix(prefix) for x in unreached} - around.before
    problem = _shared(model, blocks, around, unreached) or _differs(model, sample, around, expected)
    if problem is not None:
        return unstaged_because(model, blocks, calls, sample.ids) or problem, sides
    both = (tuple(sorted(f"{prefix}{x}" for x in y)) for y in (around.before, around.behind))
    return None, StageSides(blocks, *both, around.writes_input, around.token_dim)


def _differs(
    model: Any, sample: Sample, around: BlockNeighbours, expected: ParityRecord
) -> str | None:
    """Return where two stages in a row compute something else than the model, or None."""
    name, path = type(model).__name__, f"{base_prefix(model)}{around.path}"
    num = len(list(model.get_submodule(path).children()))
    for cut in range(1, num):
        stages = [decoder_stage(model, part, around) for part in (range(cut), range(cut, num))]
        for stage in stages:
            stage.eval()

        def run(first: Any = stages[0], last: Any = stages[1]) -> Tensor:
            message = first(sample.ids, **sample.inputs)
            x = first_of(message)
            version = x._version
            logits = last(message, **sample.inputs)
            around.writes_input |= x._version != version
            return logits

        behind = f"cut behind block {cut} of {num}"
        try:
            record = _recorded(model, stage_modules(stages), run, sample)
            if around.writes_input and not stages[1].copies_input:
                return _differs(model, sample, around, expected)
        except Exception as error:  # of a class that nobody has seen, whatever its forward raises
            at = module_of(error, *stages)
            return (
                f"{name} does not go on from activations in place of token ids: a small copy "
                f"that is {behind} stops in {at}"
            )
        if (finding := first_difference(expected, [record], {}, _WITHIN)) is not None:
            return (
                f"the stages of {name} {behind} do not compute what a small copy of it does "
                f"({finding.brief}), so its blocks share more than the activations that they hand "
                f"on"
            )
    return None


def _shared(
    model: Any, blocks: str, around: BlockNeighbours, unreached: tuple[str, ...]
) -> str | None:
    """Return which parameter is trained beside the blocks, neither before nor behind them, or
    None.
    """
    prefix = base_prefix(model)
    sides = tuple(f"{prefix}{x}." for x in (*around.before, *around.behind))
    sides = (f"{blocks}.", *sides, *(f"{path}." for path in unreached))
    for name, _ in model.named_parameters():
        if not name.startswith(sides) and name.startswith(prefix):
            module = name.rpartition(".")[0]
            kind = type(model.get_submodule(module)).__name__
            return (
                f"{name} stands beside the blocks in {module} ({kind}), and not in what runs "
                f"before or behind them, so it belongs to no stage"
            )
    return None


def _recorded(
    model: nn.Module, modules: Mapping[str, nn.Module], run: Callable[[], Tensor], sample: Sample
) -> ParityRecord:
    """Return the logits of `run`, the inputs and outputs of `modules`, and the gradients of the
    model.
    """
    record = ParityRecord({})
    model.zero_grad()
    with recording(modules, record, first_call=True):
        logits = run()
    sample.loss(logits).backward()
    record.results = [logits.detach()]
    named = model.named_parameters()
    record.grads = {name: p.grad.clone() for name, p in named if p.grad is not None}
    record.initial = dict(model.named_parameters())
    model.zero_grad()
    return record


# -- which module is in the way -----------------------------------------------------------------


@dataclass(frozen=True)
class _BlockCall:
    """One call of a block. output: its activations; more: what it returned beside them."""

    index: int
    given: dict[str, list[Tensor]]
    output: Tensor | None
    more: list[Tensor]


class BlockCalls:
    """The calls of a model's blocks, in their order.

    made: memory of what other modules with parameters returned -> path of the module.
    """

    def __init__(self, model: nn.Module, path: str):
        self.path, self.calls, self.made = path, list[_BlockCall](), dict[int, str]()
        self._model, self.blocks = model, list(model.get_submodule(path).children())
        self._kept: list[Tensor] = []

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Record the blocks' calls of a forward inside."""
        handles = [
            block.register_forward_hook(partial(self._note, index), with_kwargs=True)
            for index, block in enumerate(self.blocks)
        ]
        handles += [
            module.register_forward_hook(partial(self._note_made, path))
            for path, module in self._model.named_modules()
            if not path.startswith(f"{self.path}.") and module._parameters
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_made(self, path: str, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._kept.append(output)  # so that no other tensor has its memory
            self.made[output.untyped_storage().data_ptr()] = path

    def _note(self, index: int, block: Any, args: Any, kwargs: Any, output: Any) -> None:
        names = list(signature(block.forward).parameters)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name: _tensors(value) for name, value in arguments.items()}
        origins = {name: contained for name, contained in tensors.items() if contained}
        first, *more = output if isinstance(output, tuple | list) else (output,)
        first = first if isinstance(first, Tensor) else None
        self.calls.append(_BlockCall(index, origins, first, _tensors(more)))

    def token_dim(self, ids: Tensor) -> int:
        """Return the dim of the sequence in the activations: 2 where streams come first."""
        first = next((call.output for call in self.calls if call.output is not None), ids)
        return 2 if first.dim() == 4 and first.shape[1:3] == ids.shape else 1

    def name(self, index: int) -> str:
        """Return the path and the class of a block."""
        return f"{self.path}.{index} ({type(self.blocks[index]).__name__})"


def unstaged_because(model: nn.Module, path: str, calls: BlockCalls, ids: Tensor) -> str | None:
    """Return which module keeps the blocks at `path` from standing on several stages, and by what;
    None if the calls show none.

    ids: those of the recorded forward.
    """
    num, order = len(calls.blocks), [call.index for call in calls.calls]
    base = path.rpartition(".")[0]
    owner = f"{base} ({type(model.get_submodule(base)).__name__})" if base else type(model).__name__
    if order != list(range(num)):
        uncalled = [i for i in range(num) if i not in order]
        if uncalled:
            return f"{calls.name(uncalled[0])} is not called in a forward of {owner} on token ids"
        return (
            f"{owner} runs its {num} blocks {len(order)} times in a forward, and a stage runs each "
            f"of its own once"
        )
    returned = dict[int, str]()
    for earlier, call in zip(calls.calls, calls.calls[1:], strict=False):
        name, (first, *more) = calls.name(call.index), call.given.items()
        if earlier.output is None:
            return f"{calls.name(earlier.index)} returns no activations, which stages hand on"
        returned |= {id(x): calls.name(earlier.index) for x in earlier.more}
        if not _is_same(first[1][0], earlier.output):
            return (
                f"{name} is not given what the block before it returns, as {owner} computes "
                f"something in between"
            )
        for key, tensors in more:
            for x in tensors:
                if not x.is_floating_point() and x.shape == ids.shape and torch.equal(x, ids):
                    return f"{name} is given the token ids ({key}), which the first stage alone has"
                source = returned.get(id(x))
                if source is None and x.requires_grad and not _is_same(x, earlier.output):
                    source = _made_of(x, model, path)
                if source is None and (other := calls.made.get(x.untyped_storage().data_ptr())):
                    source = f"{other} ({type(model.get_submodule(other)).__name__})"
                if source is not None:
                    return f"{name} is given {key} beside the activations, made by {source}"
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in leaves_of(value) if isinstance(x, Tensor)]


def _is_same(x: Tensor, other: Tensor) -> bool:
    return x is other or (x.shape == other.shape and torch.equal(x, other))


def _made_of(x: Tensor, model: nn.Module, path: str) -> str:
    """Return the module outside the blocks whose parameters make `x`, or "earlier blocks" if none
    does.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    reached, seen, pending = set[str](), set[Any](), [x.grad_fn]
    if x.grad_fn is None and id(x) in names:
        reached.add(names[id(x)])
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None and id(variable) in names:
            reached.add(names[id(variable)])
        pending.extend(following for following, _ in node.next_functions)
    inside = [name for name in reached if name.startswith(f"{path}.")]
    if inside or not reached:
        return "earlier blocks"
    modules = sorted({name.rpartition(".")[0] for name in reached})[:2]
    return " and ".join(f"{x} ({type(model.get_submodule(x)).__name__})" for x in modules)
