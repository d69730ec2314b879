"""Stages of a Hugging Face decoder, cut along its list of blocks.

A stage is the model itself with fewer blocks. It runs the model's own forward, which makes masks
and rotary tables; the last stage also runs the model's own head and loss. Activations enter where
the stage's first block is called and leave where its last block returns. Modules before and after
the blocks that other stages run are left out. When stages are made, they are compared with the
model, so a family whose blocks share anything else is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.equivalence.compare import first_difference
from torchdistpackage.equivalence.match import elementwise_within
from torchdistpackage.equivalence.record import ParityRecord, parts_of, record_results, recording
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.partition.cost_split import split_by_cost
from torchdistpackage.parallel.pipeline.partition.gated_blocks import BlockActivations, make_gated
from torchdistpackage.parallel.pipeline.partition.side_inputs import (
    Message,
    carry,
    first_of,
    side_inputs,
)
from torchdistpackage.tools.undisturbed import in_eval

NUM_TOKENS = 8
"""Length of the sequence on which stages are compared with their model."""
_OPTIONS = {"use_cache": False, "return_dict": True}


class DecoderStage(nn.Module):
    """Consecutive blocks of a decoder; the first stage embeds, the last has the norm and the head.

    Parameters keep the model's names. Calls of all stages take the same keywords. With
    `share_sequences`, only blocks and messages between stages work on slices of the sequence.
    """

    def __init__(
        self,
        model: nn.Module,
        base: nn.Module,
        activations: BlockActivations,
        ends: Sequence[bool],
    ):
        """Create a stage from the cut base of `model`.

        activations: those of its blocks. ends: whether it is the first and the last stage.
        """
        super().__init__()
        self.config, self._prefix = model.config, base_name(model)
        self._activations, (self._is_first, self._is_last) = activations, ends
        if not self._prefix:  # the model has no head, so its children are those of this stage
            for name, child in base._modules.items():
                self.add_module(name, child)
            self.__dict__["_base"] = base
            base.__dict__["_modules"] = self._modules
            return
        self.add_module(self._prefix, base)
        if self._is_last:
            for name, child in model.named_children():
                if name != self._prefix:
                    self.add_module(name, child)
            # kept outside the module tree, because a submodule would change parameter names; it
            # shares this stage's modules
            self.__dict__["_model"] = model_copy = copy(model)
            model_copy.__dict__["_modules"] = self._modules

    @property
    def base(self) -> nn.Module:
        """Return this stage's part of the model without its head."""
        return getattr(self, self._prefix) if self._prefix else self.__dict__["_base"]

    def forward(
        self,
        x: Message,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **more: Any,
    ) -> Message:
        """Run the stage: return activations or, on the last stage, logits (B, S, V) or the loss,
        or the hidden states (B, S, D) of a model without a head.

        x: ids (B, S) on the first stage, else activations (B, S, D) from the previous stage, with
            what goes beside them in a tuple.
        attention_mask, position_ids (B, S), more: the model's keywords, equal for every stage.
        labels (B, S): with them the last stage returns the model's loss.
        """
        sides = self._activations.sides
        x = sides.take(x) if sides is not None and not self._is_first else first_of(x)
        arguments: dict[str, Any] = {"input_ids": x, **_OPTIONS, **more}
        if not self._is_first:
            arguments["inputs_embeds"] = self._activations.whole_like(arguments.pop("input_ids"))
            if sides is not None and sides.inputs is not None:
                arguments["per_layer_inputs"] = sides.inputs
        masks = {"attention_mask": attention_mask, "position_ids": position_ids}
        arguments |= {name: value for name, value in masks.items() if value is not None}
        activations = self._activations
        activations.enters = None if self._is_first else x
        try:
            self.base.training = self.training
            if not self._is_last:
                self.base(**arguments)
                return activations.take()
            if not self._prefix:
                return self.base(**arguments).last_hidden_state
            model = self.__dict__["_model"]
            model.training = self.training
            if labels is None:
                return model(**arguments).logits
            return model(**arguments, labels=labels).loss
        finally:
            activations.enters = activations.left = None
            if sides is not None:
                sides.clear()

    @property
    def copies_input(self) -> bool:
        """True if the model gets a copy of the activations, because it writes into them."""
        return self._activations.copies_input

    @property
    def num_shares(self) -> int:
        """Number of ranks that each have a slice of the sequence between the blocks."""
        return self._activations.num_shares

    def share_sequences(self, group: Group) -> None:
        """Let blocks work on this rank's slice (B, S/n, D) of the sequence.

        Masks, positions and the modules before and after the blocks still see the full sequence.
        """
        self._activations.group = group


def decoder_stages(
    model: nn.Module,
    placement: Sequence[int],
    *,
    costs: Sequence[float] | None = None,
    check: bool = True,
) -> list[DecoderStage]:
    """Return the stages of a transformers causal language model, which share its parameters.

    The model runs once on a few tokens, without dropout.

    placement: for each stage the pipe index that runs it.
    costs: costs of the embedding, each block and the head; None: the sizes of their matrices.
    check: compare logits and loss of all stages in a row with the model's, except on the meta
        device.

    Raises:
        ScheduleError: there is no list of blocks, it is shorter than the stages, or the stages do
            not compute what the model does.
    """
    base = model.get_submodule(base_name(model))
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
    stages = [_stage(model, blocks, around) for blocks in ranges]
    if check and expected is not None:
        _compare(model, stages, expected)
    return stages


