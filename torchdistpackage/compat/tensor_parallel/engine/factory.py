"""`parallelize_module(module)`: a module over the ranks of a group."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group
from torchdistpackage.compat.tensor_parallel.engine.explain import explain as tabulate
from torchdistpackage.compat.tensor_parallel.engine.family_plan import plan_for
from torchdistpackage.compat.tensor_parallel.engine.hugging_face import (
    ShardedModelCalls,
    pretrained_class,
)
from torchdistpackage.compat.tensor_parallel.engine.layerwise import default_rules
from torchdistpackage.compat.tensor_parallel.engine.model import ParallelModule
from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.compat.tensor_parallel.engine.verify import (
    FirstForward,
    described,
    why_not_compared,
)
from torchdistpackage.parallel.auto.pretrained_calls import is_pretrained, remove_hooks
from torchdistpackage.parallel.auto.reporting import LOG
from torchdistpackage.parallel.auto.split_root import check_is_unsplit

Example = Tensor | tuple[Any, ...] | dict[str, Any]
"""A tensor, or arguments of one call, positional or by name."""


def parallelize_module(
    module: nn.Module,
    group: Group | None = None,
    config: Config | None = None,
    *,
    device: torch.device | None = None,
    explain: bool = False,
    verify: bool | None = None,
    example: Example = (),
    delay_init: bool = False,
) -> nn.Module:
    """Return `module`, of which each rank of a group computes a part of every layer; called as
    before.

    group: ranks that hold one shard each, all of which make the same calls; by default tpc's tensor
        group, or all ranks.
    config: the plan, by default that of the model's family, else one made by rules.
    device: where the shard is, by default the GPU of this process, or the CPU.
    explain, verify, example: see `split_module`.

    Raises:
        LayoutError: the model cannot be split over so many ranks, and why; or it is split; or the
            shards compute something else, which the first forward raises too.
    """
    check_is_unsplit(module)
    group = resolve_group(group, "tensor")
    devices = (device or own_device(),)
    make: Any = ParallelModule
    if is_pretrained(module):
        make = pretrained_class(ShardedModelCalls)
        remove_hooks(module)

    def split(config: Config | None) -> nn.Module:
        return make(module, group, config, devices=devices, delay_init=delay_init)

    options = {"explain": explain, "verify": verify, "example": example}
    return split_module(module, group.size(), devices, config, split, **options)


def split_module(
    module: nn.Module,
    num: int,
    devices: Sequence[torch.device],
    config: Config | None,
    split: Callable[[Config | None], nn.Module],
    *,
    explain: bool = False,
    verify: bool | None = None,
    example: Example = (),
) -> nn.Module:
    """Split `module` into `num` shards with `split`, after the plan was explained and checked.

    config: the plan, by default that of the model's family, else one for each layer by itself.
    explain: log the plan as a table, at level INFO, and leave it on the module as `plan_table`.
    example: a call for which the table says what is sent.
    verify: compare the first forward, or at once that of `example`, with the unsplit module's,
        which is kept until then (verify.py); default: where the plan is made by rules, as of a
        model of no known family, and shards are on the CPU or all weights are at most 1 GiB.
    """
    if config is None:
        config = plan_for(module, num)
    unsplit: dict[str, str] = {}
    by_rules = config is None and num > 1
    if by_rules:
        rules = default_rules(module, num)
        config, unsplit = rules.config(), rules.kept
    if isinstance(example, Tensor):
        example = (example,)
    arguments: Any = ((), example) if isinstance(example, dict) else (example, {})
    why_not = why_not_compared(module, devices, by_rules, verify)
    if num < 2:
        why_not = "it is not split"
    table = None
    if explain:
        table = tabulate(module, max(num, 1), config, *arguments)
        table.kept.update(unsplit)
        table = replace(table, check=f"first forward: {described(why_not)}")
        LOG.info("%s", table)
    elif why_not is not None and num > 1 and (verify or (by_rules and verify is None)):
        LOG.warning("the split is %s", described(why_not))
    replaced: Any = split(config)
    if table is not None:
        replaced.plan_table = table
    if why_not is None:
        root = getattr(replaced, "wrapped_model", replaced)
        check = FirstForward(root, module)
        if example:
            check(root, *arguments)
    return replaced


def own_device() -> torch.device:
    """Return the GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
