"""`TensorParallel`: a module whose shards compute together, in threads or one in each process.

Threads: this module has the shards of all devices, calls each in a thread and returns the output of
one. Processes: it has the shard of this rank, as any `ParallelModule`.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.devices import (
    DeviceLike,
    check_device_ids,
    output_index,
)
from torchdistpackage.compat.tensor_parallel.engine.model import ParallelModule
from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.compat.tensor_parallel.joined_copies import JoinedCopies
from torchdistpackage.compat.tensor_parallel.places import Place, places_of, stand_in, withdraw
from torchdistpackage.compat.tensor_parallel.plans import TensorParallelConfig
from torchdistpackage.compat.tensor_parallel.thread_caches import joined_outputs, split_inputs
from torchdistpackage.compat.tensor_parallel.thread_maps import ThreadCollectives
from torchdistpackage.compat.tensor_parallel.threads import run_threads
from torchdistpackage.compat.tensor_parallel.zero3 import ShardingManager
from torchdistpackage.errors import CommError, LayoutError
from torchdistpackage.parallel.auto.draws import ShardDraws, default_draw, stream
from torchdistpackage.parallel.auto.reporting import LOG
from torchdistpackage.parallel.auto.split_root import check_is_unsplit

MUCH = 0.1
"""Share of extra parameters on a device above which a warning is logged."""


class TensorParallel(ParallelModule):
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
        check_is_unsplit(module)
        devices = check_device_ids(device_ids)
        index = output_index(devices, output_device, output_device_index)
        super().__init__(
            module, group, tensor_parallel_config, devices=devices, delay_init=delay_init
        )
        self.output_device_index = index
        self.all_cuda = all(device.type == "cuda" for device in devices)
        self.device_ids = [-1 if d.type == "cpu" else d.index for d in devices]
        self.tensor_parallel_config = TensorParallelConfig.of(self.tensor_parallel_config)
        self.sharding_manager: ShardingManager | None = None
        # one forward at a time, because it puts gathered weights into the shards
        self._lock = threading.Lock()
        self._places: list[dict[str, list[Place]]] | None = None
        if sharded and self._group is None and len(devices) > 1:
            self.apply_sharding(sharded_param_names)

    def _split(self, module: nn.Module, config: Config | None) -> None:
        if self._group is not None or len(self.devices) < 2:
            super()._split(module, config)
            return
        num = len(self.devices)
        config = self._plan(module, config, num)
        bound = config.bound(num, ThreadCollectives(num))
        for rank, device in enumerate(self.devices):
            self._add_shard(module, bound, device, rank, num)
        self._note_parameters(module, config)
        self._note_places(module, config)
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
                num_whole,
                nums,
                100 * extra,
            )

    # -- the call ------------------------------------------------------------------------

    def call_shards(
        self, modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the shards, or the same part of each, together.

        Raises:
            ValueError: parameters were moved away from the devices of the shards.
        """
        if self._group is not None or len(modules) == 1:
            return super().call_shards(modules, args, kwargs)
        self.place_delayed()
        if not all(
            p.device == d for p, d in zip(self._sanity_check_params, self.devices, strict=True)
        ):
            raise ValueError(
                f"parameters were moved away from the devices {list(map(str, self.devices))} of "
                f"the shards; leave out .to(device) and .cuda() behind tensor_parallel"
            )
        # one call at a time: the shards' threads meet in the same collectives
        with self._lock, self._weights():
            inputs = split_inputs(args, kwargs, self.devices, self.tensor_parallel_config)
            outputs = run_threads(modules, inputs, self.devices, self._draws())
        return joined_outputs(outputs, self.output_device_index, self._has_full_gradients)

    def _draws(self) -> list[ShardDraws] | None:
        """Return a stream of random numbers for each thread, all alike; None: nothing is drawn."""
        if not (self.training and self.may_draw):
            return None
        seed = default_draw()
        return [ShardDraws(rank, stream(seed)) for rank in range(len(self.devices))]

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Tensors in place of parameters that shards share, for the calls of one forward."""
        manager, places = self.sharding_manager, []
        try:
            if manager is not None:
                manager.give(self._joins)
            if torch.is_grad_enabled():
                places = self._join_copies()
            yield
        finally:
            for place in places:
                withdraw(place)
            if manager is not None:
                manager.take_back()

    def _join_copies(self) -> list[Place]:
        by_shard = [dict(shard.named_parameters()) for shard in self.module_shards]
        names = [name for name in self._joins if name in by_shard[0]]
        if self._places is None:
            self._places = [places_of(shard, names) for shard in self.module_shards]
        joined: list[Place] = []
        for name in names:
            copies = [parameters[name] for parameters in by_shard]
            if any(copy.requires_grad for copy in copies):
                views = JoinedCopies.apply(self._joins[name], *copies)
                for places, view in zip(self._places, views, strict=True):
                    for place in places[name]:
                        stand_in(place, view)
                        joined.append(place)
        return joined

    def prepare_args_kwargs_for_forward(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield arguments on every device: the positional ones by shard, then the keywords by
        shard.
        """
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

    def full_tensors(self) -> dict[str, Tensor]:
        manager = self.sharding_manager
        if manager is None or not manager.sharded_param_names:
            return {}
        with torch.no_grad():
            full = manager.full_tensors(0)
        tied = {n: name for name, places in manager.names_by_first().items() for n in places}
        return full | {n: full[first] for n, first in tied.items()}

    def begin_loading(self) -> None:
        if self.sharding_manager is not None:
            raise LayoutError("sharded=True has cut the weights again; load, then apply_sharding()")
        for at, sentinel in enumerate(getattr(self, "_sanity_check_params", ())):
            if sentinel.is_meta:
                empty = torch.empty(0, device=self.devices[at])
                self._sanity_check_params[at] = nn.Parameter(empty, requires_grad=False)

    def set_preserve_shards_when_saving(self, value: bool) -> None:
        super().set_preserve_shards_when_saving(value)
        if self.sharding_manager is not None:
            self.sharding_manager.preserve_shards_when_saving = value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_lock": threading.Lock()})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self._lock)] = threading.Lock()
        return super().__deepcopy__(memo)
