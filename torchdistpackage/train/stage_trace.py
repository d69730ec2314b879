"""Count the bytes that the stages of a run keep for their backwards, by running them on fake
tensors.

It serves what no file states: the modules of transformers, a user's own, and the loss of a task.
Stages are made as a run makes them, on fake tensors and without the other ranks
(thread_ranks/alone.py), and go forward and backward with one sample and with two; bytes follow a
line in between and beyond. A fused attention stands in for that of the device, and keeps what that
keeps; experts are chosen alike.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from torchdistpackage.comm import primitives, random
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.tensor_meta import Message, tensors_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import NotAvailableError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.models.transformers_experts import mesh_index_of
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.models.transformers_lora import read_packed
from torchdistpackage.models.transformers_model import TransformersStage
from torchdistpackage.parallel.auto import draws
from torchdistpackage.parallel.context.model import sequence_over
from torchdistpackage.parallel.expert import products
from torchdistpackage.parallel.expert.dispatch import Dispatch, PendingDispatch
from torchdistpackage.parallel.tensor import embedding, loss_terms
from torchdistpackage.parallel.tensor.attention import SequenceAttention
from torchdistpackage.parallel.tensor.four_bit import checked_kernel
from torchdistpackage.plan.memory_fit import asked_places
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.plan.traced_stage import TracedBytes, TracedStage
from torchdistpackage.plan.user_code import add_user_code
from torchdistpackage.thread_ranks.alone import run_alone
from torchdistpackage.tools.activations import storages_of
from torchdistpackage.tools.live_bytes import LiveBytes
from torchdistpackage.tools.undisturbed import keep_random_states
from torchdistpackage.train import build
from torchdistpackage.train.data_build import build_data
from torchdistpackage.train.recompute import recompute_blocks
from torchdistpackage.train.staged_model import Microbatches, StagedModel
from torchdistpackage.train.task import TaskLoss

_HOST = torch.device("cpu")
_Sample = tuple[Tensor, ...]
"""Inputs and targets of the samples of a micro-batch, and positions, if any."""


def traced(plan: Plan, places: Sequence[int] = ()) -> Plan | str:
    """Return the plan with the bytes that its stages keep and the layouts of a user's own model, or
    why they cannot run on fake tensors. places: pipe indices; default: `asked_places`.

    Raises:
        NotAvailableError: transformers is not installed, or too old.
    """
    add_user_code(os.environ)
    try:
        with keep_random_states(_HOST):
            stages, layouts = run_alone(lambda: _trace(plan, places), plan.topology, 0)
    except NotAvailableError:
        raise
    except Exception as error:  # of a model that nobody has seen, whatever it raises
        section = plan.config.model
        name = section.target or section.hf or section.name
        text = str(error).partition("\n")[0][:200]
        if isinstance(error, ModuleNotFoundError):
            return (
                f"activations are not counted: {name} cannot be imported ({text}); run tdp in "
                f"the folder of your modules, or name it in PYTHONPATH"
            )
        return (
            f"activations are not counted: {name} does not run without numbers "
            f"({type(error).__name__}: {text}); let its constructor and forward read no values "
            f"(.item(), .tolist(), boolean masks as indices), or run a step and read its peak"
        )
    return replace(plan, traced=stages, layouts=layouts or plan.layouts)


def _trace(plan: Plan, places: Sequence[int]) -> tuple[dict[int, TracedStage], dict[str, Layout]]:
    """Return the traced stages by number, and the layouts of a user's own model."""
    if plan.packed:  # compares numbers, so it comes before there are none
        lora = cast(TransformersShape, plan.shape).lora
        assert lora is not None and lora.packing is not None
        dtype = getattr(torch, plan.numbers.weights.dtype)
        if lora.packing.bits == 4:
            kind = torch.float32 if dtype == torch.float64 else dtype
            checked_kernel(_HOST, kind, lora.packing.quant_type)
    sample, num = _sample(plan), plan.config.data.rows_per_sample
    indices = sorted({*(places or asked_places(plan))}) if plan.model else asked_places(plan)

    def run(most: int) -> tuple[list[_Rank], list[dict[int, TracedBytes]]]:
        ranks = [_Rank.make(plan, index, most) for index in indices]
        return ranks, [_run(plan, ranks, _times(sample, n)) for n in (num, 2 * num)]

    with FakeTensorMode(allow_non_fake_inputs=True), _stand_ins(plan):
        ranks, traces = run(_ALIKE)
        left_out = {stage: n for rank in ranks for stage, n in rank.left_out.items()}
        if any(left_out.values()):
            longer = run(_ALIKE + 1)[1]
            traces = [
                {stage: x.toward(more[stage], left_out[stage]) for stage, x in bytes_of.items()}
                for bytes_of, more in zip(traces, longer, strict=True)
            ]
    shorter, two = traces
    rows = num * plan.config.data.seq_len // plan.topology.dense.axis_size("context")
    stages = {stage: TracedStage(shorter[stage], two[stage], rows) for stage in shorter}
    if plan.model is not None:
        return stages, {}
    return stages, {name: x for rank in ranks for name, x in rank.model.layouts.items()}


