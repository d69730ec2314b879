"""Sharded weights that no optimizer steps: each rank keeps one shard.

They are gathered bucket by bucket while a forward without gradients needs them, as stage 3 of
ZeroOptimizer gathers those that are trained.
"""

from dataclasses import replace
from weakref import WeakMethod

from torch import nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.zero.options import ZeroOptions
from torchdistpackage.ddp.zero.param_buffer import ParamBuffer
from torchdistpackage.ddp.zero.param_shard import FlatLayout
from torchdistpackage.ddp.zero.shard_bounds import even_bounds
from torchdistpackage.ddp.zero.sharing import assign_buckets
from torchdistpackage.ddp.zero.stage3 import ParamCoordinator


class ShardedWeights:
    """The frozen parameters of `module`, of which each rank of `group` keeps an equal shard.

    All ranks of the group run the same forwards in the same order, under `torch.no_grad()`. Keep
    the object as long as the module is used.

    cap_bytes: most bytes of a bucket, which is gathered at once; a larger layer is one bucket.
    """

    def __init__(self, module: nn.Module, group: Group, cap_bytes: int):
        specs = [ParamSpec(name, p, group) for name, p in module.named_parameters()]
        by_bucket: dict[object, list[ParamSpec]] = {}
        for spec in assign_buckets(specs, cap_bytes):
            by_bucket.setdefault(spec.key, []).append(spec)
        options = ZeroOptions(stage=3)
        self._buckets: list[ParamBuffer] = []
        for members in by_bucket.values():
            offsets, at = list[int](), 0
            for spec in members:
                offsets.append(at)
                at += spec.parameter.numel()
            dtype = members[0].parameter.dtype
            bounds = even_bounds(at, group.size(), dtype.itemsize)
            layout = FlatLayout(tuple(members), tuple(offsets), tuple(bounds))
            # a master in the weights' own type, as no small update is added to it
            frozen_options = replace(options, master_dtype=dtype)
            self._buckets.append(
                ParamBuffer(layout, frozen_options, on_read=WeakMethod(self._on_read))
            )
        self._coordinator = ParamCoordinator(module, self._buckets, keeps=False)

    def _on_read(self, parameters: ParamBuffer) -> None:
        self._coordinator.on_read(parameters)
