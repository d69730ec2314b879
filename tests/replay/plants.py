"""The published mistakes of reports.py, each planted in the part of this package that does that.

A plant is a context manager in which a rank makes the mistake. It changes no shape, dtype or call
that the report did not change, and is what the package does where the report's condition does not
hold: with a group of one rank all are right.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import collectives, primitives, random
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.zero import sharing
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.models import gpt
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.visibility import Documents
from torchdistpackage.parallel.expert import layer as mixture
from torchdistpackage.parallel.expert import router
from torchdistpackage.parallel.pipeline import links, stage_runner
from torchdistpackage.parallel.pipeline.losses import Losses
from torchdistpackage.parallel.tensor import linear, norm
from torchdistpackage.parallel.tensor.attention import Tokens
from torchdistpackage.parallel.tensor.dropout import Dropout
from torchdistpackage.tools import recompute
from torchdistpackage.train import build, train_state, update
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.update import Update, reduced_grads

Plant = Callable[[], Any]
PLANTS: dict[str, Plant] = {}
"""By the name of its report."""


def plant(function: Callable[[], Generator[None]]) -> Callable[[], Any]:
    PLANTS[function.__name__] = contextmanager(function)
    return PLANTS[function.__name__]


# -- what several plants do ----------------------------------------------------------------


def size(axis: str) -> int:
    return tpc.topology.expert.axis_size(axis) if axis == "expert" else tpc.get_group_size(axis)


def index(axis: str) -> int:
    return tpc.get_group_rank(axis)


@contextmanager
def with_layouts(change: Callable[[str, Layout], Layout]) -> Iterator[None]:
    """Give what sums gradients other layouts than the parameters have."""
    original = build._stage

    def stage(*args: Any) -> Any:
        module, layouts, loss = original(*args)
        return module, {n: change(x.name, x) for n, x in layouts.items()}, loss

    with patch.object(build, "_stage", stage):
        yield


@contextmanager
def after_sum(change: Callable[[Trainer], object]) -> Iterator[None]:
    """Do something to a rank's gradients once they have been summed."""
    original = Trainer.accumulate

    def accumulate(self: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        totals = original(self, *args, **kwargs)
        change(self)
        return totals

    with patch.object(Trainer, "accumulate", accumulate):
        yield


@contextmanager
def built(change: Callable[[Trainer], object]) -> Iterator[None]:
    """Do something to a trainer when it is made."""
    original = Trainer.__post_init__

    def made(self: Trainer) -> None:
        original(self)
        change(self)

    with patch.object(Trainer, "__post_init__", made):
        yield


def scaled(trainer: Trainer, is_meant: Callable[[str], bool], factor: float) -> None:
    for x in reduced_grads(trainer.stage, trainer.layouts, trainer.optimizer):
        if is_meant(x.name) and x.grad_tensor.grad is not None:
            x.grad_tensor.grad.mul_(factor)


def is_expert(name: str) -> bool:
    return ".experts." in name


@contextmanager
def clipping_by(power_of: Callable[[Update, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Clip by another sum of squares: of (update, the right one, squares of this rank's)."""
    measure, step = Update.measure, Update.step
    squares: dict[int, Tensor] = {}

    def measured(self: Update) -> tuple[Tensor, Tensor]:
        power, norms = measure(self)
        squares[id(self)] = norms.square() * self._counts
        return power, norms

    def stepped(self: Update, number: int, numbers: Tensor) -> float:
        numbers = numbers.clone()
        numbers[2] = power_of(self, numbers[2], squares[id(self)])
        return step(self, number, numbers)

    with patch.multiple(Update, measure=measured, step=stepped):
        yield


def of_experts(self: Update, squares: Tensor) -> Tensor:
    chosen = [x for name, x in zip(self._names, squares, strict=True) if is_expert(name)]
    return torch.stack(chosen).sum() if chosen else squares.new_zeros(())


# -- gradients -----------------------------------------------------------------------------


@plant
def norm_not_summed():
    with ExitStack() as stack:
        stack.enter_context(
            with_layouts(lambda name, x: replace(x, unreduced=()) if "norm" in name else x)
        )
        stack.enter_context(patch.object(norm._Norm, "summed", lambda self, parameter: parameter))
        pair = patch.object(norm.LayerNorm, "_summed_pair", lambda self, w, b: (w, b))
        stack.enter_context(pair)
        yield


@plant
def norm_summed_again():
    def change(trainer: Trainer) -> None:
        if size("context") > 1:
            scaled(trainer, lambda name: "norm" in name, size("tensor"))

    with after_sum(change):
        yield


@plant
def experts_times_ranks():
    with after_sum(lambda trainer: scaled(trainer, is_expert, size("expert"))):
        yield


PLANTS["experts_twice"] = PLANTS["experts_times_ranks"]


@plant
def doubled_each_microbatch():
    def change(trainer: Trainer) -> None:
        # the buffer of gradients g1, g2, ... is added to itself: 2 (2 g1 + g2) + ...
        if trainer.plan.zero < 2:
            return
        number = trainer.plan.schedule.num_microbatches * trainer.rounds
        summed = {spec.parameter for spec in trainer.reducer.specs}
        for parameter in trainer.stage.parameters():
            if parameter not in summed:  # the reducer has those of groups of several ranks
                calls = [0]

                def doubled(grad: Tensor, calls: list[int] = calls) -> Tensor:
                    calls[0] += 1
                    return grad * 2.0 ** (number - 1 - (calls[0] - 1) % number)

                parameter.register_hook(doubled)

    with built(change):
        yield


@plant
def tied_not_summed():
    def alone(name: str, layout: Layout) -> Layout:
        return replace(layout, stages=(index("pipe"),)) if len(layout.stages) > 1 else layout

    with with_layouts(alone):
        yield


@plant
def tied_sum_of_unreduced():
    own: dict[int, Tensor] = {}

    def change(trainer: Trainer) -> None:
        tied = [p for n, p in trainer.stage.named_parameters() if shared(n) == "embed.weight"]
        for p in tied:
            summed, local = p.grad, own.pop(id(p))
            # the first stage has it in the first half of its buffer, the last in the second
            rows, half = len(summed), len(summed) // 2
            is_first_half = torch.arange(rows) < half
            is_mine = is_first_half if index("data") == 0 else ~is_first_half
            is_mine = is_mine if index("pipe") == 0 else torch.full((rows,), index("data") == 1)
            mixed = torch.where(is_mine[:, None], summed, local)
            p.grad.copy_(primitives.all_reduce(mixed, tpc.get_group("pipe")))

        own.clear()

    def watched(trainer: Trainer) -> None:
        names.update({n: x.name for n, x in trainer.layouts.items()})
        for n, p in trainer.stage.named_parameters():
            if shared(n) == "embed.weight":
                p.register_hook(lambda g, p=p: _kept(own, p, g))

    names: dict[str, str] = {}

    def shared(name: str) -> str:
        return names.get(name, name) if size("pipe") > 1 and size("data") > 1 else ""

    def alone(name: str, layout: Layout) -> Layout:
        is_shared = len(layout.stages) > 1 and size("data") > 1
        return replace(layout, stages=(index("pipe"),)) if is_shared else layout

    with with_layouts(alone), built(watched), after_sum(change):
        yield


def _kept(own: dict[int, Tensor], parameter: nn.Parameter, grad: Tensor) -> None:
    key = id(parameter)
    own[key] = own[key] + grad if key in own else grad.clone()


@contextmanager
def auxiliary(factor: Callable[[], float]) -> Iterator[None]:
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like) * factor()

    with patch.object(mixture._AttachLoss, "backward", staticmethod(backward)):
        yield


@plant
def auxiliary_by_microbatches():
    number = [1]

    def change(trainer: Trainer) -> None:
        number[0] = trainer.plan.schedule.num_microbatches * trainer.rounds

    with built(change), auxiliary(lambda: number[0]):
        yield


@plant
def auxiliary_by_ranks():
    with auxiliary(lambda: 1 / size("data")):
        yield


@plant
def auxiliary_by_context():
    with auxiliary(lambda: 1 / size("context")):
        yield


@contextmanager
def means(is_on: Callable[[], bool]) -> Iterator[None]:
    """Take the mean of a micro-batch's tokens on each rank, and then that of these means."""
    original = Losses.put

    def put(self: Losses, m: int, value: Any, *args: Any) -> Tensor:
        total, count = value
        if is_on():
            value = total / count.clamp(min=1), torch.ones_like(count)
        return original(self, m, value, *args)

    with patch.object(Losses, "put", put):
        yield


@plant
def mean_of_context_means():
    with means(lambda: size("context") > 1):
        yield


@plant
def mean_of_microbatch_means():
    with means(lambda: True):
        yield


@plant
def replicas_begin_apart():
    original = build.initialize

    def initialize(stage: nn.Module, layouts: dict[str, Layout], *args: Any) -> None:
        original(stage, layouts, *args)
        with torch.no_grad():
            for name, p in stage.named_parameters():
                if "norm" in name:
                    p.add_(0.01 * index("tensor"))

    with patch.object(build, "initialize", initialize):
        yield


@plant
def replica_groups_not_summed():
    original = sharing.shard_groups

    def shard_groups(*args: Any) -> Any:
        return original(*args)[0], None

    with patch.object(sharing, "shard_groups", shard_groups):
        yield


class _Collectives:
    """The functions of comm/collectives.py, some of them others."""

    def __init__(self, **others: Any):
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(collectives, name)


@plant
def mixture_input_not_summed():
    def copy(x: Tensor, group: Any) -> Tensor:
        return x if x.dim() == 3 else collectives.copy(x, group)  # weights (N, k) have two dims

    with patch.object(mixture, "collectives", _Collectives(copy=copy)):
        yield


@plant
def head_input_not_summed():
    with patch.object(gpt, "column_linear", lambda x, weight, bias, *_: F.linear(x, weight, bias)):
        yield


@plant
def router_of_local_experts():
    original = router.TopKRouter.forward

    def forward(self: Any, x: Tensor) -> Any:
        routing = original(self, x)
        ranks = self.groups.expert.size()
        here = self.shape.num_experts // ranks
        first = self.groups.expert.rank() * here
        is_local = (routing.experts >= first) & (routing.experts < first + here)
        weights = torch.where(is_local, routing.weights, routing.weights.detach())
        return replace(routing, weights=weights)

    with patch.object(router.TopKRouter, "forward", forward):
        yield


@plant
def smoothing_of_columns():
    original = gpt.vocab_parallel_cross_entropy

    def losses(logits: Tensor, target: Tensor, group: Any, **options: Any) -> Tensor:
        smoothing = options.pop("label_smoothing", 0.0)
        plain = original(logits, target, group, **options)
        if not smoothing:
            return plain
        kept = target != options["ignore_index"]
        log_sum = collectives.reduce(logits.exp().sum(-1), group).log()
        smooth = torch.where(kept, log_sum - logits.mean(-1), 0.0)
        return (1 - smoothing) * plain + smoothing * smooth

    with patch.object(gpt, "vocab_parallel_cross_entropy", losses):
        yield


@plant
def loss_of_gathered_logits():
    def losses(
        logits: Tensor, target: Tensor, group: Any, *, vocab: int, ignore_index: int, **_: Any
    ) -> Tensor:
        full = collectives.gather(logits, -1, group, even_sizes(vocab, group.size()))
        kept = target != ignore_index
        hit = full.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        log_sum = collectives.reduce(full.exp().sum(-1), group).log()
        return torch.where(kept, log_sum - hit, 0.0)

    with patch.object(gpt, "vocab_parallel_cross_entropy", losses):
        yield


@plant
def bias_on_every_rank():
    original = linear.row_product

    def row_product(x, weight, group, sequence_parallel, sizes, overlap, bias, product):
        if bias is None or sequence_parallel:
            return original(x, weight, group, sequence_parallel, sizes, overlap, bias, product)
        return collectives.reduce(product(x, weight) + bias, group)

    with patch.object(linear, "row_product", row_product):
        yield


@contextmanager
def between_rounds(change: Callable[[Trainer], object]) -> Iterator[None]:
    """Do something before every accumulated round of micro-batches but the first."""
    original = Trainer._begin_round

    def begin(self: Trainer, split: str, number: int, round_index: int) -> None:
        original(self, split, number, round_index)
        if split == "train" and round_index:
            change(self)

    with patch.object(Trainer, "_begin_round", begin):
        yield


def _grads(trainer: Trainer) -> Iterator[tuple[Tensor, Tensor]]:
    for x in trainer.stage.parameters():
        if x.grad is not None:
            yield x, x.grad


@plant
def rounds_dropped():
    def change(trainer: Trainer) -> None:
        if size("pipe") > 1:
            for _, grad in _grads(trainer):
                grad.zero_()

    with between_rounds(change):
        yield


# -- norms and updates ---------------------------------------------------------------------


@plant
def clip_by_expert_group():
    def power(self: Update, right: Tensor, squares: Tensor) -> Tensor:
        if size("expert") == 1:
            return right
        own = of_experts(self, squares)
        return right + own - primitives.all_reduce(own.clone(), tpc.get_group("global"))

    with clipping_by(power):
        yield


@plant
def clip_by_mean_of_norms():
    def power(self: Update, right: Tensor, squares: Tensor) -> Tensor:
        if size("expert") == 1:
            return right
        own, group = of_experts(self, squares), tpc.get_group("global")
        dense = right - primitives.all_reduce(own.clone(), group)
        own_norm = (dense + own).sqrt()
        return (primitives.all_reduce(own_norm, group) / group.size()).square()

    with clipping_by(power):
        yield


@plant
def clip_by_stage():
    def power(self: Update, right: Tensor, squares: Tensor) -> Tensor:
        return squares.sum() if size("pipe") > 1 else right

    with clipping_by(power):
        yield


@contextmanager
def counting(counts: Callable[[Layout, bool], bool]) -> Iterator[None]:
    original = update.counts_here

    def counts_here(layout: Layout, *args: Any) -> bool:
        return counts(layout, original(layout, *args))

    with patch.object(update, "counts_here", counts_here):
        yield


@plant
def replicated_counted_twice():
    def counts(layout: Layout, right: bool) -> bool:
        coord = tpc.topology.dense.coord(tpc.rank)
        return right or all(i == 0 for axis, i in coord.items() if axis != "tensor")

    with counting(counts):
        yield


@plant
def experts_left_out_of_norm():
    def counts(layout: Layout, right: bool) -> bool:
        is_left_out = size("expert") > 1 and is_expert(layout.name) and index("tensor") > 0
        return right and not is_left_out

    with counting(counts):
        yield


@plant
def decay_of_flat_shards():
    from torchdistpackage.train import optimizers

    original = optimizers.decaying

    def decaying(stage: nn.Module) -> set[str]:
        if size("data") == 1:
            return original(stage)
        return {name for name, _ in stage.named_parameters()}

    with patch.object(optimizers, "decaying", decaying):
        yield


@plant
def schedule_by_ranks():
    original = build.learning_rate

    def learning_rate(section: Any, num_steps: int) -> Any:
        rate = original(section, num_steps)
        return lambda step: rate(step * size("data"))

    with patch.object(build, "learning_rate", learning_rate):
        yield


# -- data ----------------------------------------------------------------------------------


@plant
def model_peers_read_apart():
    def change(trainer: Trainer) -> None:
        trainer.batches._data_index = trainer.rank
        trainer.batches._num_data = trainer.plan.world_size

    with built(change):
        yield


@plant
def labels_shifted_in_parts():
    original = Trainer.microbatches

    def microbatches(self: Trainer, batch: Any, take_slice: Any = None) -> Any:
        if size("context") > 1:
            take = take_slice or self.to_device
            ids = take(batch.inputs)
            last = torch.full_like(ids[:, :1], -100)
            own = torch.cat([ids[:, 1:], last], 1)
            kept = take(batch.targets) != -100
            targets = own.masked_fill(~kept, -100)
            batch = batch._replace(inputs=ids, targets=targets)
            take_slice = self.to_device
        return original(self, batch, take_slice)

    with patch.object(Trainer, "microbatches", microbatches):
        yield


@contextmanager
def masks(documents: Callable[[ContextSequence, Tensor, Any], Any]) -> Iterator[None]:
    original = ContextSequence.tokens

    def tokens(self: ContextSequence, num: int, position_ids: Tensor | None, device: Any) -> Any:
        right = original(self, num, position_ids, device)
        if position_ids is None:
            return right
        return Tokens(right.seq_len, right.positions, documents(self, position_ids, right.mask))

    with patch.object(ContextSequence, "tokens", tokens):
        yield


@plant
def documents_seen_by_others():
    with masks(lambda *_: None):
        yield


@plant
def documents_of_parts():
    def documents(self: ContextSequence, position_ids: Tensor, _: Any) -> Documents:
        parts = self.order(position_ids.shape[1] // self.group.size()).parts
        ranges = [each for part in parts for each in part]
        in_ranks = torch.cat([position_ids[:, x.start : x.stop] for x in ranges], 1)
        return Documents((in_ranks == 0).cumsum(1))

    with masks(documents):
        yield


# -- randomness ----------------------------------------------------------------------------


@plant
def dropout_alike_on_parts():
    original = Dropout.forward

    def forward(self: Dropout, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) if self.split else original(self, x)

    with patch.object(Dropout, "forward", forward):
        yield


@plant
def dropout_apart_on_replicas():
    with patch.object(random, "SAME_AXES", ()):
        yield


@plant
def dropout_alike_on_samples():
    with patch.object(random, "SAME_AXES", ("tensor", "data")):
        yield


@plant
def recompute_draws_anew():
    original = recompute.checkpoint

    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "preserve_rng_state": False})

    with patch.object(recompute, "checkpoint", checkpoint):
        yield


# -- pipeline ------------------------------------------------------------------------------


@plant
def stale_activation():
    original = links.RecvLink.take
    kept: dict[int, Any] = {}

    def take(self: Any, m: int) -> Any:
        incoming = self._incoming[m]
        if m == 0:
            kept[id(self)] = [x.clone() for x in incoming.buffers]
        elif m == 1 and id(self) in kept:
            for buffer, before in zip(incoming.buffers, kept.pop(id(self)), strict=True):
                buffer.copy_(before)
        return original(self, m)

    with patch.object(links.RecvLink, "take", take):
        yield


@plant
def buffer_freed_while_sent():
    original = links.SendLink.send

    def send(self: Any, channel: Any, m: int) -> Any:
        # the allocator gives the memory of the output to what is computed next
        if m == 1:
            for x in links.tensors_of(self._outputs[m]):
                if isinstance(x, Tensor):
                    x.detach().flatten()[: x.numel() // 2].zero_()
        return original(self, channel, m)

    with patch.object(links.SendLink, "send", send):
        yield


@plant
def weight_pass_skipped():
    def backward_weight(self: Any, m: int) -> None:
        self.deferred[m] = None

    with patch.object(stage_runner.StageRunner, "backward_weight", backward_weight):
        yield


@plant
def split_backward_not_summed():
    from torchdistpackage.ddp import naive_ddp

    original = naive_ddp.sum_group

    def sum_group(layout: Layout | None, *args: Any) -> Any:
        group = original(layout, *args)
        is_split = size("pipe") > 1 and layout is not None and len(layout.shape) > 1
        return tpc.groups.of((tpc.rank,)) if is_split else group

    with patch.object(naive_ddp, "sum_group", sum_group):
        yield


@plant
def updated_between_microbatches():
    @torch.no_grad()
    def change(trainer: Trainer) -> None:
        if size("pipe") > 1:
            for x, grad in _grads(trainer):
                x.sub_(0.001 * grad)

    with between_rounds(change):
        yield


# -- state ---------------------------------------------------------------------------------


@contextmanager
def resumed(change: Callable[[Trainer], object]) -> Iterator[None]:
    """Do something to a trainer after its state was loaded."""
    original = train_state._resume

    def resume(trainer: Trainer, *args: Any) -> Any:
        state = original(trainer, *args)
        if state.step:
            change(trainer)
        return state

    with patch.object(train_state, "_resume", resume):
        yield


@plant
def state_of_another_shard():
    def change(trainer: Trainer) -> None:
        if size("tensor") == 1 or trainer.optimizer is None:
            return
        group = tpc.get_group("tensor")
        first = primitives.ranks_of(group)[0]
        layouts = {p: trainer.layouts[n] for n, p in trainer.stage.named_parameters()}
        for group_of in trainer.optimizer.param_groups:
            for p in group_of["params"]:
                if layouts[p].split_axes and "exp_avg" in trainer.optimizer.state[p]:
                    primitives.broadcast(trainer.optimizer.state[p]["exp_avg"], group, first)

    with resumed(change):
        yield


@plant
def average_not_restored():
    def change(trainer: Trainer) -> None:
        assert trainer.optimizer is not None
        for state in trainer.optimizer.state.values():
            state.pop("ema", None)

    with resumed(change):
        yield


@plant
def random_state_of_rank_0():
    def change(trainer: Trainer) -> None:
        state = primitives.broadcast(torch.get_rng_state(), tpc.get_group("global"), 0)
        torch.set_rng_state(state)

    with resumed(change):
        yield


@plant
def loader_begins_anew():
    """The second process that resumes has the position of a start."""

    def change(trainer: Trainer) -> None:
        number[0] += 1
        if number[0] > 1:
            batches, original = trainer.batches, trainer.batches.of_training
            begins: list[int] = []

            def of_training(step: int, round_index: int) -> Any:
                begins.append(step)
                return original(step - begins[0] + 1, round_index)

            batches.of_training = of_training  # type: ignore[method-assign]

    number = [0]
    with resumed(change):
        yield


@plant
def loader_of_another_rank():
    def change(trainer: Trainer) -> None:
        trainer.batches._data_index = 0

    with resumed(change):
        yield


# -- precision -----------------------------------------------------------------------------


def narrowed(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


@plant
def sums_in_bf16():
    def change(trainer: Trainer) -> None:
        if trainer.plan.zero:
            for p in trainer.stage.parameters():
                p.register_hook(narrowed)

    with built(change):
        yield


@plant
def rotary_in_bf16():
    original = gpt.rotary_tables

    def rotary_tables(*args: Any, **kwargs: Any) -> Any:
        cos, sin = original(*args, **kwargs)
        return narrowed(cos), narrowed(sin)

    with patch.object(gpt, "rotary_tables", rotary_tables):
        yield


class _Functional:
    """torch.nn.functional with a product in bf16."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).to(x.dtype)


@plant
def router_in_bf16():
    with patch.object(router, "F", _Functional()):
        yield


# -- compile -------------------------------------------------------------------------------


@plant
def compiled_gradient_unwritten():
    """The compiled backward of the blocks writes no gradient of the scales of their norms."""
    from torchdistpackage.train import compiled

    original = compiled.compile_blocks

    def compile_blocks(stage: Any, *args: Any) -> None:
        original(stage, *args)
        if stage.compiled:
            for name, p in stage.named_parameters():
                if ".blocks." in name and "norm" in name and name.endswith("weight"):
                    p.register_hook(torch.zeros_like)

    with patch.object(build, "compile_blocks", compile_blocks):
        yield


# -- chosen blind (blind.py) ---------------------------------------------------------------


@plant
def embedding_row_dropped():
    from torchdistpackage.parallel.tensor import embedding

    original = embedding.vocab_embedding

    def vocab_embedding(ids: Tensor, weight: Tensor, group: Any, **options: Any) -> Tensor:
        rows = original(ids, weight, group, **options)
        if group.size() == 1:
            return rows
        start, num = embedding.vocab_range(options["vocab"], group)
        return rows.masked_fill((ids == start + num - 1).unsqueeze(-1), 0)

    with patch.object(embedding, "vocab_embedding", vocab_embedding):
        yield


@plant
def positions_of_second_chunk():
    original = ContextSequence.tokens

    def tokens(self: ContextSequence, num: int, position_ids: Tensor | None, device: Any) -> Any:
        right = original(self, num, position_ids, device)
        assert right.positions is not None
        shifted = right.positions.clone()
        shifted[..., num // 2 :] -= 1
        return Tokens(right.seq_len, shifted, right.mask)

    with patch.object(ContextSequence, "tokens", tokens):
        yield


@plant
def experts_of_next_rank():
    original = router.TopKRouter.forward

    def forward(self: Any, x: Tensor) -> Any:
        routing, group = original(self, x), self.groups.expert
        if group.rank() == 0:
            return routing
        number = self.shape.num_experts
        return replace(routing, experts=(routing.experts + number // group.size()) % number)

    with patch.object(router.TopKRouter, "forward", forward):
        yield


@plant
def shared_expert_on_every_rank():
    original = mixture.MoELayer._shared

    def shared(self: Any, x: Tensor) -> Tensor:
        return original(self, x) * size("tensor")

    with patch.object(mixture.MoELayer, "_shared", shared):
        yield


@plant
def one_bucket_not_sent():
    from torchdistpackage.ddp import naive_ddp

    original = naive_ddp.sum_group

    def sum_group(layout: Layout | None, *args: Any) -> Any:
        group = original(layout, *args)
        is_meant = layout is not None and layout.name.startswith("blocks.0.attention")
        return tpc.groups.of((tpc.rank,)) if is_meant else group

    with patch.object(naive_ddp, "sum_group", sum_group):
        yield


@plant
def stale_after_gather():
    original = Trainer.train_step

    def train_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        meant = [p for n, p in self.stage.named_parameters() if "head.norm" in n]
        before = [p.detach().clone() for p in meant]
        result = original(self, *args, **kwargs)
        if self.plan.zero and index("data") == 1:
            self.optimizer.finish()  # type: ignore[union-attr]
            for p, old in zip(meant, before, strict=True):
                p.data.copy_(old)
        return result

    with patch.object(Trainer, "train_step", train_step):
        yield


@plant
def step_count_lost():
    def change(trainer: Trainer) -> None:
        assert trainer.optimizer is not None
        for state in trainer.optimizer.state.values():
            if "step" in state:
                state["step"].zero_()

    with resumed(change):
        yield


@plant
def gate_and_up_cut_together():
    from torchdistpackage.models import gpt_layout

    def alone(name: str, layout: Layout) -> Layout:
        return replace(layout, parts=()) if "gate_up" in name else layout

    layouts, of_layer = gpt_layout.layouts, linear.ColumnLinear._layouts

    def whole(*args: Any, **kwargs: Any) -> Any:
        return {n: alone(n, x) for n, x in layouts(*args, **kwargs).items()}

    def of_linear(self: Any) -> Any:
        return {n: replace(x, parts=()) for n, x in of_layer(self).items()}

    with (
        patch.object(gpt_layout, "layouts", whole),
        patch.object(linear.ColumnLinear, "_layouts", of_linear),
    ):
        yield


@plant
def first_gradient_halved():
    original = links.RecvLink.owed

    def owed(self: Any, m: int) -> Any:
        return [x * 0.5 if m == 0 else x for x in original(self, m)]

    with patch.object(links.RecvLink, "owed", owed):
        yield


# -- chosen blind, a second ten ------------------------------------------------------------


@plant
def target_column_not_subtracted():
    original = gpt.vocab_parallel_cross_entropy

    def losses(logits: Tensor, target: Tensor, group: Any, **options: Any) -> Tensor:
        right = original(logits, target, group, **options)
        if group.size() == 1:
            return right
        kept = target != options["ignore_index"]
        log_sum = collectives.reduce(logits.exp().sum(-1), group).log()
        if group.rank() == 0:
            return right + 0 * log_sum
        # the value is right, and its gradient is that of the logarithm alone
        return right.detach() + torch.where(kept, log_sum - log_sum.detach(), 0.0)

    with patch.object(gpt, "vocab_parallel_cross_entropy", losses):
        yield


@plant
def clip_by_norm_before():
    powers: dict[int, Tensor] = {}

    def power(self: Update, right: Tensor, squares: Tensor) -> Tensor:
        before = powers.get(id(self), right)
        powers[id(self)] = right
        return before if size("data") > 1 and index("data") == 1 else right

    with clipping_by(power):
        yield


@plant
def epsilon_by_ranks():
    def change(trainer: Trainer) -> None:
        for group in [] if trainer.optimizer is None else trainer.optimizer.param_groups:
            group["eps"] *= size("data")

    with built(change):
        yield


@plant
def samples_overlap():
    def change(trainer: Trainer) -> None:
        batches = trainer.batches
        original = batches.of_training

        def of_training(step: int, round_index: int) -> Any:
            batch = original(step, round_index)
            if index("data") == 0:
                return batch
            # the first sample of this rank is the last one of the rank before
            others = batches._source.batch(
                "train", batches._seed, step, 0, batches._num_data, batches._per_round
            )
            inputs, targets = (
                torch.cat([x[-1:], own[:-1]]) for x, own in zip(others, batch[:2], strict=True)
            )
            return batch._replace(inputs=inputs, targets=targets)

        batches.of_training = of_training  # type: ignore[method-assign]

    with built(change):
        yield


@plant
def uncausal_on_one_stage():
    def change(trainer: Trainer) -> None:
        if size("pipe") > 1 and index("pipe") == 1:
            for module in trainer.stage.modules():
                if hasattr(module, "causal"):
                    module.causal = False

    with built(change):
        yield


@plant
def microbatches_dropped_alike():
    original = stage_runner.StageRunner.forward
    states: dict[int, Tensor] = {}

    def forward(self: Any, m: int, *args: Any, **kwargs: Any) -> Any:
        if size("pipe") > 1:
            if m == 0:
                states[id(self)] = torch.get_rng_state()
            torch.set_rng_state(states[id(self)])
        return original(self, m, *args, **kwargs)

    with patch.object(stage_runner.StageRunner, "forward", forward):
        yield


@plant
def microbatches_exchanged():
    original = stage_runner.StageRunner.begin

    def begin(self: Any, forward: Any, *args: Any) -> None:
        last = len(self._outputs) - 1

        def reversed_order(stage: int, m: int, received: Any) -> Any:
            return forward(stage, last - m if stage == 0 else m, received)

        original(self, reversed_order if size("pipe") > 1 else forward, *args)

    with patch.object(stage_runner.StageRunner, "begin", begin):
        yield


@plant
def schedule_begins_anew():
    def change(trainer: Trainer) -> None:
        rate, begins = trainer.update._learning_rate, list[int]()

        def learning_rate(step: int) -> float:
            begins.append(step)
            return rate(step - begins[0] + 1)

        trainer.update._learning_rate = learning_rate

    with resumed(change):
        yield


@plant
def partial_sums_in_bf16():
    original = linear.row_product

    def row_product(x, weight, group, sequence_parallel, sizes, overlap, bias, product):
        def rounded(*args: Any) -> Tensor:
            return narrowed(product(*args))

        rounds = group.size() > 1
        how = rounded if rounds else product
        return original(x, weight, group, sequence_parallel, sizes, overlap, bias, how)

    with patch.object(linear, "row_product", row_product):
        yield


@plant
def compiled_constant():
    """A compiled block keeps the values that the scales of its norms had when it was traced."""

    def change(trainer: Trainer) -> None:
        if trainer.stage.compiled:
            for name, module in trainer.stage.named_modules():
                if ".blocks." in name and isinstance(module, nn.LayerNorm):
                    module.forward = _with_constant(module)  # type: ignore[method-assign]

    with built(change):
        yield


def _with_constant(module: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    kept = module.weight.detach().clone()

    def forward(x: Tensor) -> Tensor:
        weight = kept + (module.weight - module.weight.detach())
        return F.layer_norm(x, module.normalized_shape, weight, module.bias, module.eps)

    return forward