_ALIKE = 2
"""Number of equal transformers blocks to run, and once more with one extra; bytes are linear in the
number."""


def _sample(plan: Plan) -> _Sample:
    """Return one row of a batch: a real one from a user's own source, else full sequences of
    ids.
    """
    config = plan.config
    if config.data.target is not None:
        return tuple(x[:1] for x in build_data(plan).batch("train", config.run.seed, 1, 0, 1, 1))
    ids = torch.zeros(1, config.data.seq_len, dtype=torch.int64)
    return (ids, ids, ids) if config.data.document_masks else (ids, ids)


def _times(sample: _Sample, num: int) -> _Sample:
    """Return fake tensors like the sample's, with `num` rows."""
    return tuple(torch.zeros(num, *x.shape[1:], dtype=x.dtype) for x in sample)


@dataclass
class _Rank:
    """The stages of one pipe index.

    stay: storages that always exist, of weights, gradients and a reference. left_out: for each
    stage, the number of blocks that do not run."""

    model: StagedModel
    task: TaskLoss | None
    stay: set[int]
    left_out: dict[int, int]

    @classmethod
    def make(cls, plan: Plan, index: int, most: int) -> "_Rank":
        """Return the stages with no more than `most` of the blocks that are alike."""
        config, rank = plan.config, plan.topology.dense.rank({"pipe": index})
        sequence = sequence_over(tpc.get_group("context"), config.parallel.cp_comm_type)
        make_stages = build.make_stages
        stage, layouts, loss = make_stages(plan, index, _HOST, sequence)
        for module in stage.children():
            if getattr(module, "to_pack", {}):
                mesh, tensor_index = mesh_index_of(tpc.get_group("tensor"), "tensor")
                read_packed(module, mesh, tensor_index, _HOST, lambda *_: None)
        left_out = {int(name): _shorten(x, most) for name, x in stage.named_children()}
        autocast = torch.bfloat16 if config.precision.dtype == "bf16" else None
        model = StagedModel(plan, rank, _HOST, stage, layouts, loss, autocast, sequence)

        # a reference has no weights to read or to draw either
        def made(of: Plan, device: torch.device, sequence: SequenceAttention) -> Any:
            reference, *others = make_stages(of, index, device, sequence)
            for module in reference.children():
                _shorten(module, most)
            return reference, *others

        with patch.object(build, "_stage", made):
            task = build.build_task(model)
        if config.train.recompute == "blocks":
            recompute_blocks(stage)
        stage.train()
        saved: list[Tensor] = []
        of_task = () if task is None else vars(task).values()
        modules = [stage, *(x.stage for x in of_task if isinstance(x, StagedModel))]
        for module in modules:
            for p in module.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
                saved += [p] if p.grad is None else [p, p.grad]
            saved += module.buffers()
        return cls(model, task, {s._cdata for s in storages_of(saved)}, left_out)


