"""The run is a value: typed, comparable, and the same after a way through YAML."""

import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.config.check import violations
from torchdistpackage.config.load import KEYS, SECTIONS, load, loads
from torchdistpackage.config.schema import ModelSection, ParallelSection, RunConfig
from torchdistpackage.config.types import SCHEDULES, expected_of
from torchdistpackage.config.yaml_loader import write
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import num_ranks
from torchdistpackage.schedule.generators import GENERATORS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | WORDS
    | st.sampled_from(["1e-4", "yes", "null", "<<", "010", "~", "- a", "a: b", "#", "0x1", "1_0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
FREE_FORM = st.dictionaries(WORDS, PLAIN, max_size=4)
PATHS = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=8)
PATHS = PATHS.filter(lambda text: not re.search(r"^~|\$[A-Za-z_{]", text))
LINES = WORDS.filter(lambda text: bool(text.strip()) and text.isprintable())
SLURM = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("partition", "exclude"), LINES | st.lists(LINES, min_size=1, max_size=3)),
        **dict.fromkeys(("account", "comment", "conda"), LINES),
        **dict.fromkeys(("exclusive", "hold"), st.booleans() | st.none()),
        "modules": st.lists(LINES, max_size=2),
        "time": st.sampled_from([30, "30", "1:30", "1-00", "12:30:00"]),
        "nodes": st.sampled_from([2, "2-4", "2,4"]),
    },
)


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """Runs that break no rule, with values a hand would not choose."""
    count = st.integers(1, 5)
    number = st.floats(1e-12, 1e12)
    data, rounds, pieces, tensor = (draw(count) for _ in range(4))
    heads = tensor * draw(count)
    pipe = draw(count)
    layers = pipe + draw(count)  # two stages a rank have their pieces
    model: dict[str, Any] = {
        "layers": layers,
        "dim": heads * 2 * draw(count),
        "heads": heads,
        "kv_heads": draw(st.sampled_from([None, heads])),
        "head_dim": draw(st.sampled_from([None, 2, 64])),
        "mlp_hidden": draw(st.none() | st.integers(1, 9).map(lambda n: n * tensor)),
        "mlp": draw(st.sampled_from(["gelu", "gelu_tanh", "swiglu"])),
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "mlp_ratio": 4,
        "vocab": draw(st.integers(256, 70000)),
        "dropout": draw(st.floats(0, 0.999)),
        "tied": draw(st.booleans()),
        "position": draw(st.sampled_from(["rotary", "learned"])),
        "norm_eps": draw(number),
    }
    if draw(st.booleans()):
        model = {"target": "my.models:build", "args": draw(FREE_FORM)}
    source: dict[str, Any] = draw(
        st.fixed_dictionaries({"name": st.sampled_from(["text", "tokens"]), "path": PATHS})
        | st.fixed_dictionaries({"target": st.just("d:build"), "args": FREE_FORM})
        | st.just({})
    )
    order = draw(st.permutations(["data", "pipe", "context", "tensor"]))
    steps = draw(st.integers(1, 10**6))
    return RunConfig.model_validate(
        {
            "run": {"dir": draw(PATHS), "seed": draw(st.integers(0, 2**63 - 1))},
            "parallel": {
                "order": order,
                "data": draw(st.sampled_from([data, "auto"])),
                "pipe": pipe,
                "tensor": tensor,
                "sequence_parallel": draw(st.booleans()),
            },
            "pipeline": {
                "schedule": draw(st.sampled_from([s for s in SCHEDULES if s != "custom"])),
                "microbatches": pieces,
            },
            "model": model,
            "data": {
                **source,
                "seq_len": tensor * draw(count),
                "global_batch": data * rounds * pieces * draw(count),
            },
            "optim": {
                "lr": draw(number),
                "betas": [draw(st.floats(0, 0.999)), 0],
                "warmup_steps": draw(st.integers(0, steps)),
            },
            "precision": {
                "dtype": draw(st.sampled_from(["float32", "float64", "bf16", "bfloat16"]))
            },
            "train": {"steps": steps, "accumulate": rounds},
            "checkpoint": {"save_every_min": draw(st.none() | st.floats(1e-12, 1e6))},
            "launch": {
                "slurm": draw(SLURM),
                "local": {"procs": draw(st.sampled_from([None, data * pipe * tensor]))},
            },
        }
    )


@given(runs())
def test_a_resolved_run_reloads_to_an_equal_value(config: RunConfig) -> None:
    """What is saved beside the outputs is the run itself, and it breaks no rule on reading."""
    if config.parallel.data == "auto":
        assert loads(config.to_yaml()) == config
        batch, rounds = config.data.global_batch, config.train.accumulate
        data = batch // (rounds * config.pipeline.microbatches)
        world_size = config.launch.local.procs or config.parallel.model_size * data
        config = config.resolve(world_size)
        assert config.parallel.data == world_size // config.parallel.model_size
    assert violations(config) == ()
    text = config.to_yaml()
    again = loads(text)
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_yaml() == text


