"""A module of a shard, with what a plan does to its inputs and outputs around it."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.compat.tensor_parallel.engine.entrance import SharedEntrance
from torchdistpackage.compat.tensor_parallel.engine.ops import apply_action, is_copy
from torchdistpackage.compat.tensor_parallel.engine.read_weights import Join
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto import traffic
from torchdistpackage.parallel.auto.nested import is_namedtuple, rebuilt
from torchdistpackage.parallel.tensor.weight_reads import split_weight


class TensorParallelWrapper(nn.Module):
    """Calls `module` on inputs and returns outputs as the actions of rank `rank` make them.

    input_actions: {position or name: action}; an argument is found by either, however it was
    passed. entrances: inputs with gradients that layers of the module sum (column_product.py).
    output_actions: of a tensor, a sequence (by position) or a mapping (by key or position).
    Attributes that it lacks are those of the module; in forwards, its weights by `joins`
    and its `sizes` are the whole layer's (read_weights.py).
    """

    def __init__(
        self,
        module: nn.Module,
        input_actions: dict[Any, Any],
        output_actions: dict[Any, Any],
        *,
        rank: int,
        world_size: int,
    ):
        super().__init__()
        self.tp_wrapped_module = module
        self.input_actions, self.output_actions = input_actions, output_actions
        self.rank, self.world_size = rank, world_size
        self.joins: dict[str, Join] = {}
        self.sizes: dict[str, int] = {}
        self.entrances: dict[Any, SharedEntrance] = {}
        self._only_copies = all(map(is_copy, input_actions.values()))

    def extra_repr(self) -> str:  # which peft shows where it is to put an adapter here
        return f"of shard {self.rank} of {self.world_size}, which takes adapters before the split"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # a copy does something in the backward alone
        if self.input_actions and (torch.is_grad_enabled() or not self._only_copies):
            args, kwargs = self._process_input(args, kwargs)
        try:
            output = self.tp_wrapped_module(*args, **kwargs)
        finally:
            for entrance in self.entrances.values():
                entrance.close()
        return self._process_output(output) if self.output_actions else output

    def __getattr__(self, attr: str) -> Any:
        try:
            return super().__getattr__(attr)
        except AttributeError:
            if attr == "tp_wrapped_module":
                raise
            value = getattr(self.tp_wrapped_module, attr)
        if attr not in (*self.joins, *self.sizes) or not self._is_read_whole():
            return value
        if attr in self.sizes:
            return self.sizes[attr]
        return split_weight(value, partial(self.joins[attr], rank=self.rank))

    def _is_read_whole(self) -> bool:
        return any(join.has_all() for join in self.joins.values())

    def _seen_class(self) -> type:
        """Return the wrapped layer's class in a forward, which may ask `isinstance(layer,
        nn.Linear)`.
        """
        if not self.__dict__.get("sizes") or not self._is_read_whole():
            return type(self)
        return type(self.tp_wrapped_module)

    def _set_class(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    __class__ = property(_seen_class, _set_class)

    def _process_input(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        places, named = list(args), dict(kwargs)
        for target, action in self.input_actions.items():
            position = target if self._is_given(target, args, kwargs) else self._other_way(target)
            if isinstance(position, int) and position < len(places):
                places[position] = self._entered(target, places[position], action)
            elif position in named:
                named[position] = self._entered(target, named[position], action)
        return tuple(places), named

    def _entered(self, target: Any, value: Any, action: Any) -> Any:
        entrance = self.entrances.get(target)
        if entrance is not None and entrance.open(value):
            return value
        return self._applied(value, action)

    @staticmethod
    def _is_given(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return target < len(args) if isinstance(target, int) else target in kwargs

    def _other_way(self, target: int | str) -> int | str | None:
        """Return the name of a parameter of the module's forward for its position, or the reverse.

        It is asked for only where a rule's target was not given as such: reading a signature takes
        longer than small layers do.
        """
        parameters = inspect.signature(self.tp_wrapped_module.forward).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        if isinstance(target, int):
            return names[target] if target < len(names) else None
        return names.index(target) if target in names else None

    def _process_output(self, output: Any) -> Any:
        actions = self.output_actions
        if isinstance(output, Tensor):
            return self._applied(output, actions[0]) if 0 in actions else output
        if isinstance(output, Mapping):
            values = dict(output.items())
            keys = list(values)
            for target, action in actions.items():
                key = keys[target] if isinstance(target, int) and target < len(keys) else target
                if key in values:
                    values[key] = self._applied(values[key], action)
            return rebuilt(output, values)
        if isinstance(output, Sequence) and not isinstance(output, str):
            items = list(output)
            for target, action in actions.items():
                if isinstance(target, int) and target < len(items):
                    items[target] = self._applied(items[target], action)
            return type(output)(*items) if is_namedtuple(output) else type(output)(items)
        raise LayoutError(
            f"{type(self.tp_wrapped_module).__name__} has output rules {actions} but returned a "
            f"{type(output).__name__}; it must return a tensor, a sequence or a mapping"
        )

    def _applied(self, value: Any, action: Any) -> Any:
        result = apply_action(value, action, rank=self.rank, world_size=self.world_size)
        if traffic.counts is not None:
            traffic.note(action, value, result, self.rank)
        return result
