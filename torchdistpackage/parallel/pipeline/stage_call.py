"""How a stage is called with what the stage before gave and with keyword inputs.

One rule: the signature of its forward decides, once. A tuple goes in as positional arguments where
the forward takes so many, a dict by name where it names every key; else either goes in whole. A
keyword input goes to the stages that name it. A *skip* is a member of a dict that goes to the
stages that name it, however far ahead: those between hand it on without seeing it.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torchdistpackage.comm.messages import Message
from torchdistpackage.parallel.pipeline.skips import Members, pack_with_skips, unpack_with_skips

Stage = Callable[..., object]
_WRAPPED = ("module", "_orig_mod", "fn")
"""Where wrappers that take anything keep what they call."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a forward takes. positional: names in order; any_*: takes `*args`, `**kwargs`.

    required: names without a default, in order.
    """

    positional: tuple[str, ...]
    named: frozenset[str]
    any_positional: bool
    any_named: bool
    required: tuple[str, ...] = ()

    @classmethod
    def of(cls, stage: Stage) -> "Signature":
        """Of what `stage` wraps, if it takes anything itself; some builtins do not tell theirs."""
        called = stage.forward if isinstance(stage, nn.Module) else stage
        try:
            found = list(inspect.signature(called).parameters.values())
        except (TypeError, ValueError):
            return cls((), frozenset(), any_positional=True, any_named=False)
        kinds = {p.kind for p in found}
        if kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            inside = [getattr(stage, name, None) for name in _WRAPPED]
            inner = next((x for x in inside if callable(x)), None)
            if inner is not None:
                return cls.of(inner)
        return cls(
            tuple(p.name for p in found if p.kind in _POSITIONAL),
            frozenset(p.name for p in found if p.kind in _NAMED),
            inspect.Parameter.VAR_POSITIONAL in kinds,
            inspect.Parameter.VAR_KEYWORD in kinds,
            tuple(
                p.name
                for p in found
                if p.default is p.empty and p.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
            ),
        )

    def takes(self, name: str) -> bool:
        return self.any_named or name in self.named

    def takes_positional(self, number: int, given: Mapping[str, object]) -> bool:
        """Whether so many fit beside what is given by name."""
        free = sum(name not in given for name in self.positional)
        return self.any_positional or number <= free

    def misfit(self, number: int, given: Collection[str] = ()) -> str:
        """What is wrong with a call of `number` arguments and these by name; or nothing."""
        if number > len(self.positional) and not self.any_positional:
            told = f" ({', '.join(self.positional)})" if self.positional else ""
            return f"takes {len(self.positional)} positional arguments{told}, not {number}"
        filled = self.positional[:number]
        if twice := [name for name in filled if name in given and name in self.named]:
            return f"is given {', '.join(twice)} by position and by name"
        missing = [name for name in self.required if name not in filled and name not in given]
        return f"needs {', '.join(missing)}" if missing else ""


class StageAdapter:
    """One stage, ready to be called for a microbatch.

    skips: all names that are skips. onward: those that a later stage names.
    """

    def __init__(self, stage: Stage, signature: Signature, skips: Sequence[str], onward: set[str]):
        self._stage, self._signature = stage, signature
        self._skips, self._forwarded = frozenset(skips), onward

    def first(self, args: tuple[object, ...], inputs: Mapping[str, object]) -> object:
        """Of the first stage, with a microbatch of the step's own arguments."""
        return self._stage(*args, **inputs)

    def later(self, received: Message, inputs: Mapping[str, object]) -> object:
        """Of a stage that got `received`."""
        takes = self._signature
        if isinstance(received, dict):
            if takes.any_named or takes.named.issuperset(received):
                return self._stage(**received, **inputs)
        elif isinstance(received, tuple | list) and takes.takes_positional(len(received), inputs):
            return self._stage(*received, **inputs)
        return self._stage(received, **inputs)

    def unpack(self, received: Message) -> tuple[Message, Members, Members]:
        """(message, skips that this stage takes, skips that go on) of what came with skips."""
        assert isinstance(received, dict)
        message, skips = unpack_with_skips(received)
        if isinstance(message, dict) and len(message) == 1:
            (message,) = message.values()
        mine = {name: x for name, x in skips.items() if name in self._signature.named}
        return message, mine, {name: x for name, x in skips.items() if name in self._forwarded}

    def pack(self, output: Message, skips: Members) -> Message:
        """`output` with the skips that pass this stage or begin in it."""
        if isinstance(output, dict):
            skips = skips | {name: x for name, x in output.items() if name in self._forwarded}
            output = {name: x for name, x in output.items() if name not in self._skips}
        return pack_with_skips(output, skips)


def last_takers(skips: Sequence[str], signatures: Mapping[int, Signature]) -> dict[str, int]:
    """Of each skip the last stage that names it; without one it is not listed."""
    found: dict[str, int] = {}
    for stage, signature in sorted(signatures.items()):
        found |= {name: stage for name in skips if stage and name in signature.named}
    return found
