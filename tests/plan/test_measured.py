"""`tdp plan --time --profile`: the step on the device that a cluster's profile has measured."""

import math
from pathlib import Path

import pytest

from tests.harness.bench.reports import both_links, report
from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.profile import MeasuredDevice, Profile, dumps
from torchdistpackage.plan.measured import (
    measured_device,
    measured_fabric,
    measured_step_seconds,
    other_machine,
)
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.plan.step_time import run_time
from torchdistpackage.predict.kernels import Matmul, matmul_seconds
from torchdistpackage.predict.layer import COLLECTIVE_CALLS

CONFIGS = Path(__file__).parents[2] / "configs"
TINY, SLURM = str(CONFIGS / "gpt_tiny.yaml"), str(CONFIGS / "gpt_slurm.yaml")
SPEED = MeasuredDevice(
    name="cpu",
    num_ranks=4,
    matmuls={"float32": ((1e5, 1e-5), (1e7, 1e-3), (1e9, 2e-2))},
    bytes_per_s=1e10,
    call_s=1e-5,
    memory_bytes=16e9,
)
LINKS = report(*both_links("data", (0, 1), "all_reduce", "all_gather", "p2p")).profile()


def profile_of(**changed: object) -> Profile:
    return LINKS.model_copy(update={"device": SPEED.model_copy(update=changed)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.json"
    file.write_text(dumps(profile_of()))
    return file


def seconds(profile: Profile, *overrides: str) -> dict[str, float]:
    plan = make_plan(load(TINY, list(overrides)), 4, TINY)
    device = measured_device(profile, plan.config, Path("cluster.json"), 4)
    return dict(run_time(plan, device, None, measured_fabric(profile, device, None)).step.terms)


def test_the_table_says_whose_numbers_it_has(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", TINY, "--time", "--profile", str(path)]) == 0
    text = capsys.readouterr().out
    assert "predicted step on cpu, as me@n0 measured it on 2026-01-02 (cpu)" in text
    assert "was measured on cpu of n0" in " ".join(text.split())
    assert "exposed data" in text and "cluster.json; no published step" in " ".join(text.split())


def test_a_measured_matmul_lies_between_the_measured_ones() -> None:
    device = measured_device(profile_of(), load(TINY, []), Path("cluster.json"), 4)
    for flops, wanted in ((1e4, 1e-5), (1e6, 1e-4), (1e9, 2e-2), (1e10, 0.2)):
        matmul = Matmul(flops / 2, 1, 1)
        assert matmul_seconds(device, matmul, "float32") == pytest.approx(wanted)


def test_an_activation_and_an_attention_that_a_host_measured_stand_for_themselves() -> None:
    def compute(activation_s: tuple[float, float], attention_s: tuple[float, float]) -> float:
        given = profile_of(activation_s=activation_s, attention_s=attention_s)
        return seconds(given, "parallel.data=4", "parallel.pipe=1")["compute"]

    both = (1e-9, 2e-9), (1e-11, 2e-11)
    run = load(TINY, [])
    # a rank has 8 samples of 128 tokens in a step; an MLP is four times as wide as the model
    tokens, layers, dim = 8 * run.data.seq_len, run.model.layers, run.model.dim
    slower = compute((3e-9, 2e-9), both[1]) - compute(*both)
    assert slower == pytest.approx(2e-9 * tokens * layers * 4 * dim)
    flops = 4 * tokens * layers * run.data.seq_len / 2 * dim
    slower = compute(both[0], (1e-11, 3e-11)) - compute(*both)
    assert slower == pytest.approx(1e-11 * 2.5 * flops)


@pytest.mark.parametrize(
    ("axis", "more", "calls"),
    [
        ("tensor", "sequence_parallel=false", 4),
        ("tensor", "sequence_parallel=true", 9),
        ("context", "cp_comm_type=p2p", 3),
        ("context", "cp_comm_type=a2a", 6),
    ],
)
def test_a_host_also_pays_for_the_calls_around_a_collective(axis: str, more: str, calls: int):
    keys = "parallel.pipe=1", "parallel.data=2", f"parallel.{axis}=2", f"parallel.{more}"
    run = load(TINY, [])
    times = run.model.layers * run.pipeline.microbatches
    wanted = times * calls * COLLECTIVE_CALLS * SPEED.call_s
    host, plain = (
        seconds(profile_of(), *x)["host and framework"]
        for x in (keys, ("parallel.pipe=1", "parallel.data=4"))
    )
    assert host - plain == pytest.approx(wanted)


def test_a_type_that_was_not_measured_has_the_times_of_another() -> None:
    both = {"float32": ((1e9, 2e-2),), "bfloat16": ((1e9, 1e-3),)}
    for matmuls, dtype, wanted in (
        (both, "float8", 1e-3),
        (both, "bfloat16", 1e-3),
        (both, "tfloat32", 2e-2),
        ({"float32": both["float32"]}, "float8", 2e-2),
        ({"bfloat16": both["bfloat16"]}, "float32", 1e-3),
    ):
        device = measured_device(profile_of(matmuls=matmuls), load(TINY, []), Path("x"), 4)
        assert matmul_seconds(device, Matmul(5e8, 1, 1), dtype) == pytest.approx(wanted)


def test_a_substitute_for_a_type_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = ["precision.dtype=bf16", "precision.fp8=linear"]
    assert main(["plan", TINY, *narrow, "--time", "--profile", str(path)]) == 0
    text = capsys.readouterr().out
    assert tells(text, "float8", "float32")
    assert tells(text, "bfloat16", "float32")


def test_a_slower_device_and_slower_links_make_a_step_slower() -> None:
    before = seconds(profile_of())
    slow = {"float32": tuple((n, 3 * s) for n, s in SPEED.matmuls["float32"])}
    assert seconds(profile_of(matmuls=slow))["compute"] > 1.5 * before["compute"]
    assert seconds(profile_of(bytes_per_s=1e9))["optimizer"] == pytest.approx(
        10 * before["optimizer"]
    )
    calls = seconds(profile_of(call_s=1e-4))["host and framework"]
    assert calls == pytest.approx(10 * before["host and framework"])
    lines = tuple(
        x.model_copy(update={"fit": x.fit.model_copy(update={"bytes_per_s": 1e6})})
        for x in LINKS.lines
    )
    links = profile_of().model_copy(update={"lines": lines})
    assert seconds(links)["exposed data"] > 10 * before["exposed data"]


def test_a_reduce_scatter_has_its_own_time() -> None:
    slow = report(*both_links("data", (0, 1), "reduce_scatter")).profile().lines
    slow = tuple(
        x.model_copy(update={"fit": x.fit.model_copy(update={"bytes_per_s": 1e6})}) for x in slow
    )
    profile = profile_of().model_copy(update={"lines": (*LINKS.lines, *slow)})
    fabric = measured_fabric(profile, measured_device(profile, load(TINY, []), Path("x"), 4), None)
    assert fabric.scatter_seconds(1e6, 2) > 0.5 > 100 * fabric.gather_seconds(1e6, 2)
    assert fabric.scatter_seconds(1e6, 1) == 0
    profile = profile_of()
    plain = measured_fabric(profile, measured_device(profile, load(TINY, []), Path("x"), 4), None)
    assert plain.scatter_seconds(1e6, 2) == plain.gather_seconds(1e6, 2) > 0


def test_a_profile_of_links_alone_is_read_and_refused_for_a_time(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    text = dumps(LINKS).replace(',\n "device": null', "")
    assert "device" not in text
    file.write_text(text)
    assert main(["plan", TINY, "--profile", str(file)]) == 0
    with pytest.raises(
        ConfigError, match="has links and no device; measure it again with tdp comm"
    ):
        measured_device(LINKS, load(TINY, []), file, 4)


def test_a_profile_without_the_links_of_a_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = report(*both_links("data", (0, 1), "broadcast")).profile().lines
    near = tuple(x for x in LINKS.lines if x.link == "node")
    config, path = load(TINY, []), Path("cluster.json")
    with pytest.raises(ConfigError, match=r"has no times of all_gather, .* tdp comm bench"):
        measured_device(profile_of().model_copy(update={"lines": others}), config, path, 4)
    one_node = profile_of().model_copy(update={"lines": near})
    assert measured_device(one_node, config, path, 4).node_size == 4
    with pytest.raises(
        ConfigError, match=r"no times between nodes, but 8 ranks .* nodes of 4; mea"
    ):
        measured_device(one_node, config, path, 8)
    file = tmp_path / "cluster.json"
    file.write_text(dumps(profile_of().model_copy(update={"lines": others})))
    options = ["--search", "--world", "4", "--profile", str(file)]
    assert main(["plan", TINY, *options]) == 2
    assert "has no times of all_gather" in capsys.readouterr().err
    assert measured_device(one_node, config, path, 8, 8).network_bytes_per_s > 0
    alone = profile_of().model_copy(update={"lines": ()})
    assert measured_device(alone, config, path, 1).node_bytes_per_s == math.inf


def test_a_network_without_messages_has_the_speed_of_its_collectives() -> None:
    lines = report(*both_links("data", (0, 1), "all_reduce")).profile().lines
    device = measured_device(
        profile_of().model_copy(update={"lines": lines}), load(TINY, []), Path("x"), 8
    )
    assert device.network_bytes_per_s == pytest.approx(device.node_bytes_per_s / 10)


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("AMD Instinct MI300X", False),
        ("NVIDIA GeForce RTX 4090", False),
    ],
)
def test_a_profile_is_taken_for_the_gpu_that_the_job_asks_for(name: str, is_taken: bool) -> None:
    config = load(SLURM, ["launch.slurm.gpus-per-node=h100:8"])
    if is_taken:
        assert measured_device(profile_of(name=name), config, Path("x"), 16).name == name
        return
    with pytest.raises(ConfigError, match=f"measured on {name} of n0, but .* asks for h100-sxm"):
        measured_device(profile_of(name=name), config, Path("x"), 16)


def test_a_profile_of_another_machine_is_named_with_what_to_do(tmp_path: Path) -> None:
    profile, local = profile_of(name="NVIDIA A100-SXM4-80GB"), load(TINY, [])
    text = other_machine(profile, local, Path("far.json"), "login1")
    assert text is not None
    assert tells(text, "far.json", "A100-SXM4-80GB of n0", "this is login1", "gpus-per-node")
    assert other_machine(profile, local, Path("x"), "n0") is None
    job = load(SLURM, ["launch.slurm.gpus-per-node=a100:8"])
    assert other_machine(profile, job, Path("x"), "login1") is None
    file = tmp_path / "far.json"
    file.write_text(dumps(profile))
    plan = make_plan(local, 4, TINY)
    with pytest.raises(ConfigError, match="A100-SXM4-80GB of n0, but this run is on cpu; measure"):
        measured_step_seconds(plan, file, None, "cpu")
    file.write_text(dumps(profile_of()))
    assert measured_step_seconds(plan, file, None, "cpu") == pytest.approx(
        sum(seconds(profile_of()).values())
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"bytes_per_s": 10000000000.0', '"bytes_per_s": 0.0', "device.bytes_per_s: Input should"),
        ('"float32": [', '"float32": [[1.0, -1.0], ', "device.matmuls: Value error, every type"),
        (
            '"float32": [',
            '"float64": [',
            "device.matmuls: Value error, needs matmuls of float32 or",
        ),
        ('"bus_bytes_per_s": ', '"bus_bytes_per_s": -', "greater than 0"),
    ],
)
def test_numbers_that_no_device_has_are_named(
    old: str, new: str, said: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert main(["plan", TINY, "--time", "--profile", str(path)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert said in error and "measure one with tdp comm bench" in error


def test_the_profile_of_another_machine_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [SLURM, "launch.slurm.gpus-per-node=h100:8"]
    assert main(["plan", *asked, "--time", "--profile", str(path)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert tells(error, "n0", "launch.slurm", "h100")
    assert main(["plan", *asked, "--time", "--device", "h100", "--profile", str(path)]) == 0
    assert "predicted step on H100 SXM" in capsys.readouterr().out
