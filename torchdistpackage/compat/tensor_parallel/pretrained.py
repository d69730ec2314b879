"""`TensorParallelPreTrainedModel`: a Hugging Face model whose shards are in threads or in ranks."""

from collections.abc import Sequence
from typing import Any

from torchdistpackage.compat.tensor_parallel.devices import DeviceLike, check_device_ids
from torchdistpackage.compat.tensor_parallel.engine.family_plan import plan_for
from torchdistpackage.compat.tensor_parallel.engine.hugging_face import (
    ShardedModelCalls,
    pretrained_class,
)
from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.compat.tensor_parallel.model import TensorParallel


class TensorParallelCalls(ShardedModelCalls):
    """The methods that a model overrides whose shards may be threads.

    Arguments are those of `TensorParallel`.
    """

    class_name = "TensorParallelPreTrainedModel"
    wrapped_model: TensorParallel

    def __init__(
        self,
        module: Any,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        output_device_index: int | None = None,
        tensor_parallel_config: Config | None = None,
        **kwargs: Any,
    ):
        self.become(module)
        if tensor_parallel_config is None:
            group = kwargs.get("group")
            num = len(check_device_ids(device_ids)) if group is None else group.size()
            tensor_parallel_config = plan_for(module, num)
        split = TensorParallel(
            module, device_ids, output_device, output_device_index, tensor_parallel_config, **kwargs
        )
        self.hold(module, split)

    def apply_sharding(self, *args: Any, **kwargs: Any) -> None:
        """See `TensorParallel.apply_sharding`."""
        self.wrapped_model.apply_sharding(*args, **kwargs)


def tensor_parallel_pretrained() -> type:
    """Return the class `TensorParallelPreTrainedModel`.

    Raises:
        NotAvailableError: transformers is not installed.
    """
    return pretrained_class(TensorParallelCalls)
