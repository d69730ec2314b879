"""A Hugging Face model whose shards compute together.

It is of the class of the model that was split, so that generation, saving and whatever else the
library asks of a model are the family's own, and calls the shards where that called its layers.
transformers, of the extra `hf`, is imported on first use.
"""

import inspect
from collections.abc import Sequence
from functools import cache, wraps
from typing import Any

from torch import nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.engine.family_plan import plan_for
from torchdistpackage.compat.tensor_parallel.engine.model import ParallelModule
from torchdistpackage.compat.tensor_parallel.engine.rules import Config
from torchdistpackage.errors import NotAvailableError
from torchdistpackage.layout.mark import Layouts
from torchdistpackage.parallel.auto.draws import may_draw
from torchdistpackage.parallel.auto.pretrained_calls import (
    PretrainedCalls,
    remove_hooks,
    without_adapters,
)
from torchdistpackage.parallel.auto.split_root import TakesNoAdapters, check_is_unsplit


@cache
def pretrained_class(calls: type["ShardedModelCalls"]) -> type:
    """Return the class of sharded models that handle the calls of `calls` themselves.

    Raises:
        NotAvailableError: transformers is not installed.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise NotAvailableError(
            "a split Hugging Face model needs transformers, which is not installed; install "
            'the extra hf: pip install "torchdistpackage[hf]"'
        ) from error

    class ShardedPreTrainedModel(calls, PreTrainedModel):
        """A Hugging Face model of which each shard computes a part of every layer.

        Without a plan the family's plan is used. `module` keeps its weights. `save_pretrained`
        inside `save_tensor_parallel` writes the original's files.
        """

        is_parallelizable = model_parallel = True

        def __new__(cls, module: Any = None, *args: Any, **kwargs: Any) -> Any:
            if module is None:  # a copy, whose class is that of a family
                return object.__new__(cls)
            check_is_unsplit(module)
            return object.__new__(of_family(cls, type(without_adapters(module))))

    parameters = list(inspect.signature(calls.__init__).parameters.values())[1:]
    ShardedPreTrainedModel.__signature__ = inspect.Signature(parameters)
    ShardedPreTrainedModel.__module__ = calls.__module__
    ShardedPreTrainedModel.__name__ = ShardedPreTrainedModel.__qualname__ = calls.class_name
    return ShardedPreTrainedModel


@cache
def of_family(cls: type, family: Any) -> type:
    """Return the class for models of `family`, with its name, which is written into saved files."""
    if issubclass(cls, family):
        return cls

    @wraps(family.forward)  # whose parameters generation and trainers look at
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positional = args[position] if position is not None and position < len(args) else None
        self.check_attentions(kwargs.get("output_attentions", positional))
        return self.wrapped_model(*args, **kwargs)

    names = list(inspect.signature(family.forward).parameters)[1:]
    position = names.index("output_attentions") if "output_attentions" in names else None
    fields = {"__module__": family.__module__, "forward": forward}
    return type(family.__name__, (cls, family), fields)


def empty_model(calls: type["ShardedModelCalls"], family: type) -> Any:
    """Return an empty sharded model of `family`, which a copy or a pickle fills."""
    kind = of_family(pretrained_class(calls), family)
    return kind.__new__(kind)


class ShardedModelCalls(PretrainedCalls, TakesNoAdapters):
    """The methods that a sharded model overrides in its family's class.

    Arguments are those of `ParallelModule`.
    """

    class_name = "ShardedPreTrainedModel"
    wrapped_model: ParallelModule

    def __init__(self, module: Any, group: Group, config: Config | None = None, **options: Any):
        self.become(module)
        config = config or plan_for(module, group.size())
        self.hold(module, ParallelModule(module, group, config, **options))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Its class is made anew, of those of the calls and of the family."""
        calls, family = type(self).__mro__[2], type(self).__mro__[0].__bases__[-1]
        return empty_model, (calls, family), dict(self.__dict__)

    def become(self, module: Any) -> None:
        """Take over the attributes of the model that is split."""
        nn.Module.__init__(self)
        remove_hooks(module)
        own_names = set(vars(self))
        self.__dict__.update(
            {
                name: value
                for name, value in vars(without_adapters(module)).items()
                if name not in own_names and name not in KEPT_APART
            }
        )
        self.training = module.training

    def hold(self, module: Any, split: ParallelModule) -> None:
        """Call `split`, which was made of `module`."""
        self.wrapped_model = split
        split.may_draw = may_draw(module, is_known=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "wrapped_model":
                raise
            # parts of the model, which the family's own methods look for
            return getattr(self.wrapped_model.module_shards[0], name)

    @property
    def split_root(self) -> ParallelModule:
        return self.wrapped_model

    @property
    def devices(self) -> tuple[Any, ...]:
        return self.wrapped_model.devices

    @property
    def tensor_parallel_config(self) -> Config:
        return self.wrapped_model.tensor_parallel_config

    def layouts(self) -> Layouts:
        """See `ParallelModule.layouts`."""
        return {f"wrapped_model.{n}": x for n, x in self.wrapped_model.layouts().items()}

    def set_preserve_shards_when_saving(self, value: bool) -> None:
        """See `save_tensor_parallel`."""
        self.wrapped_model.set_preserve_shards_when_saving(value)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See `ParallelModule.state_dict`."""
        if self.wrapped_model.preserve_shards_when_saving:
            return nn.Module.state_dict(self, *args, **kwargs)
        return self.wrapped_model.state_dict(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a submodule by its name. The embedding table is that of all shards, and can be
        called by itself.

        peft calls it that way to put prompts before the tokens.
        """
        module = super().get_submodule(target)
        if not isinstance(getattr(module, "tp_wrapped_module", module), nn.Embedding):
            return module
        shards = self.wrapped_model.module_shards
        table = shards[0].get_input_embeddings()
        if module is not table and module is not getattr(table, "tp_wrapped_module", None):
            return module
        return PartOfShards(self.wrapped_model, [s.get_input_embeddings() for s in shards])

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder of all shards, which can be called by itself."""
        shards = [s.get_encoder(*args, **kwargs) for s in self.wrapped_model.module_shards]
        return PartOfShards(self.wrapped_model, shards)


KEPT_APART = frozenset(vars(nn.Module()))
"""Attributes that every module has for itself."""


class PartOfShards(nn.Module):
    """The same part of each shard, called together."""

    def __init__(self, model: ParallelModule, parts: Sequence[nn.Module]):
        super().__init__()
        self.__dict__["_parts"] = list(parts)

        @wraps(parts[0].forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return model.call_shards(parts, args, kwargs)

        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_parts"][0], name)