def decoder_stage(
    model: nn.Module, blocks: range, around: "BlockNeighbours | None" = None
) -> DecoderStage:
    """Return one stage, with these blocks of a model, which may be on the meta device.

    It does not check that all stages in a row compute what the model does.

    around: the findings of a run of the model or of a small copy; None: run the model once.

    Raises:
        ScheduleError: there is no list of blocks.
    """
    if around is None:
        base = model.get_submodule(base_name(model))
        around = BlockNeighbours(base, path_to_blocks(base))
        _run(model, around)
    return _stage(model, blocks, around)


def _stage(model: nn.Module, blocks: range, around: "BlockNeighbours") -> DecoderStage:
    base = model.get_submodule(base_name(model))
    ends = blocks.start == 0, blocks.stop == len(base.get_submodule(around.path))
    activations = BlockActivations(*ends)
    activations.copies_input, activations.token_dim = around.writes_input, around.token_dim
    owner = base.get_submodule(around.path.rpartition(".")[0])
    activations.sides = side_inputs(owner, base.get_submodule(around.path), blocks)
    cut = cut_blocks(base, around.path.split("."), blocks, ends, around, activations)
    return DecoderStage(model, cut, activations, ends)


def _costs(model: nn.Module, blocks: Sequence[nn.Module]) -> list[float]:
    """Return the sizes of the matrices of embedding (0), blocks and head."""
    heads = [m for name, m in model.named_children() if name != base_name(model)]
    matrices = [
        float(sum(p.numel() for p in module.parameters() if p.dim() > 1))
        for module in (*blocks, *heads)
    ]
    return [0.0, *matrices[: len(blocks)], sum(matrices[len(blocks) :])]


# -- comparison with the model -------------------------------------------------------------------


