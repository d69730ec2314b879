"""A plan as data: which action applies to which parameter, input, output and attribute.

Keys are regular expressions that are searched for in the names of the module as it was before it
was split. The state of a name is cut by the first rule that matches it. For inputs, outputs and
attributes all matching rules count, and two of them must not say different things of one thing.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Self

from torch import nn

from torchdistpackage.compat.tensor_parallel.engine.actions import (
    Partial,
    StateAction,
    as_state_action,
    on_dim,
)
from torchdistpackage.compat.tensor_parallel.engine.ops import TEXTS, Collectives, bind
from torchdistpackage.compat.tensor_parallel.engine.read_weights import Join, joins
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.cache_heads import CacheHeads
from torchdistpackage.parallel.auto.reporting import LOG

Target = int | str
"""Position of an argument or output, or its name."""
Actions = dict[Target, Any]
"""Maps each input or output to its action: a text, such as "sum" or "gather -1", or f(value,
rank=...)."""

Entrances = dict[Target, tuple[str, ...]]
"""Layers that read each input."""


@dataclasses.dataclass
class Config:
    """A plan. Each field maps a pattern to what it says; the dicts given are not changed.

    state_rules: to a StateAction. input_rules, output_rules: to {position or name: action}.
    attr_rules: to {attribute: f(value, rank=...) -> new value}.
    full_gradients: whether what shards have alike carries its gradient on each shard, or a part
        of it; ops.py says what the texts of rules then mean.
    split_modules: patterns of modules that work on split values, in which shards draw different
        random numbers: dropout layers, and attention for the dropout of scores.
    is_general: of a family with models that lack what some rules name; that is not reported.
    entrances: to {position or name of an input: column layers below the module that read it, in the
        order of their calls}. Nothing else in the module may read it; it has the action "copy".
    key_heads: of each shard, the heads of a key-value cache that it has, in its order; None: all.
    joins: how a module that reads the weight of a layer itself gets it whole (read_weights.py).
    """

    state_rules: dict[Any, StateAction]
    input_rules: dict[Any, Actions]
    output_rules: dict[Any, Actions]
    attr_rules: dict[Any, Actions]
    full_gradients: bool = False
    split_modules: tuple[Any, ...] = ()
    is_general: bool = False
    key_heads: tuple[tuple[int, ...], ...] | None = None
    entrances: dict[Any, Entrances] = dataclasses.field(default_factory=dict)
    joins: dict[Any, Join] = dataclasses.field(init=False, repr=False, compare=False)

    def __init__(
        self,
        state_rules: Mapping[Any, Any],
        input_rules: Mapping[Any, Actions],
        output_rules: Mapping[Any, Actions],
        attr_rules: Mapping[Any, Actions],
        full_gradients: bool = False,
        split_modules: Iterable[Any] = (),
        is_general: bool = False,
        key_heads: Iterable[Iterable[int]] | None = None,
        entrances: Mapping[Any, Entrances] | None = None,
    ):
        """Raises LayoutError, of all rules at once, where one says no action."""
        problems: list[str] = []
        self.full_gradients = full_gradients
        self.is_general = is_general
        self.key_heads = None if key_heads is None else tuple(map(tuple, key_heads))
        self.joins = {}
        self.split_modules = tuple(map(re.compile, split_modules))
        self.state_rules = {}
        for pattern, value in state_rules.items():
            try:
                compiled_pattern = re.compile(pattern)
                action, is_legacy = as_state_action(value)
            except re.error as error:
                problems.append(f"{pattern!r} is not a regular expression: {error}")
                continue
            except LayoutError as error:
                problems.append(f"{text_of(pattern)}: {error}")
                continue
            if is_legacy:
                LOG.warning(
                    "the state rule %r is a function, which cannot join shards again; use a "
                    "StateAction to save whole weights",
                    text_of(pattern),
                )
            self.state_rules[compiled_pattern] = action
        self.input_rules = compiled(input_rules, problems)
        self.output_rules = compiled(output_rules, problems)
        self.attr_rules = compiled(attr_rules, problems)
        self.entrances = compiled(entrances or {}, problems)
        for rules in (self.input_rules, self.output_rules):
            for pattern, actions in rules.items():
                problems += [
                    f"{pattern.pattern}: {action!r} is not an action; use {', '.join(TEXTS)}, or a "
                    "function (value, rank)"
                    for action in actions.values()
                    if not is_action(action)
                ]
        for pattern, shared in self.entrances.items():
            problems += [
                f"{pattern.pattern}: {layers!r} for {target!r} is not a tuple of names of layers"
                for target, layers in shared.items()
                if isinstance(layers, str) or not all(isinstance(name, str) for name in layers)
            ]
        for pattern, changes in self.attr_rules.items():
            problems += [
                f"{pattern.pattern}: {change!r} for {name!r} is not a function (value, rank)"
                for name, change in changes.items()
                if not callable(change)
            ]
        if problems:
            raise LayoutError("rules that say no action: " + "; ".join(problems))

    @property
    def has_heads_apart(self) -> bool:
        """Return True if the plan deals attention heads: it then changes a module's count of them,
        or of the groups that share a key, which may be all that the module keeps.
        """
        changed = map(str, chain.from_iterable(self.attr_rules.values()))
        return any("head" in name or "key_value" in name for name in changed)

    def cache_heads(self) -> CacheHeads:
        """Return which heads of a key-value cache each shard has."""
        is_known = self.key_heads is not None or not self.has_heads_apart
        return CacheHeads(self.key_heads, is_known, self.full_gradients)

    def bound(self, num: int, collectives: Collectives) -> Self:
        """Return a copy for `num` shards, in which the texts of collectives are functions (value,
        rank) that communicate.
        """
        bound = dataclasses.replace(
            self,
            input_rules=bind(self.input_rules, collectives, self.full_gradients),
            output_rules=bind(self.output_rules, collectives, self.full_gradients),
        )
        if self.full_gradients:
            bound.joins = joins(self.state_rules, num, collectives)
        return bound


def compiled(rules: Mapping[Any, Actions], problems: list[str]) -> dict[re.Pattern[str], Actions]:
    """Return `rules` by compiled patterns; what is wrong with one goes to `problems`."""
    by_pattern: dict[re.Pattern[str], Actions] = {}
    for pattern, actions in rules.items():
        try:
            by_pattern[re.compile(pattern)] = dict(actions)
        except re.error as error:
            problems.append(f"{pattern!r} is not a regular expression: {error}")
        except (TypeError, ValueError):
            problems.append(f"{text_of(pattern)}: {actions!r} is not a dict, such as {{0: 'sum'}}")
    return by_pattern


def text_of(pattern: Any) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else str(pattern)


def is_action(action: Any) -> bool:
    if isinstance(action, tuple):
        return bool(action) and is_action(action[0])
    if isinstance(action, str):
        kind, *options = action.split() or [""]
        if kind not in TEXTS:
            return False
        allowed = {"gather": (0, 1), "split": (1,)}.get(kind, (0,))
        return len(options) in allowed and all(map(re.compile(r"-?\d+$").match, options))
    return callable(action)


# -- what matches --------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """Return the name that a parameter or module had before adapters were put around it."""
    return name.replace(".base_layer.", ".").removesuffix(".base_layer")


def matching(rules: Mapping[Any, Any], name: str) -> list[Any]:
    """Return the patterns that match the name of a parameter or buffer."""
    plain = plain_name(name)
    return [pattern for pattern in rules if pattern.search(plain) or pattern.search(name)]


def find_matching_actions(action_type: str, name: str, rules: Mapping[Any, Actions]) -> Actions:
    """Merge the actions of all rules that match the module `name`; a digit as a key is a position.

    Raises:
        ValueError: two rules say different things of one key.
    """
    matched: Actions = {}
    origin: dict[Target, str] = {}
    for pattern, actions in rules.items():
        if pattern.search(name) is None:
            continue
        for key, action in actions.items():
            if isinstance(key, str) and key.strip().isdigit():
                key = int(key)
            if matched.get(key, action) != action:
                raise ValueError(
                    f"two {action_type} rules match {key!r} of module {name!r}: {origin[key]!r} "
                    f"says {matched[key]!r} and {pattern.pattern!r} says {action!r}; make the "
                    "patterns exclude each other"
                )
            matched[key], origin[key] = action, pattern.pattern
    return matched


@dataclasses.dataclass(frozen=True)
class MatchReport:
    """The match of the rules of a plan and a module.

    unmatched: (kind, pattern) of rules that speak of nothing in it. repeated: parameter -> the
    patterns that match it with different actions; the first one counts.
    """

    unmatched: tuple[tuple[str, str], ...]
    repeated: dict[str, tuple[str, ...]]

    def log(self) -> None:
        """Warn of each."""
        if self.unmatched:
            listed = ", ".join(f"{kind} {pattern!r}" for kind, pattern in self.unmatched)
            LOG.warning("rules that match nothing in this module: %s", listed)
        for name, patterns in self.repeated.items():
            LOG.warning(
                "%s is matched by %d different state rules; the first one is used: %s",
                name,
                len(patterns),
                ", ".join(map(repr, patterns)),
            )


def match_report(config: Config, module: nn.Module) -> MatchReport:
    """Return which rules match nothing, and which names several different rules match."""
    tensors = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    names = [name for name, _ in tensors]
    modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
    used: set[str] = set()
    repeated: dict[str, tuple[str, ...]] = {}
    for name in names:
        patterns = matching(config.state_rules, name)
        used.update(pattern.pattern for pattern in patterns)
        if len({id(config.state_rules[p]) for p in patterns}) > 1:
            first, *others = (config.state_rules[p] for p in patterns)
            if any(other != first for other in others):
                repeated[name] = tuple(p.pattern for p in patterns)
    unmatched = [("state", p.pattern) for p in config.state_rules if p.pattern not in used]
    for kind in ("input", "output", "attr"):
        unmatched += [
            (kind, p.pattern)
            for p in getattr(config, f"{kind}_rules")
            if not any(map(p.search, modules))
        ]
    return MatchReport(tuple(unmatched), repeated)


def state_action(config: Config, names: Iterable[str]) -> StateAction | None:
    """Return the action of one tensor, which has these names, in order; None: it stays whole."""
    for name in names:
        if patterns := matching(config.state_rules, name):
            return config.state_rules[patterns[0]]
    return None


# -- names of parameters within wrapped modules --------------------------------------------


def get_parameter_name_mapping(
    names: Iterable[str], tensor_parallel_config: Config
) -> dict[str, str]:
    """Name in the original module -> name in a shard, where wrapped modules are a level deeper."""
    patterns = (*tensor_parallel_config.input_rules, *tensor_parallel_config.output_rules)

    def is_wrapped(module: str) -> bool:
        return any(pattern.search(module) for pattern in patterns)

    return {name: renamed(name, is_wrapped) for name in names}


def renamed(name: str, is_wrapped: Callable[[str], bool]) -> str:
    """Return `name` with `tp_wrapped_module` behind each module that is wrapped."""
    parts = name.split(".")
    new = ["tp_wrapped_module"] if is_wrapped("") else []
    for at, part in enumerate(parts):
        new.append(part)
        if at < len(parts) - 1 and is_wrapped(".".join(parts[: at + 1])):
            new.append("tp_wrapped_module")
    return ".".join(new)


def add_lora_rules(model: nn.Module, config: Config) -> Config:
    """Return `config` with rules for the low-rank adapters of layers that it cuts.

    An adapter adds B A x to a layer's output. Where the layer is cut by outputs B is cut like it,
    where it is cut by inputs A is, and the ranks' products add up as the layer's do.
    """
    rules: dict[re.Pattern[str], StateAction] = {}
    dropouts: list[str] = []
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if base is None or not (hasattr(module, "lora_A") or hasattr(module, "lora_embedding_A")):
            continue
        action = state_action(config, [f"{name}.weight"])
        if action is not None:
            of_adapter = adapter_rules(name, module, base, action)
            rules |= of_adapter
            if any(
                "lora_A" in p.pattern and not isinstance(a, Partial) for p, a in of_adapter.items()
            ):
                dropouts.append(rf"^{re.escape(name)}\.lora_dropout\.")
    if not rules:
        return config
    return dataclasses.replace(
        config,
        state_rules=rules | config.state_rules,
        split_modules=(*config.split_modules, *dropouts),
    )


def adapter_rules(
    name: str, module: nn.Module, base: nn.Module, action: StateAction
) -> dict[re.Pattern[str], StateAction]:
    dim = getattr(action, "dim", None)
    prefix = re.escape(name)
    if len(getattr(module, "lora_magnitude_vector", ())):
        raise LayoutError(
            f"the adapters of {name} scale by norms of the whole weight (DoRA), which a shard does "
            f"not have; use plain LoRA, or merge the adapters first"
        )
    if dim is None:
        raise LayoutError(
            f"the layer {name} has adapters and is cut by {action!r}, which names no dim; cut it "
            f"by Split, SplitInChunks or SplitInGroupedChunks, or merge the adapters first"
        )
    if isinstance(base, nn.Embedding):
        if dim != 1:
            raise LayoutError(f"the embedding {name} has adapters; cut it along dim 1, not {dim}")
        return {
            re.compile(rf"^{prefix}\.lora_embedding_A\."): Partial(),
            re.compile(rf"^{prefix}\.lora_embedding_B\."): on_dim(action, 0),
        }
    out_dim = 1 if type(base).__name__ == "Conv1D" else 0
    if dim == out_dim:
        return {
            re.compile(rf"^{prefix}\.lora_A\."): Partial(),
            re.compile(rf"^{prefix}\.lora_B\."): on_dim(action, 0),
        }
    return {
        re.compile(rf"^{prefix}\.lora_A\."): on_dim(action, 1),
        re.compile(rf"^{prefix}\.lora_B\."): Partial(),
    }
