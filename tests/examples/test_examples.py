"""Each example as a user runs it: by hand, which starts its ranks, and under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOAT64_NOISE = 1e-11
"""Sums of a few thousand products, added in another order."""


def printed(name: str, folder: Path, num_procs: int | None = None) -> str:
    """What the example writes; `num_procs`: under torchrun, else by hand. It runs in `folder`."""
    launcher = []
    if num_procs is not None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_procs}"]
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(group) for group in found.groups()]


started = pytest.mark.parametrize(
    "num_procs",
    [
        None,
        pytest.param(2, marks=pytest.mark.full),
        pytest.param(3, marks=pytest.mark.full),
    ],
)


@started
def test_own_loop_ddp_learns_the_digits(num_procs: int | None, tmp_path: Path):
    text = printed("own_loop_ddp", tmp_path, num_procs)
    world_size, accuracy = numbers(r"(\d+) ranks: accuracy ([\d.]+) on 360 held-out", text)
    assert world_size == (num_procs or 4)
    assert accuracy > 0.93


@started
def test_zero_keeps_a_part_of_the_state(num_procs: int | None, tmp_path: Path):
    text = printed("zero", tmp_path, num_procs)
    pattern = r"(\d+) ranks: accuracy ([\d.]+), (\d+) of (\d+) numbers of state"
    world_size, accuracy, here, whole = numbers(pattern, text)
    assert world_size == (num_procs or 4)
    assert accuracy > 0.93
    assert here / whole < 1.02 / world_size


@started
def test_own_loop_pipeline_trains_as_one_piece_does(num_procs: int | None, tmp_path: Path):
    text = printed("own_loop_pipeline", tmp_path, num_procs)
    stages, loss, whole = numbers(r"(\d+) stages: loss ([\d.]+), in one piece ([\d.]+)", text)
    assert stages == (num_procs or 4)
    assert loss == pytest.approx(whole, abs=FLOAT64_NOISE)
    assert loss < 1.8  # it did learn: ten equally likely digits cost ln 10 = 2.303


@pytest.mark.parametrize("num_procs", [None, pytest.param(3, marks=pytest.mark.full)])
def test_two_tower_brings_images_and_names_together(num_procs: int | None, tmp_path: Path):
    text = printed("two_tower", tmp_path, num_procs)
    (accuracy,) = numbers(r"([\d.]+) of 360 held-out digits", text)
    assert accuracy > 0.9  # by chance 0.1


@pytest.mark.full
@pytest.mark.parametrize("num_procs", [None, 4])
def test_encoder_decoder_spells_the_digits(num_procs: int | None, tmp_path: Path):
    text = printed("encoder_decoder", tmp_path, num_procs)
    (accuracy,) = numbers(r"([\d.]+) of 360 held-out digits", text)
    assert accuracy > 0.85  # letters before are told, but the first one only the image tells


@pytest.mark.parametrize("num_procs", [None, pytest.param(2, marks=pytest.mark.full)])
def test_tensor_parallel_block_is_its_serial_twin(num_procs: int | None, tmp_path: Path):
    text = printed("tensor_parallel_block", tmp_path, num_procs)
    here, all_of_them = numbers(r"(\d+) of (\d+) weights on each", text)
    (difference,) = numbers(r"largest difference (\S+)", text)
    assert difference < FLOAT64_NOISE
    assert here / all_of_them < 1.05 / (num_procs or 4)  # norms and row biases stay whole


@pytest.mark.parametrize("num_procs", [None, pytest.param(4, marks=pytest.mark.full)])
def test_topology_gives_each_model_replica_one_tensor(num_procs: int | None, tmp_path: Path):
    text = printed("topology", tmp_path, num_procs)
    found = numbers(r"(\d+) ranks hold (\d+) different tensors in (\d+) model", text)
    world_size = num_procs or 8
    assert found == [world_size, world_size // 4, world_size // 4]


@pytest.mark.parametrize("num_procs", [None, pytest.param(2, marks=pytest.mark.full)])
def test_sharded_ema_tries_out_and_saves_averages(num_procs: int | None, tmp_path: Path):
    text = printed("sharded_ema", tmp_path, num_procs)
    last, averaged = numbers(r"accuracy ([\d.]+) with the last weights, ([\d.]+) with their", text)
    assert averaged > max(last, 0.93)
    mine, whole = numbers(r"rank 0 keeps (\d+) of (\d+) bytes", text)
    assert mine < 1.1 * whole / (num_procs or 4)
    assert (tmp_path / "averages.pt").stat().st_size > whole


@pytest.mark.parametrize("num_procs", [None, pytest.param(3, marks=pytest.mark.full)])
def test_fully_shard_offload_gives_memory_back_and_changes_nothing(
    num_procs: int | None, tmp_path: Path
):
    text = printed("fully_shard_offload", tmp_path, num_procs)
    size, whole, mine = numbers(r"1/(\d) of ([\d.]+) MiB: ([\d.]+) MiB on the", text)
    assert size == (num_procs or 2)
    assert mine == pytest.approx(whole / size, abs=0.02)
    assert numbers(r"offloaded: ([\d.]+) MiB on the \w+, ([\d.]+) MiB", text) == [0, mine]
    assert numbers(r"change ([\d.e-]+): ([\d.]+) MiB on the", text) == [0, mine]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path):
    assert len(path.read_text().splitlines()) <= 84
