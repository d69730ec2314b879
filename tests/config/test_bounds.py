"""What a file may ask for is bounded: refused with its line, at once, in little memory."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from torchdistpackage.bounded_yaml import MAX_DEPTH, MAX_NODES
from torchdistpackage.cli.main import main
from torchdistpackage.config import rules_pipeline
from torchdistpackage.config.check import absent_files
from torchdistpackage.config.errors import MAX_PROBLEMS, ConfigErrors, Problem
from torchdistpackage.config.load import KEYS, load, loads
from torchdistpackage.config.rules import divisors
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.types import MAX_NAME_BYTES, expected_of
from torchdistpackage.config.yaml_loader import MAX_BYTES
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.schedule import costs as costs_file

OWN = "model: {target: 'a:b', args: {x: %s}}\n"


def refused(text: str, *overrides: str) -> tuple[Problem, ...]:
    """The problems; found in a second or two of a loaded machine."""
    began = time.process_time()
    with pytest.raises(ConfigErrors) as error:
        loads(text, "r.yaml", overrides)
    assert time.process_time() - began < 5
    return error.value.problems


def bomb(levels: int, width: int) -> str:
    """A few hundred bytes that stand for width ** levels values."""
    lines = ["a0: &a0 [" + ",".join("x" * width) + "]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * width)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


CHAIN = "a0: &a0 [1]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 99))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "line", "number"),
    [
        (bomb(9, 9), 5, f"{MAX_NODES:,}"),
        (CHAIN, 49, "50 levels"),
        ("b: 1\na: " + "[" * (MAX_DEPTH + 9), 2, f"{MAX_DEPTH} levels"),
        ("b: 1\na: [" + "a," * (MAX_NODES + 1), 2, f"{MAX_NODES:,}"),
        ("run: {dir: a}\n#" + "b" * MAX_BYTES, 1, f"{MAX_BYTES:,}"),
        ("b: 1\n" + "a" * 201 + ": 1", 2, "201 characters"),
        ("b: 1\nrun: {dir: " + "a" * 70_000 + "}", 2, "70,000 characters"),
        ("b: 1\ntrain: {steps: 0x" + "f" * 5000 + "}", 2, "5,002 characters"),
        ("b: 1\na: &a {<<: *a}", 2, "<<"),
        ("b: 1\na: &a [*a]", 2, "a[0]: the alias"),
        ('b: 1\nrun: {dir: "\\ud800"}', 2, "0xd800"),
    ],
)
def test_what_would_be_too_much_names_its_line_and_the_bound(text, line, number):
    found = refused(text)
    assert any(p.line == line and number in str(p) for p in found), [str(p)[:200] for p in found]


def test_anchors_in_ordinary_use_are_read():
    config = loads(OWN % "&x [1, &y {b: 2}, *y]")
    assert config.model.args == {"x": [1, {"b": 2}, {"b": 2}]}


@pytest.mark.few(1)
@pytest.mark.parametrize("section", ["", "launch: {slurm: {%s}}"])
def test_of_thousands_of_problems_the_first_are_named(section):
    keys = [f"k{i}: 1" for i in range(2000)]
    found = refused(section % ", ".join(keys) if section else "\n".join(keys))
    assert MAX_PROBLEMS <= len(found) <= MAX_PROBLEMS + 2


def most(key: str, schema: dict[str, Any]) -> int | None:
    """The bound that the JSON schema shows."""
    section, _, name = key.rpartition(".")
    place = schema
    for part in filter(None, section.split(".")):
        place = schema["$defs"][place["properties"][part]["$ref"].rpartition("/")[2]]
    field = place["properties"][name]
    return next((x["maximum"] for x in (field, *field.get("anyOf", ())) if "maximum" in x), None)


# numbers of a list are bounded by its type
COUNTS = [
    key
    for key, field in KEYS.items()
    if "whole number" in (text := expected_of(field).text) and not text.startswith("a list")
]


def test_every_count_has_a_bound_that_the_schema_shows():
    schema = RunConfig.json_schema()
    bounds = {key: most(key, schema) for key in COUNTS if key != "run.seed"}  # no amount
    assert len(bounds) > 25 and all(bound and bound <= 10**9 for bound in bounds.values()), bounds
    for over in (lambda bound: bound + 1, lambda bound: 10**12, lambda bound: 10**99):
        problems = refused("", *(f"{key}={over(bound)}" for key, bound in bounds.items()))
        found = {p.path: p.text for p in problems}
        assert [k for k, bound in bounds.items() if f"{bound:,}" not in found.get(k, "")] == []


TIMES = ("train.step_timeout_s", "launch.init_timeout_s", "launch.requeue.margin_s")


@pytest.mark.parametrize("key", [*TIMES, "checkpoint.save_every_min", "model.mlp_ratio"])
def test_times_and_ratios_have_bounds(key):
    assert refused("", f"{key}=1e300")[0].path == key


@pytest.mark.parametrize("key", ["run.dir", "pipeline.costs", "pipeline.file", "data.path"])
@pytest.mark.parametrize(
    "value", ["a\\0b", "a\\nb", "a\\e[2J", "a\\u2028b", "a" * 256, "a/" * 3000]
)
def test_a_path_is_one(key, value):
    (found,) = (p for p in refused("", f'{key}="{value}"') if "wants a path" in p.text)
    assert found.path == key
    assert str(found).isprintable()


@pytest.mark.parametrize("name", ["a" * 100_000, "a" * (MAX_NAME_BYTES + 1), "ä" * 101, "a\\0"])
def test_the_name_of_a_run_fits_into_a_folder(name):
    assert refused("", f'run.name="{name}"')[0].path == "run.name"


def test_names_of_a_sweep_fit_into_a_folder(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("run: {name: " + "a" * 150 + "}\n")
    sweep = "--sweep=model.norm_eps=" + "0" * 60 + "1"
    assert main(["submit", "run.yaml", "--dry-run", sweep]) == 2
    assert "more than the 200 allowed" in capsys.readouterr().err


def test_a_machine_is_not_filled_with_processes(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("parallel: {data: 100000}\ndata: {global_batch: 400000}\n")
    assert main(["train", "run.yaml"]) == 2
    assert "100,000 processes on this machine" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_an_endless_or_large_file_is_not_read(tmp_path: Path):
    with pytest.raises(ConfigErrors, match="cannot be read: is a device"):
        load("/dev/zero")
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigErrors, match=f"{MAX_BYTES + 1:,} bytes, more than the {MAX_BYTES:,}"):
        load(large)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (bomb(9, 9), "alias"),
        pytest.param(
            *("forward: [1" + ",1" * MAX_NODES + "]", f"{MAX_NODES:,}"), marks=pytest.mark.full
        ),
        ("forward: " + "[" * 300, f"{MAX_DEPTH} levels"),
        ("forward: [0x" + "f" * 5000 + "]\nbackward: 1", "finite"),
        ("forward: !!int ''", "not YAML"),
        ("forward: !!python/object/apply:os.system ['touch x']", "not YAML"),
        ("forward: \0", "not YAML"),
        (b"\xff", "cannot be read"),
        (None, "is a pipe"),
        (Path("/dev/zero"), "is a device"),
        (Path("/"), "is a folder"),
    ],
)
@pytest.mark.parametrize("key", ["costs", "file"])
def test_files_that_the_file_names_are_bounded(tmp_path: Path, key, content, why):
    named = tmp_path / "named"
    if content is None:
        os.mkfifo(named)
    elif isinstance(content, Path):
        named.symlink_to(content)
    else:
        named.write_bytes(content if isinstance(content, bytes) else content.encode())
    schedule = "custom" if key == "file" else "1f1b"
    found = refused("", f"pipeline.{key}={named}", f"pipeline.schedule={schedule}")
    assert {p.path for p in found} == {f"pipeline.{key}"}
    assert key == "file" or why in str(found[0])
    assert len(str(found[0])) < 700


@pytest.mark.parametrize(
    ("key", "module"), [("costs", costs_file), ("file", rules_pipeline)], ids=["costs", "file"]
)
def test_a_file_that_is_wrong_on_every_world_is_parsed_once(tmp_path: Path, key, module):
    named = tmp_path / "named"
    named.write_text("forward: x" if key == "costs" else "0F0,0F0")
    module._parse.cache_clear()
    text = "launch: {slurm: {nodes: 1-64, ntasks-per-node: 2}}\ndata: {global_batch: 512}"
    schedule = "custom" if key == "file" else "1f1b"
    with pytest.raises(ConfigErrors) as error:
        loads(text, "", [f"pipeline.{key}={named}", f"pipeline.schedule={schedule}"], job=True)
    assert f"pipeline.{key}" in {p.path for p in error.value.problems}
    assert module._parse.cache_info().misses == 1


@pytest.mark.parametrize("nodes", ["1-999999", ",".join(["1-1024"] * 900), "1,1025-2048,1"])
def test_a_job_has_a_bounded_choice_of_nodes(nodes):
    text = f"parallel: {{pipe: 2}}\nlaunch: {{slurm: {{nodes: '{nodes}'}}}}"
    with pytest.raises(ConfigErrors) as error:
        loads(text, job=True)
    assert error.value.problems[0].path == "launch.slurm.nodes"


@pytest.mark.parametrize("number", [1, 12, 97, 360, 2**24, 9699690])
def test_divisors_around_a_number(number):
    for near in (1, 2, 5, 96, 1000):
        near = min(near, number)
        some = [d for d in range(1, min(number, 64 * near) + 1) if number % d == 0]
        below = max(d for d in some if d <= near)
        above = min((d for d in some if d > near), default=below)
        assert divisors(number, near) == (f"{below}" if above == below else f"{below} or {above}")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("parallel: {data: 262144}\ndata: {global_batch: 1048576}"),
        pytest.param("model: {layers: 2048}", marks=pytest.mark.full),
        pytest.param(
            "pipeline: {microbatches: 32768}\ndata: {global_batch: 32768}", marks=pytest.mark.full
        ),
    ],
)
def test_what_the_bounds_allow_is_planned_in_seconds(text):
    began = time.process_time()
    config = loads(text)
    make_plan(config, local_procs(config))
    assert time.process_time() - began < 10


def test_what_is_too_long_with_its_aliases_written_out_is_refused_before_its_own_job_does():
    """The run folder holds the configuration without aliases, and its job reads that."""
    for times, fits in ((60, True), (70, False)):
        values = ", ".join(["&a " + "x" * 4000, *["*a"] * (times - 1)])
        text = OWN % f"[{values}]"
        if fits:
            written = loads(text).to_yaml()
            assert loads(written) == loads(text)
        else:
            (problem,) = refused(text)
            assert "262,144" in problem.text and problem.line is None


@pytest.mark.parametrize(("special", "why"), [("/dev/zero", "is a device"), (None, "is a pipe")])
def test_a_configuration_that_is_no_regular_file_is_not_waited_for(tmp_path: Path, special, why):
    named = tmp_path / "run.yaml"
    if special is None:
        os.mkfifo(named)
    else:
        named.symlink_to(special)
    with pytest.raises(ConfigErrors, match=f"run.yaml: cannot be read: {why}$"):
        load(named)
    text = f"data: {{name: text, path: {named}, val_path: {named}}}"
    found = absent_files(loads(text))
    assert [(p.path, p.text) for p in found] == [
        (key, f"{named} {why}; name a file or a folder") for key in ("data.path", "data.val_path")
    ]
