"""Translation of tensor names between this library and another, by a mapping file.

The file is YAML with a line `ours: theirs` for each kind of name. `*` stands for the text between
two dots, in order. `theirs[*]` is one tensor that stacks those of all layers along its first dim,
as in Megatron's torch_dist folders:

    blocks.*.attn.qkv.weight: decoder.layers.self_attention.linear_qkv.weight[*]
    blocks.*.mlp.up.weight: layers.*.feed_forward.w1.weight
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from torch import Tensor

from torchdistpackage.bounded import read_regular
from torchdistpackage.bounded_yaml import BoundedLoader
from torchdistpackage.checkpoint.formats.source import Described, TensorSource
from torchdistpackage.errors import CheckpointError

_STACKED = "[*]"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class NameRule:
    """One line of a mapping file."""

    ours: str
    theirs: str

    @property
    def is_stacked(self) -> bool:
        return self.theirs.endswith(_STACKED)


def read_names(path: Path) -> tuple[NameRule, ...]:
    """Read the rules of a mapping file.

    Raises:
        CheckpointError: a line is not `ours: theirs`, or its sides have unequal numbers of `*`.
    """
    try:
        # BoundedLoader creates plain values only, within limits: the file may be a stranger's
        lines = yaml.load(read_regular(path, _MAX_BYTES).decode(), BoundedLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as YAML: {error}; correct the file"
        ) from error
    if not isinstance(lines, Mapping):
        raise CheckpointError(
            f"{path}: got {str(lines)[:40]!r}; write one line `our name: their name` for each "
            "tensor"
        )
    rules = list[NameRule]()
    for ours, theirs in lines.items():
        if not isinstance(ours, str) or not isinstance(theirs, str):
            raise CheckpointError(
                f"{path}: {ours}: got {str(theirs)[:40]!r}; write the name of one of their tensors"
            )
        if ours.count("*") != theirs.count("*"):
            raise CheckpointError(
                f"{path}: {ours} has {ours.count('*')} `*`, {theirs} {theirs.count('*')}; write as "
                "many on both sides"
            )
        rules.append(NameRule(ours, theirs))
    return tuple(rules)


def translate(name: str, pattern: str, into: str) -> str | None:
    """Return `name` rewritten from `pattern` to `into`, or None if it does not match."""
    parts = (re.escape(part) for part in pattern.split("*"))
    match = re.fullmatch("([^.]+)".join(parts), name)
    if match is None:
        return None
    pieces = into.split("*")
    return "".join(a + b for a, b in zip(pieces, (*match.groups(), ""), strict=True))


def as_theirs(source: TensorSource, rules: Iterable[NameRule]) -> TensorSource:
    """Return the tensors that rules name, under the other library's names.

    Raises:
        CheckpointError: a rule stacks layers, which works only for imports.
    """
    rules = tuple(rules)
    if stacked := next((rule for rule in rules if rule.is_stacked), None):
        raise CheckpointError(
            f"{stacked.theirs}: stacked layers can only be imported; remove the rule to export"
        )
    ours: dict[str, str] = {}
    for name in source.tensors:
        translations = (translate(name, rule.ours, rule.theirs) for rule in rules)
        if (theirs := next(filter(None, translations), None)) is not None:
            ours[_free(theirs, ours)] = name
    return _renamed(source, ours)


def as_ours(source: TensorSource, rules: Iterable[NameRule]) -> TensorSource:
    """Return the tensors that rules name, under our names.

    Raises:
        CheckpointError: two tensors would get the same name.
    """
    tensors: dict[str, Described] = {}
    reads: dict[str, tuple[str, int | None]] = {}
    for name, (dtype, shape) in source.tensors.items():
        for rule in rules:
            if rule.is_stacked:
                if name != rule.theirs.removesuffix(_STACKED) or not shape:
                    continue
                for index in range(shape[0]):
                    ours = _free(rule.ours.replace("*", str(index)), tensors)
                    tensors[ours], reads[ours] = (dtype, shape[1:]), (name, index)
                break
            if (ours := translate(name, rule.theirs, rule.ours)) is not None:
                ours = _free(ours, tensors)
                tensors[ours], reads[ours] = (dtype, shape), (name, None)
                break

    def read(name: str) -> Tensor:
        theirs, index = reads[name]
        tensor = source.read(theirs)
        return tensor if index is None else tensor[index]

    return replace(source, tensors=tensors, read=read)


def _renamed(source: TensorSource, names: Mapping[str, str]) -> TensorSource:
    """Return a source with these new names (new -> old)."""
    tensors = {new: source.tensors[old] for new, old in names.items()}
    return replace(source, tensors=tensors, read=lambda name: source.read(names[name]))


def _free(name: str, used_names: Mapping[str, object]) -> str:
    """Return `name`; refuse one that another tensor already has."""
    if name in used_names:
        raise CheckpointError(f"two tensors would be called {name}; correct the mapping file")
    return name