def _tokens(model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    return (
        torch.arange(NUM_TOKENS, device=device).reshape(1, -1)
        % model.config.get_text_config().vocab_size
    )


def _run(model: nn.Module, around: "BlockNeighbours") -> ParityRecord | None:
    """Return logits and loss of the model on a few tokens; None on the meta device."""
    ids = _tokens(model)

    def run() -> Tensor | tuple[Tensor, Tensor]:
        if ids.is_meta:  # a model with another head takes no ids as labels
            return model(input_ids=ids, **_OPTIONS).logits
        output = model(input_ids=ids, labels=ids, **_OPTIONS)
        return output.logits, output.loss

    try:
        with torch.no_grad(), in_eval(model), around.seen():
            record = record_results({} if ids.is_meta else parts_of(model), run)
    except (RuntimeError, NotImplementedError):
        if ids.is_meta:  # some models cannot run on the meta device
            return None
        raise
    return None if ids.is_meta else record


def stage_modules(stages: Sequence[DecoderStage]) -> dict[str, nn.Module]:
    """Return the modules of all stages by their names in the model.

    All stages have the base module; the result has the last stage's, which returns what the model's
    does.
    """
    return {
        name: module
        for stage in stages
        for name, module in parts_of(stage).items()
        if not isinstance(module, SkippedModule)
    }


def _compare(model: nn.Module, stages: Sequence[DecoderStage], expected: ParityRecord) -> None:
    """Raise ScheduleError if all stages in a row compute something else than the model."""
    x = ids = _tokens(model)
    actual = ParityRecord({})
    *rest, last = stages
    with torch.no_grad(), in_eval(*stages):
        with recording(stage_modules(stages), actual, first_call=True):
            for stage in rest:
                x = stage(x)
            logits = last(x)
        actual.results = [logits, last(x, labels=ids)]
    # tolerance 0: the same operations run in the same order, so not a bit may differ
    if (finding := first_difference(expected, [actual], {}, elementwise_within(0.0))) is not None:
        raise ScheduleError(
            f"the {len(stages)} stages do not compute what {type(model).__name__} does "
            f"({finding.brief}): its blocks share more than their activations, masks and "
            f"positions, or its loss is not of the logits alone (that of routers, "
            f"output_router_logits); cut it with flatten_model"
        )


# -- the model with fewer of its blocks ----------------------------------------------------------


class BlockNeighbours:
    """Names of the modules that the model calls before its blocks, and after them.

    These are modules beside the list of blocks and beside its parents. Their order is that of
    registration, until a run shows the order of calls.

    writes_input: whether the model changes its embedded tokens in place. token_dim: dim of the
    sequence in the activations.
    """

    def __init__(self, base: nn.Module, path: str):
        self.path, self.writes_input, self.token_dim = path, False, 1
        self.before: set[str] = set()
        self.behind: set[str] = set()
        self._modules: dict[str, nn.Module] = {}
        self._first = base.get_submodule(path)[0]
        steps = path.split(".")
        for depth, step in enumerate(steps):
            side = self.before
            for name, child in base.get_submodule(".".join(steps[:depth]))._modules.items():
                if name == step:
                    side = self.behind
                elif child is not None:
                    full = ".".join([*steps[:depth], name])
                    self._modules[full] = child
                    side.add(full)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Watch a forward in the block to see which modules run when; others stay on every
        stage.
        """
        called_before, called_behind = set[str](), set[str]()
        current = [called_before]
        handles = [
            part.register_forward_pre_hook(lambda *_, name=name: current[0].add(name))
            for name, module in self._modules.items()
            # a list is not called, and what it has is
            for part in (module.children() if isinstance(module, nn.ModuleList) else (module,))
        ]
        handles.append(
            self._first.register_forward_pre_hook(lambda *_: current.__setitem__(0, called_behind))
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.before, self.behind = called_before - called_behind, called_behind - called_before


class SkippedModule(nn.Module):
    """A stand-in for a module that another stage runs.

    It returns its input or, for an embedding, a zero that adds nothing. Where it is a list, so
    does each of its items.
    """

    def __getitem__(self, index: int) -> "SkippedModule":
        return self

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        for x in tensors:
            if x.is_floating_point() and x.dim() > 2:
                return x
        return torch.zeros((), device=tensors[0].device if tensors else None)


class KeptBlocks(nn.ModuleList):
    """The blocks of a stage, under their numbers in the model.

    An index counts only this stage's blocks, so that a forward that reads the first block finds it.
    """

    def __getitem__(self, idx: Any) -> Any:
        selected = list(self._modules.values())[idx]
        return nn.ModuleList(selected) if isinstance(selected, list) else selected


def cut_blocks(
    base: nn.Module,
    path: Sequence[str],
    blocks: range,
    ends: tuple[bool, bool],
    around: BlockNeighbours,
    activations: BlockActivations,
    above: str = "",
) -> nn.Module:
    """Return `base` with only some of its blocks, and without modules that other stages run."""
    short, step = copy(base), path[0]
    short._modules = dict(base._modules)
    if "config" in vars(base):  # some inner encoders have none
        short.config = copy(base.config)
        num = len(base.get_submodule(".".join(path)))
        # a block of two sublayers each counts as two there
        is_apart = getattr(base.config, "num_layers", None) == num
        count = "num_layers" if is_apart else "num_hidden_layers"
        setattr(short.config, count, len(blocks))
        if "layer_types" in vars(base.config):  # other configs compute it
            short.config.layer_types = [base.config.layer_types[i] for i in blocks]
    inner = base._modules[step]
    if len(path) > 1:
        name = f"{above}{step}."
        short._modules[step] = cut_blocks(inner, path[1:], blocks, ends, around, activations, name)
    else:
        stage_blocks = KeptBlocks()
        for i in blocks:
            stage_blocks.add_module(str(i), block := copy(inner[i]))
            make_gated(block, activations, i == blocks[0], i == blocks[-1])
        short._modules[step] = stage_blocks
        if activations.sides is not None and activations.sides.has_inputs:
            carry(short, base.config, activations.sides)
    is_first, is_last = ends
    for child, module in base._modules.items():
        if not _is_own(module):
            continue
        if (f"{above}{child}" in around.behind and not is_last) or (
            f"{above}{child}" in around.before and not is_first
        ):
            short._modules[child] = SkippedModule()
    return short


def _is_own(module: nn.Module | None) -> bool:
    """Return whether only one stage runs this module; every stage makes tables of positions."""
    if module is None:
        return False
    return isinstance(module, nn.Dropout) or any(True for _ in module.parameters())


def base_name(model: nn.Module) -> str:
    """Return the name of the child with the blocks, or "" if the model itself is the base.

    It is the class's `base_model_prefix` if that child exists, or else the child with the longest
    list of modules, if that is a model of transformers too or `model` has a head.
    """
    prefix: object = model.base_model_prefix
    if isinstance(prefix, str) and isinstance(getattr(model, prefix, None), nn.Module):
        return prefix
    name = path_to_blocks(model).partition(".")[0]
    is_model = hasattr(getattr(model, name), "base_model_prefix")
    has_head = cast(Any, model).get_output_embeddings() is not None
    return name if is_model or has_head else ""


def base_prefix(model: nn.Module) -> str:
    """Return what names of modules of the base begin with in `model`; "" if it is the base."""
    name = base_name(model)
    return f"{name}." if name else ""


def path_to_blocks(base: nn.Module) -> str:
    """Return the path of the longest list of modules, among those that are in no other list."""
    lists: dict[str, int] = {}
    for name, module in base.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{n}.") for n in lists):
            lists[name] = len(module)
    if not any(lists.values()):
        raise ScheduleError(
            f"{type(base).__name__} has no list of blocks; its children are "
            f"{', '.join(n for n, _ in base.named_children())}; cut it with flatten_model"
        )
    return max(lists, key=lambda name: lists[name])
