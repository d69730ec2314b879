"""A plan reads the keys that it declares, so a mistake elsewhere does not hide what it says."""

from pathlib import Path

import pytest

from torchdistpackage.config.load import KEYS, SECTIONS, load
from torchdistpackage.config.schema import Section
from torchdistpackage.plan import run_plan
from torchdistpackage.plan.run_plan import PLAN_KEYS, make_plan, num_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
AUTO = ("train.recompute=auto", "train.memory_gb=16")


@pytest.fixture
def read_keys(monkeypatch) -> set[str]:
    """Keys that are read from now on, by any section of their class."""
    paths: dict[str, list[str]] = {}
    for path, section in SECTIONS.items():
        paths.setdefault(section.__name__, []).append(path)
    keys: set[str] = set()
    get = Section.__getattribute__

    def record(section: Section, name: str):
        dotted = (f"{path}.{name}" for path in paths.get(type(section).__name__, ()))
        keys.update(key for key in dotted if key in KEYS)
        return get(section, name)

    monkeypatch.setattr(Section, "__getattribute__", record)
    return keys


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("gpt_tiny", ()),
        ("moe_tiny", AUTO),
        ("gpt_tiny", ("train.compile=blocks", "parallel.zero=2", "parallel.zero_group=node")),
        ("gpt_slurm", AUTO),
        ("gpt_tiny", (*AUTO, "optim.groups=[{params: ['*'], lr: 0.1}]", "optim.ema_decay=0.9")),
    ],
)
def test_a_plan_reads_only_the_keys_it_declares(file, changes, read_keys, monkeypatch) -> None:
    config = load(CONFIGS / f"{file}.yaml", changes)
    world_size = num_ranks(config)
    monkeypatch.setattr(run_plan, "violations", lambda *_: ())  # rules declare their own keys
    read_keys.clear()
    make_plan(config, world_size)
    declared = {key for key in KEYS if any(f"{key}.".startswith(f"{x}.") for x in PLAN_KEYS)}
    assert "parallel.tensor" in read_keys and read_keys <= declared
    assert all(x in KEYS or x in SECTIONS for x in PLAN_KEYS)
