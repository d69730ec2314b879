"""`tensor_parallel(module)`: a module over the devices of this process, or the ranks of a group."""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from torchdistpackage.comm.creation import is_joined
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.compat.tensor_parallel.devices import DeviceLike, check_device_ids
from torchdistpackage.compat.tensor_parallel.engine.factory import Example, own_device, split_module
from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.compat.tensor_parallel.model import TensorParallel
from torchdistpackage.compat.tensor_parallel.pretrained import tensor_parallel_pretrained
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.pretrained_calls import is_pretrained, remove_hooks
from torchdistpackage.parallel.auto.split_root import check_is_unsplit


def tensor_parallel(
    module: nn.Module,
    device_ids: Sequence[DeviceLike] | None = None,
    tensor_parallel_config: Config | None = None,
    distributed: bool | None = None,
    sharded: bool | None = None,
    sharded_param_names: Collection[str] | None = None,
    *,
    group: Group | None = None,
    explain: bool = False,
    verify: bool | None = None,
    example: Example = (),
    **kwargs: Any,
) -> nn.Module:
    """Return `module`, of which each device computes a part of every layer; it is called as before.

    device_ids: the devices of this process, one thread each; several times "cpu" is fine.
    distributed: one shard in each process of tpc's tensor group, or of all ranks, all of which make
        the same calls; default: whether torch.distributed is initialised. device_ids then has the
        one device of this process.
    tensor_parallel_config: the plan, by default that of the model's family, else one for each layer
        by itself.
    sharded: threads cut what the plan leaves whole too, as ZeRO-3 does.
    group: ranks that hold one shard each.
    explain: log the plan as a table, at level INFO, and leave it on the module as `plan_table`.
    example: a tensor, or arguments of one call, positional or by name, for which the table says
        what is sent.
    verify: compare the first forward, or at once that of `example`, with the unsplit module's,
        which is kept until then (verify.py); default: where the plan is made by rules, as of a
        model of no known family, and shards are on the CPU or all weights are at most 1 GiB.
    kwargs: output_device, output_device_index, delay_init.

    Raises:
        LayoutError: the model cannot be split over so many devices, and why; or it is split; or the
            shards compute something else, which the first forward raises too.
        AssertionError: distributed with several devices, or with sharded.
    """
    check_is_unsplit(module)
    if distributed is None:
        distributed = is_joined()
    options: dict[str, Any] = dict(kwargs)
    if distributed:
        group = resolve_group(group, "tensor")
        if device_ids is None:
            device_ids = [own_device()]
        if len(device_ids) != 1:
            raise AssertionError(
                f"distributed=True holds one shard a process, but {len(device_ids)} devices were "
                f"given: {list(map(str, device_ids))}; pass the device of this process"
            )
        if sharded:
            raise AssertionError(
                "sharded=True works with threads only; with distributed=True wrap the model with "
                "a ZeRO optimizer of torchdistpackage.ddp instead"
            )
        options["group"] = group
    elif group is not None:
        raise LayoutError("a group was given with distributed=False; leave out one of the two")
    make: Any = TensorParallel
    if is_pretrained(module):
        make = tensor_parallel_pretrained()
        remove_hooks(module)
    devices = check_device_ids(device_ids)

    def split(config: Config | None) -> nn.Module:
        return make(
            module,
            device_ids=device_ids,
            tensor_parallel_config=config,
            distributed=distributed,
            sharded=bool(sharded),
            sharded_param_names=sharded_param_names,
            **options,
        )

    num = len(devices) if group is None else group.size()
    trial_options = {"explain": explain, "verify": verify, "example": example}
    return split_module(module, num, devices, tensor_parallel_config, split, **trial_options)
