"""Each rule across sections: it speaks when broken, and offers what works."""

from typing import Any

import pytest

from tests.config.broken_models import BROKEN_MODELS
from tests.config.broken_runs import BROKEN, ON_RANKS
from torchdistpackage.config.check import RULES, failed_rules, violations
from torchdistpackage.config.schema import RunConfig


def run(**values: Any) -> RunConfig:
    """A run from dotted names with `__` for the dot, not checked across sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return RunConfig.model_validate(tree)


ROWS = [*((values, None, *said) for values, *said in (*BROKEN, *BROKEN_MODELS)), *ON_RANKS]


def missing(facts: str, text: str) -> str | None:
    """Return the first word of `facts` that does not follow the ones before it in `text`."""
    end = 0
    for fact in facts.split():
        if (start := text.find(fact, end)) < 0:
            return fact
        end = start + len(fact)
    return None


@pytest.mark.parametrize(("values", "world_size", "path", "text"), ROWS)
def test_each_rule_names_values_and_what_to_change(
    values: dict[str, Any], world_size: int | None, path: str, text: str
) -> None:
    (problem,) = violations(run(**values), world_size)
    assert problem.path == path
    assert missing(text, problem.text) is None, problem.text
    assert str(problem).startswith(f"{path}: ")


def test_the_tables_break_every_rule() -> None:
    """A rule without a row would never have been seen to speak."""
    spoken = {keys for values, world, *_ in ROWS for keys, _ in failed_rules(run(**values), world)}
    assert spoken == {rule.fields for rule in RULES} and len(spoken) == len(RULES)


@pytest.mark.parametrize(
    "values",
    [
        {"parallel__sequence_parallel": True},
        {"parallel__tensor": 4, "model__vocab": 257},
        {"parallel__pipe": 10},
        {"parallel__pipe": 2, "pipeline__schedule": "interleaved", "pipeline__chunks": 5},
        {"pipeline__schedule": "auto", "pipeline__chunks": 3, "parallel__pipe": 3},
        {"parallel__order": (), "parallel__data": 1},
        {"model__dim": 12, "model__position": "learned"},
        {"model__vocab": 7, "data__name": "tokens", "data__path": "ids", "data__dtype": "uint8"},
        {"model__vocab": 7, "model__target": "a:b"},
        {"model__target": "a:b", "parallel__tensor": 3, "parallel__pipe": 9},
        {"data__target": "a:b", "data__args": {"x": 1}},
        {"model__loss": "a:b"},
    ],
)
def test_what_is_harmless_is_allowed(values: dict[str, Any]) -> None:
    assert violations(run(**values)) == ()
