"""`MoELayer`: a mixture of experts in place of an MLP, with its experts on the ranks of a group.

Routing is repeated on every tensor rank, on full sequences; only the experts' matmuls are split
there. So the router's gradients are complete, and each tensor rank dispatches its own copy of the
tokens.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.errors import DataError
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.layout.partition import refuse
from torchdistpackage.parallel.expert import shape as numbers
from torchdistpackage.parallel.expert.capacity import kept_choices
from torchdistpackage.parallel.expert.dispatch import PendingDispatch, TokenExchange
from torchdistpackage.parallel.expert.experts import Experts, bounds
from torchdistpackage.parallel.expert.groups import ExpertGroups
from torchdistpackage.parallel.expert.router import TopKRouter
from torchdistpackage.parallel.tensor.init import NORMAL, Initial, make_parameters
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.linear import ParallelMlp
from torchdistpackage.parallel.tensor.marked import Grouped, Marked


class MoELayer(Marked):
    """y = sum over the top k experts of weight x expert(x), plus a shared expert's if there is one.

    x (S, B, D) -> (S, B, D), sequences along dim 0; both (S/n, B, D) under sequence parallelism.
    A backward may follow `loss = task_loss + layer.aux_loss`, which NaiveDDP and ZeroOptimizer
    average over ranks as they do the task's, and which is the mean over this rank's tokens.

    options: as `MoEShape` has them: gated, bias, score, normalize, balance, aux_loss, z_loss,
        capacity_factor, shared_hidden, num_groups, ...
    group: ranks that share the experts; None: tpc's `expert` axis (`tpc.build_moe_groups`), or all
        ranks where tpc is not set up. tensor_group: ranks that share each expert; None: tpc's.
    step_counts: with balance="global_aux_loss" the loss goes by the last step's counts, which
        `balance_experts` or a trainer leaves, not by those of this forward, summed over all ranks.
    attach_loss: the losses' gradient, times the tokens of the forward, joins this layer's backward
        by itself, as a loss that is a sum over tokens needs it; then `aux_loss` is for reading.
    check_nan: a NaN among the scores is an error, which names layer, rank and token. With
        `pad_to_capacity` in training no rank hears of the others' scores: on a CPU the rank with
        the NaN raises, on a device none does.
    pad_to_capacity: all ranks of the group give x of one shape in training.
    name: of the layer, in errors.

    Raises:
        LayoutError: lists what does not fit: options, or experts and channels over ranks.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: Callable[[Tensor], Tensor] | None = None,
        sequence_parallel: bool = False,
        step_counts: bool = False,
        attach_loss: bool = False,
        check_nan: bool = True,
        initial: Initial = NORMAL,
        down_initial: Initial | None = None,
        group: Group | None = None,
        tensor_group: Group | None = None,
        axis: str = "tensor",
        name: str = "",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ):
        super().__init__()
        unknown = options.keys() - {field.name for field in fields(MoEShape)}
        if unknown:
            raise TypeError(
                f"MoELayer has no option {', '.join(sorted(unknown))}; use "
                f"{', '.join(field.name for field in fields(MoEShape))}"
            )
        shape = MoEShape(num_experts=num_experts, top_k=top_k, hidden=hidden, **options)
        self.dim, self.shape, self.axis, self.name = dim, shape, axis, name
        self.sequence_parallel, self.attach_loss = sequence_parallel, attach_loss
        self.check_nan = check_nan
        self.groups = groups = ExpertGroups.found(group, tensor_group, axis)
        problems = shape.check_split(groups.expert.size(), groups.tensor.size())
        if shape.capacity_factor is not None and groups.sequence.size() > 1:
            problems.append(
                f"capacity_factor={shape.capacity_factor:g} counts places in whole sequences, "
                f"which {groups.sequence.size()} context ranks share; leave one of the two out"
            )
        refuse("mixture of experts", problems)
        common = {"dtype": dtype, "device": device}
        self.router = TopKRouter(dim, shape, groups, step_counts=step_counts, name=name, **common)
        if activation is None:
            activation = F.silu if shape.gated else F.gelu
        starts = {"initial": initial, "down_initial": down_initial}
        self.experts = Experts(
            dim, shape, groups, activation=activation, axis=axis, **starts, **common
        )
        self.shared = self.shared_gate = None
        if shape.shared_hidden is not None:
            self.shared = ParallelMlp(
                dim,
                shape.shared_hidden,
                gated=shape.gated,
                activation=activation,
                bias=shape.bias,
                sequence_parallel=sequence_parallel,
                group=groups.tensor,
                axis=axis,
                **starts,
                **common,
            )
        if shape.shared_gate:
            self.shared_gate = _SharedGate(
                dim, sequence_parallel, group=groups.tensor, axis=axis, **common
            )
        self._last = _LastForward()
        self.mark()

    @classmethod
    def of_shape(cls, dim: int, shape: MoEShape, **options: Any) -> "MoELayer":
        """Return the layer of a shape; `options` are further arguments of the class."""
        return cls(
            dim, **{field.name: getattr(shape, field.name) for field in fields(shape)}, **options
        )

    @property
    def aux_loss(self) -> Tensor:
        """The balance and z-loss of the last forward with coefficients and graph, a scalar.

        It is 0 without such a loss, and after a forward in eval mode.
        """
        return torch.zeros(()) if self._last.loss is None else self._last.loss

    def layouts(self) -> Layouts:
        """Return the layout of each parameter, by name."""
        return numbers.layouts(self.shape, self.dim, self.axis, self.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mixture to x (S, B, D), with a result of the same shape.

        Raises:
            DataError: the router's scores are NaN, here or on another rank of the group.
        """
        tensor, expert = self.groups.tensor, self.groups.expert
        inputs = collectives.gather(x, 0, tensor) if self.sequence_parallel else x
        routing = self.router(inputs)
        self._last.loss = routing.weights.new_zeros(()) if routing.loss is None else routing.loss
        # each tensor rank gets a partial gradient from its channels: `copy` sums them
        tokens = collectives.copy(inputs, tensor)
        weights = collectives.copy(routing.weights, tensor)
        pending = PendingDispatch(
            routing.experts,
            self._kept(routing.experts, inputs.shape),
            routing.bad,
            bounds(self.shape.num_experts, expert.size()),
            expert,
            places=self._padded_places(inputs.shape),
        )
        exchange = shared = None
        if self.shared is not None and pending.choices is not None:
            # the device has the shared expert to compute while its host waits for the counts
            rows = pending.choices.rows_of(tokens.flatten(0, 1))
            exchange = TokenExchange(rows, expert, begins_late=True)
            shared = self._shared(x)
        plan, bad = pending.plan()
        if bad and self.check_nan:
            self._refuse_nan(inputs, bad)
        if exchange is not None:
            exchange.begin(plan.sent, plan.received)
        else:
            exchange = plan.start(plan.rows_of(tokens.flatten(0, 1)))
            # the shared expert computes while the tokens travel
            shared = None if self.shared is None else self._shared(x)
        rows = self.experts(exchange.wait(), plan)
        y = plan.combine(plan.send_back(rows), weights).view(inputs.shape)
        is_split = self.sequence_parallel
        y = collectives.reduce_scatter(y, 0, tensor) if is_split else collectives.reduce(y, tensor)
        if shared is not None:
            y = y + shared
        if self.attach_loss and routing.loss is not None:
            y = _AttachLoss.apply(y, routing.loss * (inputs.shape[0] * inputs.shape[1]))
        return y

    def _shared(self, x: Tensor) -> Tensor:
        """Return the output of the shared expert, weighted by its gate."""
        assert self.shared is not None
        y = self.shared(x)
        return y if self.shared_gate is None else self.shared_gate(x) * y

    def _kept(self, experts: Tensor, size: torch.Size) -> Tensor | None:
        """Return which choices (N, k) find a place; None: all do."""
        if self.shape.capacity_factor is None:
            return None
        shape, experts = self.shape, experts.view(*size[:2], -1)
        choices = kept_choices(experts, shape.num_experts, shape.capacity(size[0]))
        if self.training:
            self.router.counter.add_dropped((~choices).sum())
        return choices.flatten(0, 1)

    def _padded_places(self, size: torch.Size) -> int | None:
        """Return the rows sent to each expert, some of which are padding; None: no padding.

        Batches of a validation may differ between ranks, so counts determine sizes there.
        """
        return self.shape.padded_rows(size[0], size[1]) if self.training else None

    def _refuse_nan(self, x: Tensor, bad: list[int]) -> None:
        """Raise DataError for NaN scores on these ranks of the expert group."""
        group = self.groups.expert
        if group.rank() in bad:
            self.router.refuse_nan(x)
        ranks = [ranks_of(group)[r] for r in bad]
        raise DataError(
            f"{self.name or 'mixture of experts'}: the router's scores are NaN on rank "
            f"{', '.join(map(str, ranks))}, whose error names the token; this rank gets tokens "
            "from there"
        )

    def from_full(self, full: Any) -> "MoELayer":
        """Overwrite every parameter with its slice of `full`, without communication.

        full: a layer of one process or its state dict, with experts one by one or fused as in
            transformers.
        """
        state = full.state_dict() if isinstance(full, nn.Module) else full
        experts = {
            k.removeprefix("experts."): v for k, v in state.items() if k.startswith("experts.")
        }
        self.experts.from_full(experts)
        other_weights = {k: v for k, v in state.items() if not k.startswith("experts.")}
        for path, part in self.named_children():
            if part is not self.experts:
                of_part = {
                    k.removeprefix(f"{path}."): v
                    for k, v in other_weights.items()
                    if k.startswith(path + ".")
                }
                part.from_full(of_part) if isinstance(part, ParallelMlp) else part.load_state_dict(
                    of_part
                )
        return self

    def to_full(self, fused: bool = False) -> dict[str, Tensor]:
        """Return copies of the full parameters on every rank, under the names of a one-process
        state dict.

        fused: experts as transformers has them. All ranks of the groups call it.
        """
        tensors = {f"experts.{name}": x for name, x in self.experts.to_full(fused).items()}
        if self.shared is not None:
            tensors |= {f"shared.{name}": x for name, x in self.shared.to_full().items()}
        for path in ("router", "shared_gate"):
            if (part := getattr(self, path)) is not None:
                named = part.named_parameters()
                tensors |= {f"{path}.{name}": x.detach().clone() for name, x in named}
        return tensors

    def extra_repr(self) -> str:
        shape = self.shape
        ranks = self.groups.expert.size()
        return f"{shape.num_experts} experts over {ranks} ranks, top {shape.top_k}, dim {self.dim}"


class _LastForward:
    """Values that a layer keeps from its last forward; copies and pickles start empty."""

    loss: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "_LastForward":
        return _LastForward()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _LastForward, ()


class _SharedGate(Grouped):
    """A sigmoid gate: the weight (..., 1) of the shared expert for each token."""

    def __init__(
        self, dim: int, sequence_parallel: bool, *, group: Group, axis: str, **common: Any
    ):
        super().__init__(group, axis)
        self.dim, self.sequence_parallel = dim, sequence_parallel
        make_parameters(self, common["dtype"], common["device"])

    def layouts(self) -> Layouts:
        partial = (self.axis,) if self.sequence_parallel else ()
        return {"weight": numbers.Layout("weight", (1, self.dim), unreduced=partial)}

    def initials(self) -> dict[str, Initial]:
        return {"weight": NORMAL}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.summed(self.weight) if self.sequence_parallel else self.weight
        return F.linear(x, weight).sigmoid()


class _AttachLoss(torch.autograd.Function):
    """The identity on y, whose backward gives `loss` the gradient 1, like a term of the loss."""

    @staticmethod
    def forward(ctx, y: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, torch.ones_like(ctx.like)