def _shorten(module: nn.Module, most: int) -> int:
    """Keep `most` of the most frequent kind of transformers blocks, and return how many were
    removed."""
    if not isinstance(module, TransformersStage):
        return 0
    kinds: dict[object, list[str]] = {}
    for name in module.block_names():
        block = module.get_submodule(name)
        shapes = tuple((n, p.shape) for n, p in (*block.named_parameters(), *block.named_buffers()))
        kinds.setdefault((type(block), shapes), []).append(name)
    alike = max(kinds.values(), key=len, default=[])
    # of the first and the last, around which sequences are cut and joined, both stay
    left_out = alike[most - 1 : -1]
    for name in left_out:
        parent, _, key = name.rpartition(".")
        del module.get_submodule(parent)._modules[key]
    return len(left_out)


def _run(plan: Plan, ranks: Sequence[_Rank], sample: _Sample) -> dict[int, TracedBytes]:
    """Run the stages in order, each on the output of the one before; a skipped stage passes on the
    first one's output."""
    traces: dict[int, TracedBytes] = {}
    received: Message = None
    rank_of = {s: x for x in ranks for s in map(int, x.model.stage._modules)}
    for stage in sorted(rank_of):
        traces[stage], output = _run_stage(plan, rank_of[stage], stage, received, sample)
        received = received if output is None else output
    return traces


def _run_stage(
    plan: Plan, rank: _Rank, stage: int, received: Message, sample: _Sample
) -> tuple[TracedBytes, Message]:
    """Run one stage forward and backward; return its bytes and its output."""
    model, live = rank.model, LiveBytes()
    inputs, targets = (model.own_part(x) for x in sample[:2])
    positions = tuple(model.to_device(x) for x in sample[2:3]) or None
    batch = Microbatches((inputs,), (targets,), positions)
    is_last = stage == plan.schedule.num_stages - 1
    x = None if received is None else map_tensors(received, _leaf)
    stay = rank.stay | {s._cdata for s in storages_of((inputs, targets))}
    if x is None:
        stay |= {s._cdata for s in storages_of(positions or ())}

    def held(sizes: dict[int, int]) -> dict[int, int]:
        return {key: n for key, n in sizes.items() if key not in stay}

    with live.counting():
        y = _forward(rank, stage, x, batch)()
        members = [each for each in tensors_of(y) if each is not None]
        at_end, most = held(live.sizes), sum(held(live.at_peak).values())
        roots, seeds = [member for member in members if member.requires_grad], None
        if not is_last:
            # what is handed on and its gradient are those of messages, which the plan counts
            seeds = [torch.empty_like(root) for root in roots]
            stay |= {s._cdata for s in storages_of((*members, *seeds))}
        live.reset()
        if roots:  # none before the first adapter
            torch.autograd.backward(roots, seeds)
        backward = sum(held(live.at_peak).values())
    kept_bytes = held(at_end)
    loss = _loss_bytes(plan, kept_bytes, len(inputs) * inputs.shape[1]) if is_last else 0
    stream = 0 if is_last else sum(member.nbytes for member in members)
    total = sum(kept_bytes.values())
    bytes_of_stage = TracedBytes(total - loss, loss, max(most, total), max(backward, total), stream)
    return bytes_of_stage, None if is_last else map_tensors(y, Tensor.detach)


def _leaf(x: Tensor) -> Tensor:
    return torch.empty_like(x, requires_grad=x.is_floating_point())


def _loss_bytes(plan: Plan, kept_bytes: dict[int, int], rows: int) -> int:
    """Return the bytes of kept tensors that are as large as logits are."""
    if plan.shape is None:
        return 0
    shares = {1, plan.topology.dense.axis_size("tensor")}
    elements = {rows * n for t in shares for n in even_sizes(plan.shape.vocab, t)}
    sizes = {item * n for n in elements for item in (2, 4, 8)}
    return sum(n for n in kept_bytes.values() if n in sizes)


