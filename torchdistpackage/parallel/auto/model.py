"""`TensorParallel`: a module whose shards compute together, in threads or one in each process.

Threads: this module has the shards of all devices, calls each in a thread and returns the output of
one. Processes: it has the shard of this rank; the ranks of its group make the same calls with the
same inputs and get the same outputs. Either way inputs and outputs are those of the module that was
split, and so are the gradients of inputs and of what shards hold.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.nested import map_tensors
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError, LayoutError
from torchdistpackage.layout.mark import Layouts, collect, mark_parameter
from torchdistpackage.parallel.auto import saving
from torchdistpackage.parallel.auto.actions import StateAction
from torchdistpackage.parallel.auto.adapters import TakesNoAdapters, add_adapter_rules
from torchdistpackage.parallel.auto.caches import (
    enter_caches,
    joined_outputs,
    split_inputs,
    with_caches_marked,
)
from torchdistpackage.parallel.auto.devices import DeviceLike, check_device_ids, output_index
from torchdistpackage.parallel.auto.draws import (
    ShardDraws,
    default_draw,
    draw_in_recomputation,
    stream,
    use_draws_of_first,
)
from torchdistpackage.parallel.auto.equal_weights import equalise
from torchdistpackage.parallel.auto.gradients import (
    FromFirst,
    GradientHooks,
    JoinedCopies,
    needs_joining,
)
from torchdistpackage.parallel.auto.layerwise import get_default_config
from torchdistpackage.parallel.auto.layouts import layout_of_cut
from torchdistpackage.parallel.auto.nested import once_each
from torchdistpackage.parallel.auto.places import Place, places_of, stand_in, withdraw
from torchdistpackage.parallel.auto.read_weights import rank_calls
from torchdistpackage.parallel.auto.reporting import LOG
from torchdistpackage.parallel.auto.rules import Config
from torchdistpackage.parallel.auto.shard import (
    check_is_container,
    check_plan,
    make_shard,
    parameter_actions,
    shard_names,
)
from torchdistpackage.parallel.auto.threads import run_threads
from torchdistpackage.parallel.auto.zero3 import ShardingManager

MUCH = 0.1
"""Share of extra parameters a device from which on it is worth a warning."""


class TensorParallel(TakesNoAdapters):
    """`module`, of which each device computes a part of every layer.

    device_ids: devices of this process, default all GPUs; several times "cpu" is fine. One device
        or none: the module itself, unless there is a group.
    output_device, output_device_index: whose output is returned, the first by default.
    tensor_parallel_config: the plan; by default each layer by itself.
    delay_init: shards stay on the CPU until the first forward.
    sharded: threads cut what the plan leaves whole as ZeRO-3 does (`apply_sharding`);
        sharded_param_names: which of it.
    group: ranks that hold one shard each. distributed: kept for earlier programs.

    Raises:
        AssertionError: both ways to name the output device, a device that is not listed, or a
            module that is one layer.
        LayoutError: the plan does not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        output_device_index: int | None = None,
        tensor_parallel_config: Config | None = None,
        delay_init: bool = False,
        distributed: bool = True,
        sharded: bool = True,
        sharded_param_names: Collection[str] | None = None,
        *,
        group: Group | None = None,
    ):
        super().__init__()
        check_is_unsplit(module)
        self.devices = check_device_ids(device_ids)
        self.output_device_index = output_index(self.devices, output_device, output_device_index)
        self.all_cuda = all(device.type == "cuda" for device in self.devices)
        self.device_ids = [-1 if d.type == "cpu" else d.index for d in self.devices]
        self.need_delayed_init = delay_init
        self.preserve_shards_when_saving = True
        self.sharding_manager: ShardingManager | None = None
        self.module_shards = nn.ModuleList()
        self.modified_parameters_names: set[str] = set()
        self.param_fractions: tuple[float, ...] = (1.0,)
        self.tensor_parallel_config = Config({}, {}, {}, {})
        self._lock = threading.Lock()
        self._draws_alike = False
        self._layouts: Layouts = {}
        self.may_draw = True
        self._group = group
        if group is not None and group.size() > 1:
            self._init_rank(module, tensor_parallel_config, group)
        elif len(self.devices) > 1:
            self._init_threads(module, tensor_parallel_config)
            if sharded:
                self.apply_sharding(sharded_param_names)
        else:
            self._init_alone(module)

    def _init_alone(self, module: nn.Module) -> None:
        self._group = None
        self.module_shards.append(module)
        if self.devices and not self.need_delayed_init:
            module.to(self.devices[0])

    def _init_threads(self, module: nn.Module, config: Config | None) -> None:
        config = self._plan(module, config, len(self.devices))
        bound = config.create_collective_ops(self.devices)
        for rank, device in enumerate(self.devices):
            place = torch.device("cpu") if self.need_delayed_init else device
            num = len(self.devices)
            shard, modified = make_shard(module, place, bound, rank=rank, world_size=num)
            self.module_shards.append(shard)
            self.modified_parameters_names |= modified
        self._note_parameters(module, config)
        sentinels = [torch.empty(0, device=device) for device in self.devices]
        self._sanity_check_params = nn.ParameterList(
            [nn.Parameter(sentinel, requires_grad=False) for sentinel in sentinels]
        )
        num_whole = sum(p.numel() for p in module.parameters())
        nums = [sum(p.numel() for p in shard.parameters()) for shard in self.module_shards]
        self.param_fractions = tuple(num / max(num_whole, 1) for num in nums)
        extra = (sum(self.param_fractions) - 1) / len(self.devices)
        if extra >= MUCH:
            LOG.warning(
                "the module has %d parameters, its shards %s: each device holds %.1f%% of them "
                "that others hold too; sharded=True cuts those",
                *(num_whole, nums, 100 * extra),
            )

    def _init_rank(self, module: nn.Module, config: Config | None, group: Group) -> None:
        equalise(module, group)
        config = self._plan(module, config, group.size())
        device = self.devices[0] if self.devices else torch.device("cpu")
        bound = config.create_collective_ops([device] * group.size(), group=group)
        place = torch.device("cpu") if self.need_delayed_init else device
        shard, modified = make_shard(
            module, place, bound, rank=group.rank(), world_size=group.size()
        )
        self.module_shards.append(shard)
        self.modified_parameters_names = modified
        self._note_parameters(module, config)
        self._hooks = GradientHooks(group)
        self._mark(module, config, group)
        num_whole = sum(p.numel() for p in module.parameters())
        self.param_fractions = (sum(p.numel() for p in shard.parameters()) / max(num_whole, 1),)

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
        """What saving and gradients need to know of the module that was split."""
        self._original = saving.Original.of(module, config)
        actions, shard_name = parameter_actions(module, config), shard_names(config, module)
        self._joins: dict[str, StateAction] = {
            shard_name(name): action
            for name, action in actions.items()
            if needs_joining(action, config.full_gradients)
        }
        self._places: list[dict[str, list[Place]]] | None = None

    def _mark(self, module: nn.Module, config: Config, group: Group) -> None:
        """Note on the parameters of the shard how they are cut."""
        held = dict(self.module_shards[0].named_parameters())
        sources, shard_name = dict(module.named_parameters()), shard_names(config, module)
        for name, action in parameter_actions(module, config).items():
            inside = shard_name(name)
            if inside in held:
                layout = layout_of_cut(name, sources[name], action, group.size())
                self._layouts[f"module_shards.0.{inside}"] = layout
                self.mark_cut(f"module_shards.0.{inside}", held[inside])

    def mark_cut(self, name: str, parameter: nn.Parameter) -> None:
        """Note on a parameter of a rank's shard, by its name here, how it is cut."""
        layout = self._layouts.get(name)
        if layout is not None and not layout.is_whole:
            mark_parameter(parameter, layout, self._group, name.count("."))

    def layouts(self) -> Layouts:
        """How the parameters of the shard of this rank are cut, by names of what was split."""
        if self._group is None and len(self.module_shards) == 1:
            return {f"module_shards.0.{n}": x for n, x in collect(self.module_shards[0]).items()}
        return dict(self._layouts)

    # -- the call ------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module that was split returns, on the output device.

        Raises:
            ValueError: parameters were moved away from the devices of the shards.
        """
        return self.call_shards(list(self.module_shards), args, kwargs)

    def call_shards(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the shards, or the same part of each, together."""
        self._place_delayed()
        if self._group is not None:
            return self._call_rank(modules[0], args, kwargs)
        if len(modules) == 1:
            return modules[0](*args, **kwargs)
        if not all(
            p.device == d for p, d in zip(self._sanity_check_params, self.devices, strict=True)
        ):
            raise ValueError(
                f"parameters were moved away from the devices {list(map(str, self.devices))} of "
                f"the shards; leave out .to(device) and .cuda() behind tensor_parallel"
            )
        with self._lock, self._weights():
            inputs = split_inputs(args, kwargs, self.devices, self.tensor_parallel_config)
            outputs = run_threads(modules, inputs, self.devices, self._draws())
        return joined_outputs(outputs, self.output_device_index, self._has_full_gradients)

    def _call_rank(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = self._group
        assert group is not None
        enter_caches([*args, *kwargs.values()], self.tensor_parallel_config, group)
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

    def _draws(self) -> list[ShardDraws] | None:
        """For each thread a stream of random numbers, all alike; None: nothing is drawn."""
        if not (self.training and self.may_draw):
            return None
        seed = default_draw()
        return [ShardDraws(rank, stream(seed)) for rank in range(len(self.devices))]

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

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Tensors in place of parameters that shards share, for the calls of one forward."""
        manager, taken = self.sharding_manager, []
        try:
            if manager is not None:
                manager.give(self._joins)
            if torch.is_grad_enabled():
                taken = self._join_copies()
            yield
        finally:
            for place in taken:
                withdraw(place)
            if manager is not None:
                manager.take_back()

    def _join_copies(self) -> list[Place]:
        known = [dict(shard.named_parameters()) for shard in self.module_shards]
        names = [name for name in self._joins if name in known[0]]
        if self._places is None:
            self._places = [places_of(shard, names) for shard in self.module_shards]
        taken: list[Place] = []
        for name in names:
            copies = [parameters[name] for parameters in known]
            if any(copy.requires_grad for copy in copies):
                views = JoinedCopies.apply(self._joins[name], *copies)
                for places, view in zip(self._places, views, strict=True):
                    for place in places[name]:
                        stand_in(place, view)
                        taken.append(place)
        return taken

    def _place_delayed(self) -> None:
        if self.need_delayed_init:
            for shard, device in zip(self.module_shards, self.devices, strict=False):
                shard.to(device)
            self.need_delayed_init = False

    def prepare_args_kwargs_for_forward(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Arguments on every device: the positional ones by shard, then the keywords by shard."""
        return zip(*split_inputs(args, kwargs, self.devices), strict=True)

    # -- ZeRO and state ------------------------------------------------------------------

    def apply_sharding(self, replicated_param_names: Collection[str] | None = None) -> None:
        """Cut what the plan leaves whole over the shards, as ZeRO-3 does.

        Raises:
            CommError: it was done before, or the shards are processes, where ZeRO of
                torchdistpackage.ddp goes around the module.
        """
        if self.sharding_manager is not None:
            raise CommError(
                "apply_sharding was called before; pass sharded=False to TensorParallel to call "
                "it by hand"
            )
        if self._group is not None:
            raise CommError(
                "sharded=True is for threads; here each shard is a process: put the module into "
                "a ZeRO optimizer of torchdistpackage.ddp"
            )
        self._places = None
        manager = ShardingManager(self, len(self.module_shards), replicated_param_names)
        manager.preserve_shards_when_saving = self.preserve_shards_when_saving
        self.sharding_manager = manager

    def set_preserve_shards_when_saving(self, value: bool) -> None:
        """False: `state_dict()` is that of the module that was split, see `saving`."""
        self.preserve_shards_when_saving = value
        if self.sharding_manager is not None:
            self.sharding_manager.preserve_shards_when_saving = value

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Of the shards; inside `save_tensor_parallel` of the module that was split.

        There, all ranks of a group call it, and each gets all of it.
        """
        if self.preserve_shards_when_saving:
            return super().state_dict(*args, **kwargs)
        return saving.original_state_dict(self, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        group, lock = self._group, self._lock
        memo |= {id(group): group, id(lock): threading.Lock()}
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(deepcopy(self.__dict__, memo))
        return twin


def check_is_unsplit(module: nn.Module) -> None:
    """Raises LayoutError where it is no module, or `tensor_parallel` has split a part of it."""
    if not isinstance(module, nn.Module):
        raise LayoutError(f"a {type(module).__name__} was given; pass a torch.nn.Module")
    for name, part in module.named_modules():
        if isinstance(part, TensorParallel):
            raise LayoutError(
                f"{name or 'the module'} is a {type(part).__name__} of {len(part.module_shards)} "
                f"shards in this process, split already; pass the module as it was before"
            )
