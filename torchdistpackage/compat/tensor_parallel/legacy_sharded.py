"""`Sharded(model)`, the earlier spelling of `model.apply_sharding()`."""

from collections.abc import Collection
from typing import Any

from torchdistpackage.parallel.auto.reporting import LOG


def Sharded(module: Any, sharded_param_names: Collection[str] | None = None) -> Any:
    """`module` after `module.apply_sharding(sharded_param_names)`."""
    LOG.warning("Sharded(model) is an earlier spelling; use model.apply_sharding()")
    module.apply_sharding(sharded_param_names)
    return module
