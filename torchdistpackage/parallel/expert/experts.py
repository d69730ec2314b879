"""The experts of one rank, under names that do not depend on the number of ranks.

Each matrix of all local experts is one parameter, (local experts, Dout, Din), so an expert without
a token has a gradient of zeros instead of none. A state dict lists them individually, by their
number in the full layer: `3.up.weight`; so it does not depend on how many ranks share the experts.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.attendance import expect_all
from torchdistpackage.layout.derive import blocks, local_shape
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.expert.dispatch import Dispatch
from torchdistpackage.parallel.expert.groups import ExpertGroups
from torchdistpackage.parallel.expert.products import bias_rows, gated_mlps, grouped_linear
from torchdistpackage.parallel.expert.shape import experts_layouts
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.init import NORMAL, ZEROS, Initial, fill
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.marked import Marked
from torchdistpackage.parallel.tensor.row_product import share_of_bias
from torchdistpackage.topology.mesh import Mesh

FUSED = {"gate_up": "gate_up_proj", "up": "up_proj", "down": "down_proj"}
"""Our name of all experts' matrices -> transformers' name, which stores them the same way."""


class Experts(Marked):
    """The experts of one rank at its index among the expert ranks, each split over tensor ranks.

    activation: of the hidden channels, or of the gate where `shape.gated`.
    """

    def __init__(
        self,
        dim: int,
        shape: MoEShape,
        groups: ExpertGroups,
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
        initial: Initial = NORMAL,
        down_initial: Initial | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.dim, self.shape, self.axis = dim, shape, axis
        self.activation, self.initial = activation, initial
        self.down_initial = down_initial or initial
        num_ranks, self.num_tensor = groups.expert.size(), groups.tensor.size()
        # a mark has one group; of a parameter that two cut, the mesh alone knows the ranks
        self.group = groups.expert if self.num_tensor == 1 else None
        self._groups = groups
        self._mesh = Mesh((("expert", num_ranks), (axis, self.num_tensor)))
        self._place = groups.expert.rank() * self.num_tensor + groups.tensor.rank()
        for name, layout in self.layouts().items():
            sizes = local_shape(layout, self._mesh, self._place)
            weight = torch.empty(sizes, dtype=dtype, device=device)
            if not weight.is_meta:
                fill(weight, self.initials()[name])
            self.register_parameter(name, nn.Parameter(weight))
        self.first = bounds(shape.num_experts, num_ranks)[groups.expert.rank()]
        self.num_here = self.down.shape[0]
        self.mark()

    def layouts(self) -> Layouts:
        """Return the layout of each parameter, by name."""
        return experts_layouts(self.shape, self.dim, self.axis)

    def initials(self) -> dict[str, Initial]:
        """Return the initial values of each parameter, by name."""
        return {
            name: ZEROS
            if name.endswith("bias")
            else (self.down_initial if name == "down" else self.initial)
            for name in self.layouts()
        }

    def forward(self, rows: Tensor, plan: Dispatch) -> Tensor:
        """Return the experts' results (n, D) for rows (n, D) in order of arrival.

        With tensor ranks the result is this rank's partial sum.
        """
        if self.shape.gated and not self.shape.bias:
            return gated_mlps(rows, plan, self.gate_up, self.down, self.activation)
        first, counts = "gate_up" if self.shape.gated else "up", plan.counts
        rows = plan.by_expert(rows)
        hidden = grouped_linear(rows, getattr(self, first), counts)
        if self.shape.bias:
            hidden = hidden + bias_rows(getattr(self, f"{first}_bias"), counts, len(rows))
        if self.shape.gated:
            gate, up = hidden.chunk(2, -1)
            hidden = self.activation(gate) * up
        else:
            hidden = self.activation(hidden)
        out = grouped_linear(hidden, self.down, counts)
        if self.shape.bias:
            bias = self.down_bias
            if self.num_tensor > 1:
                bias = share_of_bias(bias, self.num_tensor)
            out = out + bias_rows(bias, counts, len(rows))
        return plan.by_rank(out)

    # -- names that do not depend on the ranks -----------------------------------------------

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        """Save each expert's slice of each parameter under its own name."""
        for name, (part, _) in _one_by_one(dict(self.named_parameters()), self.first).items():
            # as torch's own modules: a state dict has no graph unless it is asked for
            destination[prefix + name] = part if keep_vars else part.detach()

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """Load experts individually, in full or as this rank's slice, or transformers' fused
        matrices.

        Experts of other ranks are skipped.
        """
        entries = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        parameters, layouts = dict(self.named_parameters()), self.layouts()
        own_parts = _one_by_one(parameters, self.first)
        fused = {key: entries[name] for key in parameters if (name := _fused_name(key)) in entries}
        for key, full in fused.items():
            if tuple(full.shape) == layouts[key].shape:
                copy_part(parameters[key], full, layouts[key], self._mesh, self._place)
            else:
                error_msgs.append(_misfit(prefix + _fused_name(key), full, layouts[key].shape))
        for name, (part, key) in own_parts.items():
            if key in fused:
                continue
            if name not in entries:
                missing_keys.append(prefix + name)
            elif (cut := self._cut_of(entries[name], part)) is None:
                error_msgs.append(_misfit(prefix + name, entries[name], part.shape))
            else:
                part.copy_(cut)
        kinds = {name.partition(".")[2] for name in own_parts}
        accepted = {f"{e}.{kind}" for e in range(self.shape.num_experts) for kind in kinds}
        accepted |= {_fused_name(key) for key in fused}
        if strict:
            unexpected_keys += [prefix + name for name in entries if name not in accepted]

    def _cut_of(self, full: Tensor, part: Tensor) -> Tensor | None:
        """Return the channels of `full`, one expert's matrix, that `part` holds; None if they do
        not fit.
        """
        if full.dim() != part.dim():
            return None
        for dim, length in enumerate(part.shape):
            if full.shape[dim] != length:
                if full.shape[dim] != self.shape.hidden:
                    return None
                start = bounds(self.shape.hidden, self.num_tensor)[self._place % self.num_tensor]
                full = full.narrow(dim, start, length)
        return full

    def from_full(self, full: nn.Module | Mapping[str, Tensor]) -> "Experts":
        """Overwrite every parameter with its slice of `full`, which may use any known names."""
        self.load_state_dict(full.state_dict() if isinstance(full, nn.Module) else dict(full))
        return self

    def to_full(self, fused: bool = False) -> dict[str, Tensor]:
        """Return copies of all experts of all ranks by name, individually or `fused` as in
        transformers.

        All ranks of both groups call it.
        """
        for group in (self._groups.tensor, self._groups.expert):
            expect_all("MoELayer.to_full()", group)
        tensors = {name: self._gathered(name) for name, _ in self.named_parameters()}
        if fused:
            return {_fused_name(name): x for name, x in tensors.items()}
        # not views of the stacked tensor: saving one expert would save the memory of all
        return {name: part.clone() for name, (part, _) in _one_by_one(tensors, 0).items()}

    @torch.no_grad()
    def _gathered(self, name: str) -> Tensor:
        """Return the full parameter of this name, assembled from the slices of all ranks."""
        layout, x = self.layouts()[name], getattr(self, name).detach()
        full = x.new_zeros(layout.shape)
        for target, local in blocks(layout, self._mesh, self._place):
            full[target] = x[local]
        if self.axis in layout.split_axes:
            primitives.all_reduce(full, self._groups.tensor)
        return primitives.all_reduce(full, self._groups.expert)