def _forward(rank: _Rank, stage: int, x: Message, batch: Microbatches) -> Callable[[], Message]:
    """Return a function that runs a stage, and for the last one also the loss."""
    model, task = rank.model, rank.task
    last = model.plan.schedule.num_stages - 1
    executor: Any = SimpleNamespace(
        schedule=SimpleNamespace(num_microbatches=1),
        is_first_stage=lambda each: each == 0,
        is_last_stage=lambda each: each == last,
    )

    def run(forward: Any, **_: object) -> None:
        with torch.no_grad():
            forward(stage, 0, x)

    def both() -> Message:
        loss, trained = None, batch
        if task is not None:
            loss = task.loss_of_batch(model, executor, run, batch)
            trained = task.trained(batch)
        totals = torch.zeros(2, dtype=torch.float64)
        forward = model.forward_and_loss(
            executor, trained.inputs, trained.targets, totals, trained.position_ids, loss
        )
        return forward(stage, 0, x)

    return both


# -- what stands in for what a run would do with numbers ------------------------------------------


@contextmanager
def _stand_ins(plan: Plan) -> Iterator[None]:
    """Replace functions that read values inside the block."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        enter(patch.object(functional, "scaled_dot_product_attention", _attend))
        for module in (embedding, loss_terms):
            enter(patch.object(module, "check_ids", lambda *_: None))
        # layers draw their weights as they are made, from a seed that is drawn too
        for module in (random, draws):
            enter(patch.object(module, "int", _Unread, create=True))
        if plan.model is None:
            enter(patch.object(nn.Module, "to", _moved))
        enter(patch.object(PendingDispatch, "plan", _chosen_alike))
        enter(patch.object(products, "grouped_linear", _grouped_linear))
        enter(patch.object(primitives, "gather_objects", _gathered))
        if isinstance(plan.shape, TransformersShape):
            # on fake tensors transformers repeats keys and values, which kernels read as they are
            path = "transformers.integrations.sdpa_attention.repeat_kv"
            enter(patch(path, lambda x, _: x))
        yield


def _moved(module: Any, *_: object, dtype: torch.dtype, **__: object) -> Any:
    """Convert the parameters of a module, for which torch would swap tensors without memory."""
    converted: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and p.is_floating_point() and p.dtype != dtype:
                moved = nn.Parameter(p.detach().to(dtype), p.requires_grad)
                part._parameters[name] = converted.setdefault(p, moved)
    return module


def _gathered(value: object, group: Any = None) -> list[object]:
    return [value] * (1 if group is None else group.size())


def _chosen_alike(pending: Any) -> tuple[Dispatch, list[int]]:
    """Return a dispatch in which each expert of each rank gets equally many tokens."""
    group, bounds, order = pending._group, pending._bounds, pending._order
    of_experts = even_sizes(order.numel(), bounds[-1])
    size, index = group.size(), group.rank()
    spans = [slice(*bounds[r : r + 2]) for r in range(size)]
    sent = tuple(sum(of_experts[span]) for span in spans)
    lengths = [list(of_experts[spans[index]])] * size
    blocks = pending._counts[None, spans[index]].expand(size, -1)
    received = (sent[index],) * size
    return Dispatch(order, *pending._size, group, sent, received, blocks, lengths), []


class _Unread(int):
    """A number that is not read from its tensor."""

    def __new__(cls, *_: object, **__: object) -> "_Unread":
        return super().__new__(cls)


def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        # autocast casts a matmul of torch, but knows no operator of ours
        x, weight = x.to(dtype), weight.to(dtype)
    return _GroupedProduct.apply(x, weight)  # type: ignore[no-any-return]


class _GroupedProduct(torch.autograd.Function):
    """Expert matmuls without values that keep what a grouped matmul keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(len(x), weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # which casts what this takes the place of
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _FusedAttention.apply(query, key, value)  # type: ignore[no-any-return]


class _FusedAttention(torch.autograd.Function):
    """Attention without values that keeps what a fused kernel keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # tokens before heads, as fused kernels lay it out, so that joining heads copies nothing
        samples, heads, tokens, _ = query.shape
        output = query.new_empty(samples, tokens, heads, value.shape[-1]).transpose(1, 2)
        dtype = torch.promote_types(query.dtype, torch.float32)
        sums = query.new_empty(query.shape[:-1], dtype=dtype)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in (query, key, value))
