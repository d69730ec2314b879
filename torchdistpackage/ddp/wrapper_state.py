"""The base of modules that wrap another and use a group: names, copies, pickles and changes.

Names are those of the plain module everywhere, so that a state dict loads with any wrapper and
without one; a parameter with several names has the first. A copied or unpickled wrapper is an
independent wrapper over the same ranks. Groups and hooks can be neither copied nor pickled, so the
copy creates its own.
"""

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from operator import attrgetter, is_, methodcaller

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import group_again
from torchdistpackage.ddp.param_spec import batch_group

_requires_grad, _values = attrgetter("requires_grad"), methodcaller("values")


class Wrapper(nn.Module):
    """A module that wraps `module`.

    process_group: default: tpc's batch ranks, or all ranks without tpc.
    """

    _of_this_process: tuple[str, ...] = ("_group",)
    """Attributes that are None after unpickling, until they are needed."""
    _shared_by_copies: tuple[str, ...] = ("_group",)

    def __init__(self, module: nn.Module, process_group: Group | None):
        super().__init__()
        self.module = module
        self._group = process_group
        self._ranks_given = None if process_group is None else ranks_of(process_group)
        self.register_state_dict_post_hook(_strip)
        self.register_load_state_dict_pre_hook(_add)

    @property
    def group(self) -> Group:
        """The ranks that see different batches."""
        if self._group is None:
            ranks = self._ranks_given
            self._group = batch_group() if ranks is None else group_again(ranks)
        return self._group

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args, **kwargs):
        """Load a state dict with the names of the wrapped module, or with the wrapper's own."""
        state: OrderedDict[str, Tensor] = OrderedDict(state_dict)
        versions = getattr(state_dict, "_metadata", None)
        if versions is not None:
            if not any(f"{name}.".startswith(self._own_names()) for name in versions):
                inside = {f"module.{n}".removesuffix("."): v for n, v in versions.items()}
                versions = {**versions, **inside}
            state._metadata = versions
        return super().load_state_dict(state, *args, **kwargs)

    def _own_names(self) -> str:
        """Return the prefix of the wrapper's own names; a child may be called `module` too."""
        return "module.module." if hasattr(self.module, "module") else "module."

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in self._of_this_process}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.__dict__.update(dict.fromkeys(self._of_this_process))

    def __deepcopy__(self, memo: dict[int, object]) -> "Wrapper":
        copy = memo[id(self)] = type(self).__new__(type(self))
        shared = {name: self.__dict__[name] for name in self._shared_by_copies}
        state = {k: v for k, v in self.__getstate__().items() if k not in shared}
        copy.__setstate__(deepcopy(state, memo))
        copy.__dict__.update(shared)
        return copy


class ModuleWatch:
    """A watch for changes of a module's parameters, cheap enough for every forward (one
    pass in C).
    """

    def __init__(self, module: nn.Module):
        modules = list(module.modules())
        self._tables = [table for m in modules for table in (m._modules, m._parameters)]
        self._buffers = [m._buffers for m in modules]
        self._known = self._all()
        self._frozen = [p for p in module.parameters() if not p.requires_grad]

    def has_changed(self) -> bool:
        """Return whether modules or parameters were added, removed, replaced or unfrozen."""
        current = self._all()
        is_same = len(current) == len(self._known) and all(map(is_, current, self._known))
        return not is_same or any(map(_requires_grad, self._frozen))

    def has_buffers(self) -> bool:
        """Return whether the module has buffers, not counting modules that were added later."""
        return any(self._buffers)

    def _all(self) -> list[object]:
        return list(chain.from_iterable(map(_values, self._tables)))


def _strip(module: nn.Module, state: dict[str, Tensor], prefix: str, local: dict) -> None:
    """Rename the wrapper's entries of a state dict to the module's own names."""
    old = f"{prefix}module."
    for key in [key for key in state if key.startswith(old)]:
        state[prefix + key.removeprefix(old)] = state.pop(key)
    versions, inside = getattr(state, "_metadata", {}), old[:-1]
    # versions go under both names: a plain module looks up its own, a nested wrapper looks up its
    for name in [name for name in versions if f"{name}.".startswith(old)]:
        versions[(prefix[:-1] + name.removeprefix(inside)).removeprefix(".")] = versions[name]


def _add(module: "Wrapper", state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Undo `_strip` before loading; entries that already have the wrapper's names stay."""
    own_prefix = prefix + module._own_names()
    for key in [k for k in state if k.startswith(prefix) and not k.startswith(own_prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return `model` without NaiveDDP, torch's data parallel and torch.compile, in any order."""
    wrappers = Wrapper | DistributedDataParallel | DataParallel
    # recognise torch.compile's wrapper by its attribute: importing its class takes seconds
    inside = model.module if isinstance(model, wrappers) else getattr(model, "_orig_mod", None)
    return unwrap_model(inside) if isinstance(inside, nn.Module) else model


def aliases(module: nn.Module) -> dict[str, str]:
    """Return further name -> first name, for parameters and buffers with several names."""
    first: dict[object, str] = {}
    both = (module.named_parameters, module.named_buffers)
    named = chain.from_iterable(names(remove_duplicate=False) for names in both)
    return {name: first[x] for name, x in named if first.setdefault(x, name) != name}
