"""Each rule across sections reads only the keys that it declares."""

from typing import Any

import pytest

from tests.config.test_rules import run
from torchdistpackage.config.check import RULES
from torchdistpackage.config.load import KEYS
from torchdistpackage.config.rules import Rule
from torchdistpackage.config.schema import Section


class Recorder:
    """Stands for a section and notes which keys are read, through properties and methods too."""

    def __init__(self, inner: Section, path: str, seen: set[str]) -> None:
        self.inner, self.path, self.seen = inner, path, seen

    def __getattr__(self, name: str) -> Any:
        dotted = f"{self.path}.{name}".removeprefix(".")
        if name == "model_copy":  # writes; what it is given has been read by then
            return lambda update: self
        member = getattr(type(self.inner), name, None)
        if isinstance(member, property):
            return member.fget(self)
        if name not in type(self.inner).model_fields:
            return member.__get__(self)
        value = getattr(self.inner, name)
        if isinstance(value, Section):
            return Recorder(value, dotted, self.seen)
        self.seen.add(dotted)
        return value


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.message.__name__)
@pytest.mark.parametrize("world_size", [None, 1, 3])
def test_rules_read_only_the_keys_they_declare(rule: Rule, world_size: int | None) -> None:
    assert set(rule.fields) <= set(KEYS)
    read: set[str] = set()
    for values in (
        {"parallel__sequence_parallel": True, "launch__local": {"procs": 5}},
        {"parallel__data": 1, "parallel__tensor": 3, "data__global_batch": 31, "model__dim": 12},
        {"model__target": "a:b", "model__layers": 9, "data__target": "c:d", "data__path": "x"},
        {"data__name": "text", "model__args": {"x": 1}},
    ):
        config = run(**values)
        rule.message(Recorder(config, "", read), world_size)
    assert read <= set(rule.fields)
