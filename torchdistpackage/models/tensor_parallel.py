"""`tensor_parallel(module)`: a module whose layers the ranks of a group share, called as before.

A model of transformers is split by the table that `model.hf` trains by, with the layers of
parallel/tensor. What these do not do (devices of one process, a plan of rules, models without a
table, adapters) is done by the extension `tensor_parallel`, which `compat` enters.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm.creation import is_joined
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.lazy import extension
from torchdistpackage.models.find_split import find_split, shape_of
from torchdistpackage.models.transformers_experts import expert_group, share_experts
from torchdistpackage.parallel.auto.pretrained_calls import (
    SplitPretrained,
    is_pretrained,
    remove_hooks,
    without_adapters,
)
from torchdistpackage.parallel.auto.split_model import ModelSplit, become_split, split_copy
from torchdistpackage.parallel.auto.split_root import check_is_unsplit
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.topology.mesh import Mesh

LOG = logging.getLogger(__name__)
Example = Tensor | tuple[Any, ...] | dict[str, Any]


def tensor_parallel(
    module: nn.Module,
    device_ids: Sequence[torch.device | str | int] | None = None,
    tensor_parallel_config: Any = None,
    distributed: bool | None = None,
    sharded: bool | None = None,
    sharded_param_names: Collection[str] | None = None,
    *,
    group: Group | None = None,
    sequence_parallel: bool = False,
    tp_comm_overlap: bool = False,
    explain: bool = False,
    verify: bool | None = None,
    example: Example = (),
    **kwargs: Any,
) -> nn.Module:
    """Return `module` with every layer shared by the ranks of a group; it is called as before.

    device_ids: the devices of this process, one thread each; several times "cpu" is fine.
    distributed: one shard in each process of tpc's tensor group, or of all ranks, all of which make
        the same calls; default: whether torch.distributed is initialised. device_ids then has the
        one device of this process.
    tensor_parallel_config: a plan of rules, see docs/auto_tensor_parallel.md.
    sharded: threads cut what the plan leaves whole too, as ZeRO-3 does.
    group: ranks that hold one shard each.
    sequence_parallel: between the blocks each rank has its part of the sequence (Korthikanti et
        al., arXiv:2205.05198). Needs ranks, a family with a table, and sequences whose length
        divides by the number of ranks.
    tp_comm_overlap: see `ColumnLinear`.
    explain: log the plan as a table, at level INFO, and leave it on the module as `plan_table`.
    example: a tensor, or arguments of one call, positional or by name, for which the table says
        what is sent.
    verify: compare the first forward, or at once that of `example`, with the unsplit module's,
        which is kept until then; default: where the plan is made by rules, as of a model of no
        known family, and shards are on the CPU or all weights are at most 1 GiB.
    kwargs: output_device, output_device_index, delay_init.

    Raises:
        LayoutError: the model cannot be split over so many devices, and why; or it is split; or the
            shards compute something else, which the first forward raises too.
        AssertionError: distributed with several devices, or with sharded.
    """
    check_is_unsplit(module)
    by_rules = {
        "tensor_parallel_config": tensor_parallel_config,
        "sharded": sharded,
        "sharded_param_names": sharded_param_names,
        "explain": explain,
        "verify": verify,
        "example": example,
        **kwargs,
    }
    options_set = [name for name, value in by_rules.items() if not _is_default(value)]
    is_ranks = is_joined() if distributed is None else distributed
    num_devices = 1 if device_ids is None else len(device_ids)
    if not is_ranks or num_devices != 1:
        why = "it is asked to compute on devices of one process"
    elif options_set:
        why = f"{options_set[0]} is given"
    else:
        device = _device(device_ids)
        try:
            return _split_by_table(
                module, resolve_group(group, "tensor"), device, sequence_parallel, tp_comm_overlap
            )
        except _NoTable as error:
            why = str(error)
    if sequence_parallel or tp_comm_overlap:
        raise LayoutError(
            f"sequence_parallel and tp_comm_overlap need ranks that split a model by a table, but "
            f"{why}; leave them out"
        )
    by_plan = extension("tensor_parallel")
    if by_plan is None:
        raise LayoutError(
            f"this {type(module).__name__} cannot be split by a table: {why}. The engine that "
            f"plans other splits is torchdistpackage.compat, which this installation lacks; "
            f"install the whole package, or write the module of the layers of "
            f"torchdistpackage.parallel (ParallelMlp, ParallelAttention, ColumnLinear, RowLinear)"
        )
    LOG.info("a %s is split by a plan, not by a table: %s", type(module).__name__, why)
    replaced: nn.Module = by_plan(
        module, device_ids, distributed=distributed, group=group, **by_rules
    )
    return replaced


class _NoTable(LayoutError):
    """Raised if no table splits this module; the text says why."""


def _split_by_table(
    module: nn.Module,
    group: Group,
    device: torch.device,
    sequence_parallel: bool,
    tp_comm_overlap: bool,
) -> nn.Module:
    if not is_pretrained(module):
        raise _NoTable(f"a {type(module).__name__} is not a model of transformers")
    if without_adapters(module) is not module:
        raise _NoTable("it has adapters")
    remove_hooks(module)
    num, model = group.size(), module
    try:
        shape = shape_of(model, num, sequence_parallel)
        split = find_split(shape, model)
    except LayoutError as error:
        raise _NoTable(str(error)) from error
    if num == 1:
        return become_split(
            split_copy(model, split, group), split, None, model, SplitPretrained, device
        )
    experts = {n: x for n, x in split.layouts.items() if "expert" in x.split_axes}
    if experts and ((ranks := expert_group()) is None or ranks.size() > 1):
        raise _NoTable(
            "its experts are split by the table where tpc is set up and no ranks share experts"
        )
    twin = split_copy(model, split, group, tp_comm_overlap)
    if experts:
        _replace_experts(twin, model, experts, group, split)
    return become_split(twin, split, group, model, SplitPretrained, device)


@torch.no_grad()
def _replace_experts(
    twin: nn.Module,
    model: nn.Module,
    layouts: Mapping[str, Layout],
    group: Group,
    split: ModelSplit,
) -> None:
    """Give `twin` this rank's slice of the stacked experts of `model`."""
    experts = expert_group()
    assert experts is not None
    share_experts(twin, layouts, experts, group)
    mesh = Mesh((("expert", 1), (split.axis, group.size())))
    full, parts = dict(model.named_parameters()), dict(twin.named_parameters())
    for name, layout in layouts.items():
        if not full[name].is_meta:
            copy_part(parts[name], full[name], layout, mesh, group.rank())


def _is_default(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, tuple) and not value)


def _device(device_ids: Sequence[torch.device | str | int] | None) -> torch.device:
    """Return the device of this rank's shard."""
    if device_ids is not None:
        (only,) = device_ids
        return torch.device("cuda", only) if isinstance(only, int) else torch.device(only)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