def test_the_saved_file_holds_every_key_in_the_order_of_the_schema() -> None:
    lines = RunConfig().to_yaml().splitlines()
    sections = [line.rstrip(":") for line in lines if not line.startswith(" ")]
    assert sections == [
        *["run", "parallel", "pipeline", "model", "data", "ddp", "optim", "precision"],
        *["train", "checkpoint", "launch", "log"],
    ]
    assert sum(": " in line for line in lines) == len(KEYS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_resolves(path: Path) -> None:
    config = load(path)
    assert config.launch.local.procs is None, "a file that pins it refuses other degrees"
    world_size = 8 if config.parallel.data == "auto" else num_ranks(config)
    assert violations(config, world_size) == ()
    resolved = config.resolve(world_size)
    sizes = dict(resolved.parallel.axes())
    assert sizes["data"] * sizes["pipe"] * sizes["context"] * sizes["tensor"] == world_size
    assert config.run.name == path.stem
    assert loads(resolved.to_yaml()) == resolved


def test_gpt_tiny_is_there() -> None:
    config = load(ROOT / "configs" / "gpt_tiny.yaml")
    assert (config.optim.lr, config.parallel.axes()) == (
        1e-3,
        (("data", 2), ("pipe", 2), ("context", 1), ("tensor", 1)),
    )


@pytest.mark.parametrize("path", KEYS)
def test_every_key_is_described_and_says_what_it_wants(path: str) -> None:
    info = KEYS[path]
    assert info.description and info.description.endswith(".") and "\n" not in info.description
    assert expected_of(info).text


@pytest.mark.parametrize("path", KEYS)
def test_every_default_can_be_written_as_an_override(path: str) -> None:
    value: Any = RunConfig().model_dump()
    for key in path.split("."):
        value = value[key]
    text = write({"v": value}).removeprefix("v: ")
    assert loads("", overrides=[f"{path}={text}"]) == RunConfig()


def test_the_json_schema_describes_every_key_and_refuses_others() -> None:
    schema = RunConfig.json_schema()
    seen = set[str]()

    def walk(node: dict[str, Any], path: str) -> None:
        assert node["additionalProperties"] is False
        for name, child in node["properties"].items():
            dotted = f"{path}.{name}".removeprefix(".")
            seen.add(dotted)
            if "$ref" in child:
                child = schema["$defs"][child["$ref"].rpartition("/")[2]]
                walk(child, dotted)
            assert child.get("description"), dotted

    walk(schema, "")
    assert seen == set(KEYS) | set(SECTIONS) - {""}
    assert schema["$schema"].startswith("https://json-schema.org/")
    parallel = schema["$defs"]["ParallelSection"]["properties"]
    assert parallel["order"]["items"]["enum"] == ["data", "pipe", "context", "tensor"]
    assert schema["$defs"]["PipelineSection"]["properties"]["schedule"]["enum"] == list(SCHEDULES)


def test_schedules_are_those_that_can_be_generated() -> None:
    assert {*SCHEDULES, "forward"} == {*GENERATORS, "auto", "custom"}


@pytest.mark.parametrize("name", ["zb_h1", "ZBH1", "ZB-H1", "zb-h1"])
def test_a_schedule_has_one_name_for_all_its_spellings(name: str) -> None:
    assert loads(f"pipeline: {{schedule: {name}}}").pipeline.schedule == "zb-h1"


def test_types_are_strict_but_whole_floats_count() -> None:
    config = loads("train: {steps: 4.0}\noptim: {lr: 1, warmup_steps: 0}\nparallel: {pipe: 2.0}")
    assert (config.train.steps, type(config.train.steps)) == (4, int)
    assert (config.optim.lr, type(config.optim.lr)) == (1.0, float)
    assert (config.parallel.pipe, type(config.parallel.pipe)) == (2, int)
    assert loads("precision: {dtype: bfloat16}").precision.dtype == "bf16"


def test_a_run_is_frozen_and_usable_as_a_key() -> None:
    config = loads("model: {target: 'a:b', args: {x: [1]}}")
    with pytest.raises(pydantic.ValidationError):
        config.train.steps = 3
    assert {config: 1}[loads(config.to_yaml())] == 1
    assert RunConfig().model.args is not RunConfig().model.args


def test_a_target_takes_the_place_of_the_default_name() -> None:
    assert (ModelSection().name, ModelSection(target="a:b").name) == ("gpt", None)
    assert loads("data: {target: 'a.b:c'}").data.name is None


def test_the_axis_order_is_completed_with_the_axes_left_out() -> None:
    parallel = loads("parallel: {order: [tensor, data], tensor: 2, data: 2}").parallel
    assert parallel.axes() == (("tensor", 2), ("data", 2), ("pipe", 1), ("context", 1))
    assert loads("parallel: {order: [tensor], tensor: 2}").resolve(2).parallel.data == 1
    with pytest.raises(ConfigError, match="data is auto"):
        ParallelSection().axes()


@pytest.mark.parametrize(
    ("overrides", "world_size", "text"),
    [
        (
            ["parallel.pipe=2", "parallel.tensor=2"],
            6,
            "parallel: data=auto x pipe=2 x context=1 x tensor=2 must use all 6 ranks but uses 4; "
            "4 ranks hold one model replica, so ask for a multiple of 4",
        ),
        (
            ["parallel.data=2", "parallel.pipe=2"],
            8,
            "parallel: data=2 x pipe=2 x context=1 x tensor=1 must use all 8 ranks but uses 4; "
            "2 ranks hold one model replica, so ask for 4 ranks or set data to 4",
        ),
        (
            ["parallel.data=3", "parallel.tensor=2", "data.global_batch=36"],
            3,
            "parallel: data=3 x pipe=1 x context=1 x tensor=2 must use all 3 ranks but uses 6; "
            "2 ranks hold one model replica, so ask for 6 ranks",
        ),
    ],
)
def test_resolve_gives_all_numbers_when_the_world_does_not_fit(
    overrides: list[str], world_size: int, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loads("", overrides=overrides).resolve(world_size)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (5, 0), (50, 5), (199, 19), (200, 20), (9000, 20)]
)
def test_the_default_warmup_fits_a_run_of_any_length(steps: int, warmup: int) -> None:
    config = loads(f"train: {{steps: {steps}}}")
    assert config.optim.warmup(steps) == warmup
    assert loads(config.to_yaml(), overrides=["train.steps=3"]).optim.warmup(3) == 0
    assert loads("optim: {warmup_steps: 1}").optim.warmup(steps) == 1
