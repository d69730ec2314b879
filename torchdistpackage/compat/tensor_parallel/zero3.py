"""Stage 3 of ZeRO for threads: weights that tensor parallelism leaves whole are cut evenly over the
shards.

Each parameter is flattened and cut; shard r holds the r-th pieces of all in one flat parameter,
padded to the length of the longest. The full tensors are joined for one forward and let go of
behind it; autograd keeps what the backward needs and gives the pieces their gradients.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction
from torchdistpackage.compat.tensor_parallel.joined_copies import JoinedCopies
from torchdistpackage.compat.tensor_parallel.places import Place, places_of, stand_in
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.auto.nested import find_tied_weight_aliases
from torchdistpackage.parallel.auto.reporting import LOG


class ShardingManager(nn.Module):
    """The flat parameters of a `TensorParallel` module, whose parameters it takes away.

    flat_shards: for each dtype, and for trained and frozen ones apart, one for each shard.
    sharded_param_names: names in a shard.

    Raises:
        RuntimeError: parameters are on the meta device, without numbers to cut.
        LayoutError: a name is not that of a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        world_size: int | None = None,
        replicated_param_names: Collection[str] | None = None,
    ):
        super().__init__()
        shards: Any = module.module_shards
        self.preserve_shards_when_saving = True
        self.world_size = world_size if world_size is not None else len(shards)
        self.flat_shards = nn.ParameterList()
        self.sharded_param_names: tuple[str, ...] = ()
        self._places: list[dict[str, list[Place]]] = []
        self._groups: list[list[str]] = []
        self._shapes: dict[str, torch.Size] = {}
        if len(shards) == 1:
            return
        if replicated_param_names is None:
            if any(p.is_meta for p in module.parameters()):
                raise RuntimeError(
                    "parameters on the meta device have no numbers to cut; pass sharded=False, "
                    "load the weights, then call apply_sharding()"
                )
            cut: Any = module.modified_parameters_names
            replicated_param_names = [n for n, _ in shards[0].named_parameters() if n not in cut]
        self.sharded_param_names = tuple(replicated_param_names)
        if not self.sharded_param_names:
            LOG.warning(
                "there is no parameter to shard, because tensor parallelism cuts all of them; "
                "pass sharded=False"
            )
            return
        self._places = [places_of(shard, self.sharded_param_names) for shard in shards]
        aliases = {names[0]: names for names in find_tied_weight_aliases(shards[0]).values()}
        ids = {id(p): n for n, p in shards[0].named_parameters()}
        every = dict(shards[0].named_parameters(remove_duplicate=False))
        self._names = {n: aliases[ids[id(every[n])]] for n in self.sharded_param_names}
        self._take(shards)

    @torch.no_grad()
    def _take(self, shards: Any) -> None:
        parameters = [dict(shard.named_parameters(remove_duplicate=False)) for shard in shards]
        kinds: dict[tuple[torch.dtype, bool], list[str]] = {}
        for name in self.sharded_param_names:
            parameter = parameters[0][name]
            self._shapes[name] = parameter.shape
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(name)
        for (_, trained), names in kinds.items():
            pieces = [
                torch.cat(
                    [parameters[r][n].flatten().tensor_split(self.world_size)[r] for n in names]
                )
                for r in range(self.world_size)
            ]
            longest = max(len(piece) for piece in pieces)
            for piece in pieces:
                padding = piece.new_zeros(longest - len(piece))
                self.flat_shards.append(nn.Parameter(torch.cat([piece, padding]), trained))
            self._groups.append(names)
        for places in self._places:
            for holders in places.values():
                for place in holders:
                    place[0]._parameters.pop(place[1], None)
                    stand_in(place, None)

    def full_tensors(self, rank: int) -> dict[str, Tensor]:
        """Return each parameter whole, on the device of shard `rank`, as part of the graph."""
        tensors: dict[str, Tensor] = {}
        num = self.world_size
        for at, names in enumerate(self._groups):
            flats = [self.flat_shards[at * num + r] for r in range(num)]
            flats = [flat.to(flats[rank].device) for flat in flats]
            lengths = [self._shapes[name].numel() for name in names]
            pieces = [
                flat.split(
                    [
                        *(lengths_here := [even_sizes(n, num)[r] for n in lengths]),
                        len(flat) - sum(lengths_here),
                    ]
                )
                for r, flat in enumerate(flats)
            ]
            for i, name in enumerate(names):
                tensors[name] = torch.cat([piece[i] for piece in pieces]).view(self._shapes[name])
        return tensors

    def give(self, joins: Mapping[str, StateAction]) -> None:
        """Put the full tensors into all shards. joins: parameters with gradients that the shards
        add up.

        The first shard's is in the graph of the pieces, so that what all shards have alike, or have
        added up, arrives there once.
        """
        if not self._groups:
            return
        first = self.full_tensors(0)
        for name, full in first.items():
            copies = [full, *(full.detach().to(self._device(r)) for r in range(1, self.world_size))]
            if name in joins and full.requires_grad:
                copies = JoinedCopies.apply(joins[name], *copies)
            for places, copy in zip(self._places, copies, strict=True):
                for place in places[name]:
                    stand_in(place, copy)

    def _device(self, rank: int) -> torch.device:
        return self.flat_shards[rank].device

    def take_back(self) -> None:
        """Let go of the full tensors."""
        for places in self._places:
            for holders in places.values():
                for place in holders:
                    stand_in(place, None)

    def names_by_first(self) -> dict[str, list[str]]:
        """Return all tied names of each parameter in a shard, by its name in
        `sharded_param_names`.
        """
        return self._names

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.preserve_shards_when_saving:
            return super().state_dict(*args, **kwargs)
        return kwargs.get("destination", {})
