"""`ParallelModule`: a module of which each rank of a group has a shard.

The ranks make the same calls with the same inputs and get the same outputs. Inputs and outputs are
those of the module that was split, and so are the gradients of inputs and of what shards hold.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction
from torchdistpackage.compat.tensor_parallel.engine.adapters import add_adapter_rules
from torchdistpackage.compat.tensor_parallel.engine.gradients import (
    FromFirst,
    GradientHooks,
    needs_joining,
)
from torchdistpackage.compat.tensor_parallel.engine.layerwise import get_default_config
from torchdistpackage.compat.tensor_parallel.engine.layouts import layout_of_cut
from torchdistpackage.compat.tensor_parallel.engine.ops import RankCollectives, rank_calls
from torchdistpackage.compat.tensor_parallel.engine.rules import Config, state_action
from torchdistpackage.compat.tensor_parallel.engine.shard import (
    check_is_container,
    check_plan,
    make_shard,
    parameter_actions,
    shard_names,
)
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import (
    Layouts,
    ShardPlace,
    collect,
    mark_parameter,
    note_place,
)
from torchdistpackage.optim.torch_calls import watch
from torchdistpackage.parallel.auto import saving
from torchdistpackage.parallel.auto.caches import enter_caches, with_caches_marked
from torchdistpackage.parallel.auto.draws import (
    ShardDraws,
    default_draw,
    draw_in_recomputation,
    use_draws_of_first,
)
from torchdistpackage.parallel.auto.equal_weights import equalise
from torchdistpackage.parallel.auto.nested import once_each
from torchdistpackage.parallel.auto.split_root import SplitRoot, TakesNoAdapters, check_is_unsplit


class ParallelModule(SplitRoot, TakesNoAdapters):
    """`module`, of which each rank of `group` computes a part of every layer.

    group: ranks that hold one shard each; of one rank, or None: the module itself.
    config: the plan; by default each layer by itself.
    devices: the one of this rank, by default the CPU.
    delay_init: the shard stays on the CPU until the first forward.

    Raises:
        AssertionError: a module that is one layer.
        LayoutError: the plan does not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group | None,
        config: Config | None = None,
        *,
        devices: Sequence[torch.device] = (),
        delay_init: bool = False,
    ):
        super().__init__()
        check_is_unsplit(module)
        self.devices = tuple(devices)
        self.need_delayed_init = delay_init
        self.module_shards = nn.ModuleList()
        self.modified_parameters_names: set[str] = set()
        self.param_fractions: tuple[float, ...] = (1.0,)
        self.tensor_parallel_config = Config({}, {}, {}, {})
        self._draws_alike = False
        self._layouts: Layouts = {}
        self._places_of: dict[str, tuple[Layout, int, int]] = {}
        self.may_draw = True
        self._group = group if group is not None and group.size() > 1 else None
        self._split(module, config)

    def _split(self, module: nn.Module, config: Config | None) -> None:
        """Make the shards of this process."""
        if self._group is not None:
            self._init_rank(module, config, self._group)
            return
        self.module_shards.append(module)
        if self.devices and not self.need_delayed_init:
            module.to(self.devices[0])

    def _init_rank(self, module: nn.Module, config: Config | None, group: Group) -> None:
        equalise(module, group)
        config = self._plan(module, config, group.size())
        device = self.devices[0] if self.devices else torch.device("cpu")
        bound = config.bound(group.size(), RankCollectives(group))
        self._add_shard(module, bound, device, group.rank(), group.size())
        self._note_parameters(module, config)
        self._hooks = GradientHooks(group)
        self._mark(module, config, group)
        shard, num_whole = self.module_shards[0], sum(p.numel() for p in module.parameters())
        self.param_fractions = (sum(p.numel() for p in shard.parameters()) / max(num_whole, 1),)

    def _add_shard(
        self, module: nn.Module, bound: Config, device: torch.device, rank: int, num: int
    ) -> None:
        target = torch.device("cpu") if self.need_delayed_init else device
        shard, modified = make_shard(module, target, bound, rank=rank, world_size=num)
        self.module_shards.append(shard)
        self.modified_parameters_names |= modified

    def _plan(self, module: nn.Module, config: Config | None, num: int) -> Config:
        check_is_container(module)
        if config is not None and not isinstance(config, Config):
            raise LayoutError(f"tensor_parallel_config is a {type(config).__name__}; pass a Config")
        if config is None:
            config = get_default_config(module, range(num))
        self.tensor_parallel_config = config = add_adapter_rules(module, config)
        check_plan(config, module)
        return config

    def _note_parameters(self, module: nn.Module, config: Config) -> None:
        """Note the facts about the split module that saving and gradients need."""
        actions, shard_name = parameter_actions(module, config), shard_names(config, module)
        self._original = saving.Original.of(
            module, lambda names: state_action(config, names), shard_name
        )
        self._joins: dict[str, StateAction] = {
            shard_name(name): action
            for name, action in actions.items()
            if needs_joining(action, config.full_gradients)
        }

    def _mark(self, module: nn.Module, config: Config, group: Group) -> None:
        """Note on the parameters of the shard how they are cut."""
        parameters = dict(self.module_shards[0].named_parameters())
        sources, shard_name = dict(module.named_parameters()), shard_names(config, module)
        for name, action in parameter_actions(module, config).items():
            inside = shard_name(name)
            if inside in parameters:
                layout = layout_of_cut(name, sources[name], action, group.size())
                self._layouts[f"module_shards.0.{inside}"] = layout
                self.mark_cut(f"module_shards.0.{inside}", parameters[inside])
        watch()

    def mark_cut(self, name: str, parameter: nn.Parameter) -> None:
        """Note on a parameter of a rank's shard, by its name here, how it is cut."""
        if (shard_place := self._places_of.get(name)) is not None:
            note_place(parameter, ShardPlace(*shard_place))
        layout = self._layouts.get(name)
        if layout is not None and not layout.is_whole:
            mark_parameter(parameter, layout, self._group, name.count("."))

    def shard_prefix(self, at: int) -> str:
        return f"module_shards.{at}."

    def _note_places(self, module: nn.Module, config: Config) -> None:
        """Note on the parameters of all shards, if all are in this process, which each has."""
        sources, shard_name = dict(module.named_parameters()), shard_names(config, module)
        num = len(self.module_shards)
        for name, action in parameter_actions(module, config).items():
            with suppress(LayoutError):  # a number that a rule cuts: each part counts
                layout = layout_of_cut(name, sources[name], action, num)
                for index in range(num):
                    inside = f"module_shards.{index}.{shard_name(name)}"
                    self._places_of[inside] = layout, index, num
        self._mark_again()
        watch()

    def _mark_again(self) -> None:
        """Note on parameters what other objects in their places do not know."""
        for name, parameter in self.named_parameters():
            self.mark_cut(name, parameter)

    @property
    def has_heads_apart(self) -> bool:
        """Return whether the plan deals out attention heads."""
        return self.tensor_parallel_config.has_heads_apart

    def layouts(self) -> Layouts:
        """Return how the parameters of the shard of this rank are cut, by names of what was
        split.
        """
        if self._group is None and len(self.module_shards) == 1:
            return {f"module_shards.0.{n}": x for n, x in collect(self.module_shards[0]).items()}
        return dict(self._layouts)

    # -- the call ------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module that was split."""
        return self.call_shards(list(self.module_shards), args, kwargs)

    def call_shards(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the shard of this rank, or a part of it; all ranks do."""
        self.place_delayed()
        if self._group is not None:
            return self._call_rank(modules[0], args, kwargs)
        return modules[0](*args, **kwargs)

    def _call_rank(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = self._group
        assert group is not None
        enter_caches([*args, *kwargs.values()], self.tensor_parallel_config.cache_heads(), group)
        with self._draws_of_rank(group), rank_calls():
            return with_caches_marked(self._call_on_rank(group, module, args, kwargs))

    def _call_on_rank(
        self, group: Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return module(*args, **kwargs)
        self._hooks.ensure(self._parameters_to_join(self.module_shards[0]))
        if self._has_full_gradients:
            return module(*args, **kwargs)

        def entering(x: Tensor) -> Tensor:
            return collectives.copy(x, group) if x.requires_grad else x

        def leaving(x: Tensor) -> Tensor:
            return FromFirst.apply(x, group.rank() == 0) if x.requires_grad else x

        args, kwargs = map_tensors(args, entering), map_tensors(kwargs, entering)
        return map_tensors(module(*args, **kwargs), once_each(leaving))

    def _draws_of_rank(self, group: Group) -> AbstractContextManager[Any]:
        if not (self.training and self.may_draw):
            return nullcontext()
        if not self._draws_alike:
            use_draws_of_first(group)
            self._draws_alike = True
        draw_in_recomputation(self.module_shards[0], group.rank())
        return ShardDraws(group.rank(), default_draw)

    @property
    def _has_full_gradients(self) -> bool:
        return self.tensor_parallel_config.full_gradients

    def _parameters_to_join(self, shard: nn.Module) -> Iterator[tuple[nn.Parameter, StateAction]]:
        parameters = dict(shard.named_parameters())
        for name, action in self._joins.items():
            if name in parameters:
                yield parameters[name], action

    def place_delayed(self) -> None:
        """Bring shards to their devices, if that was to wait for the first forward."""
        if self.need_delayed_init:
            for shard, device in zip(self.module_shards, self.devices, strict=False):
                shard.to(device)
            self.need_delayed_init = False

    # -- state ---------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the shards; inside `save_tensor_parallel`, the state of the original
        module.

        There, all ranks of a group call it, and each gets all of it.
        """
        if self.preserve_shards_when_saving:
            return super().state_dict(*args, **kwargs)
        return saving.original_state_dict(self, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._mark_again()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self._group)] = self._group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(deepcopy(self.__dict__, memo))
        twin._mark_again()
        return twin
