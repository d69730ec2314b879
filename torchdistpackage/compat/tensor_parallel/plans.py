"""Plans as tensor_parallel's programs make and bind them, and those of its families.

They are the plans of parallel/auto, which may be bound to threads too.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.devices import check_device_ids
from torchdistpackage.compat.tensor_parallel.engine import layerwise
from torchdistpackage.compat.tensor_parallel.engine.family_plan import family_plan, find_plan
from torchdistpackage.compat.tensor_parallel.engine.ops import Collectives, RankCollectives
from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.compat.tensor_parallel.thread_maps import ThreadCollectives
from torchdistpackage.families.registry import FAMILIES, SPLIT_ALONE
from torchdistpackage.parallel.auto.reporting import LOG


class TensorParallelConfig(Config):
    """A `Config` that binds its texts itself."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return `config` as an object of this class."""
        return cls(
            **{field.name: getattr(config, field.name) for field in fields(config) if field.init}
        )

    def create_collective_ops(
        self,
        devices: Sequence[torch.device],
        distributed: bool = True,
        *,
        group: Group | None = None,
    ) -> Self:
        """Return a copy in which the texts of collectives are functions (value, rank) that
        communicate.

        group: ranks that hold one shard each. Without it the shards are threads of this process.
        distributed: kept for earlier programs, in which it chose between the two.
        """
        return self.bound(len(devices), collectives_of(len(devices), group))


def collectives_of(num: int, group: Group | None) -> Collectives:
    """Return the collectives of the ranks of `group`, or of `num` threads."""
    return ThreadCollectives(num) if group is None else RankCollectives(group)


ConfigGetter = Callable[[Any, Sequence[Any]], Config]
"""A function of a model's config and its devices, such as `get_gpt2_config`."""


def _getter(kind: str) -> ConfigGetter:
    def plan(model_config: Any, devices: Sequence[Any]) -> TensorParallelConfig:
        return TensorParallelConfig.of(family_plan(kind, model_config, len(devices)))

    plan.__name__ = f"get_{kind}_config"
    return plan


PREDEFINED_CONFIGS = {kind: _getter(kind) for kind in (*FAMILIES, *SPLIT_ALONE)}
get_bert_config = PREDEFINED_CONFIGS["bert"]
get_bloom_config = PREDEFINED_CONFIGS["bloom"]
get_codegen_config = PREDEFINED_CONFIGS["codegen"]
get_gpt2_config = PREDEFINED_CONFIGS["gpt2"]
get_gpt_neox_config = PREDEFINED_CONFIGS["gpt_neox"]
get_llama_config = PREDEFINED_CONFIGS["llama"]
get_refined_web_config = PREDEFINED_CONFIGS["falcon"]
get_t5_config = PREDEFINED_CONFIGS["t5"]


def get_default_config(
    module: nn.Module, device_ids: Sequence[torch.device | str | int]
) -> TensorParallelConfig:
    """Return rules for each linear, embedding and convolutional layer of `module`, by itself."""
    return TensorParallelConfig.of(layerwise.get_default_config(module, device_ids))


def find_predefined_tensor_parallel_config(
    model_config: Any, device_ids: Sequence[Any] | None
) -> Config | None:
    """Return the plan of the family of a model's configuration; None where none is known.

    Raises:
        LayoutError: the family is known, but this model cannot be split over so many devices.
    """
    plan = find_plan(model_config, len(check_device_ids(device_ids)))
    if plan is None:
        LOG.warning(
            "no plan is known for models of type %r: each layer is split by itself",
            getattr(model_config, "model_type", None),
        )
        return None
    return TensorParallelConfig.of(plan)