def _one_by_one(named: Mapping[str, Tensor], first: int) -> dict[str, tuple[Tensor, str]]:
    """Return each expert's slice of each parameter and the parameter's name, by state-dict name.

    first: the number of the first expert in `named`.
    """
    parts: dict[str, tuple[Tensor, str]] = {}
    for parameter_name, x in named.items():
        stem = parameter_name.removesuffix("_bias")
        kind = "bias" if parameter_name.endswith("bias") else "weight"
        names = ("gate", "up") if stem == "gate_up" else (stem,)
        for i, expert in enumerate(x):
            for name, part in zip(names, expert.chunk(len(names)), strict=True):
                parts[f"{first + i}.{name}.{kind}"] = part, parameter_name
    return parts


def _fused_name(name: str) -> str:
    """Return the name that transformers gives this parameter."""
    stem = name.removesuffix("_bias")
    return FUSED[stem] + name.removeprefix(stem)


def _misfit(name: str, full: Tensor, shape: Sequence[int]) -> str:
    """Return the message for a tensor of a wrong shape in a state dict."""
    return f"{name} has shape {tuple(full.shape)}, but here it is {tuple(shape)}"


def bounds(num: int, num_ranks: int) -> tuple[int, ...]:
    """Return the first of `num` items of each rank, by the rule of `layouts`, and `num` at the
    end.
    """
    return tuple(accumulate(even_sizes(num, num_ranks), initial=0))
