"""Each example as a user runs it: by hand, which starts its ranks, and under torchrun; in the small
set mostly as ranks that are forked from a process which has imported all that they need."""

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.comm.runtime import find_free_port
from torchdistpackage.launch.fork_server_client import ForkServer

RANKS_IMPORT = ("sklearn.datasets",)
EXAMPLES = Path(__file__).parents[2] / "examples"
FLOAT64_NOISE = 1e-11
"""Sums of a few thousand products, added in another order."""
LIMIT_S = 120


class Start:
    """Runs an example in a folder of its own, one way or another."""

    def __init__(self, how: str, size: int, folder: Path, server: ForkServer | None):
        self.how, self.size, self.folder, self.server = how, size, folder, server

    def printed(self, name: str, *args: str) -> str:
        """What the example writes, called with `args`."""
        if self.server is not None:
            return self._forked(self.server, name, args)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.size}"]
        command = [sys.executable, *(launcher if self.how == "torchrun" else [])]
        done = subprocess.run(
            [*command, str(EXAMPLES / f"{name}.py"), *args], cwd=self.folder,
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _forked(self, server: ForkServer, name: str, args: tuple[str, ...]) -> str:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
        size, children, outputs = str(self.size), [], []
        for rank in map(str, range(self.size)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            outputs.append(self.folder / f"output{rank}")
            with outputs[-1].open("wb") as output:
                env = {**os.environ, **meeting, **place}
                call = (name, str(self.folder), args)
                children.append(server.spawn(run, call, env=env, stdout=output, stderr=output))
        end_s = time.monotonic() + LIMIT_S
        while any(child.exit is None for child in children) and time.monotonic() < end_s:
            time.sleep(0.02)
            server.reap()
        told = "".join(output.read_text() for output in outputs)
        assert [child.exit and child.exit.exit_code for child in children] == [0] * self.size, told
        return told


def run(name: str, folder: str, args: tuple[str, ...]) -> None:
    os.chdir(folder)
    sys.argv[:] = [name, *args]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    how, size = request.param
    server = request.getfixturevalue("pool").server if how == "forked" else None
    return Start(how, size, tmp_path, server)


def started(forked: int, by_hand: int, *torchrun: int) -> pytest.MarkDecorator:
    """Each way with so many ranks; `by_hand` is the example's own choice."""
    full = [("by hand", by_hand), *(("torchrun", size) for size in torchrun)]
    cases = [("forked", forked), *(pytest.param(case, marks=pytest.mark.full) for case in full)]
    return pytest.mark.parametrize("start", cases, indirect=True, ids=str)


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(group) for group in found.groups()]


@started(2, 4, 2, 3)
def test_own_loop_ddp_learns_the_digits(start: Start):
    text = start.printed("own_loop_ddp")
    world_size, accuracy = numbers(r"(\d+) ranks: accuracy ([\d.]+) on 360 held-out", text)
    assert world_size == start.size
    assert accuracy > 0.93


@pytest.mark.full
@started(2, 4, 2, 3)
def test_zero_keeps_a_part_of_the_state(start: Start):
    text = start.printed("zero")
    pattern = r"(\d+) ranks: accuracy ([\d.]+), (\d+) of (\d+) numbers of state"
    world_size, accuracy, here, whole = numbers(pattern, text)
    assert world_size == start.size
    assert accuracy > 0.93
    assert here / whole < 1.02 / world_size


@pytest.mark.full
@started(2, 4, 2, 3)
def test_moe_own_loop_learns_with_busy_experts(start: Start):
    text = start.printed("moe_own_loop")
    loss, imbalance = numbers(r"step 60  loss ([\d.]+)  experts ([\d.]+)x", text)
    assert loss < 3.5  # equally likely bytes cost ln 256 = 5.545
    assert imbalance < 3
    world_size, here = numbers(r"(\d+) ranks, (\d+) of 8 experts on each", text)
    assert (world_size, here) == (start.size, 8 if start.size % 2 else 4)


@started(3, 4, 2, 3)
def test_own_loop_pipeline_trains_as_one_piece_does(start: Start):
    text = start.printed("own_loop_pipeline")
    stages, loss, whole = numbers(r"(\d+) stages: loss ([\d.]+), in one piece ([\d.]+)", text)
    assert stages == start.size
    assert loss == pytest.approx(whole, abs=FLOAT64_NOISE)
    assert loss < 1.8  # it did learn: ten equally likely digits cost ln 10 = 2.303


@pytest.mark.full
@started(4, 4, 4)
def test_a_pipeline_with_zero_has_the_gradients_of_one_process(start: Start):
    text = start.printed("own_loop_zero_pipeline")
    data, gradient, weight = numbers(r"data (\d+) x pipe 2: gradients (\S+), weights (\S+)", text)
    assert data == start.size // 2
    assert gradient < FLOAT64_NOISE and weight < FLOAT64_NOISE


@pytest.mark.full
@started(4, 4, 4)
def test_encoder_decoder_spells_the_digits(start: Start):
    text = start.printed("encoder_decoder")
    (accuracy,) = numbers(r"([\d.]+) of 360 held-out digits", text)
    assert accuracy > 0.85  # letters before are told, but the first one only the image tells


@pytest.mark.full
@started(2, 2, 2)
def test_long_context_learns_what_one_process_does(start: Start):
    tokens = 64 if start.how == "forked" else 512
    text = start.printed("long_context", "--tokens", str(tokens))
    number, apart = numbers(r"one process, (\d+) steps: loss [\d.]+, at most (\S+) apart", text)
    assert number == 3 and apart < 1e-5  # float32
    loss, alone = numbers(r"unseen samples: loss ([\d.]+), one process ([\d.]+)", text)
    assert loss == pytest.approx(alone, abs=1e-5)
    assert loss < 0.2  # guessing: 2.1, of 8 letters
    copied, asked, back = numbers(r"copied (\d+) of (\d+) from (\d+) tokens", text)
    assert copied > 0.95 * asked and (asked, back) == (32, tokens - 16)


@started(4, 8, 4)
def test_topology_gives_each_model_replica_one_tensor(start: Start):
    text = start.printed("topology")
    found = numbers(r"(\d+) ranks hold (\d+) different tensors in (\d+) model", text)
    assert found == [start.size, start.size // 4, start.size // 4]


@pytest.mark.full
@started(2, 4, 2)
def test_sharded_ema_tries_out_and_saves_averages(start: Start):
    text = start.printed("sharded_ema")
    last, averaged = numbers(r"accuracy ([\d.]+) with the last weights, ([\d.]+) with their", text)
    assert averaged > max(last, 0.93)
    mine, whole = numbers(r"rank 0 keeps (\d+) of (\d+) bytes", text)
    assert mine < 1.1 * whole / start.size
    assert (start.folder / "averages.pt").stat().st_size > whole


@started(2, 2, 3)
def test_fully_shard_offload_gives_memory_back_and_changes_nothing(start: Start):
    text = start.printed("fully_shard_offload")
    size, whole, mine = numbers(r"1/(\d) of ([\d.]+) MiB: ([\d.]+) MiB on the", text)
    assert size == start.size
    assert mine == pytest.approx(whole / size, abs=0.02)
    assert numbers(r"offloaded: ([\d.]+) MiB on the \w+, ([\d.]+) MiB", text) == [0, mine]
    assert numbers(r"change ([\d.e-]+): ([\d.]+) MiB on the", text) == [0, mine]


@pytest.mark.full
def test_small_llama_writes_what_transformers_continues_alike(tmp_path: Path):
    short = ("train.steps=20", "optim.warmup_steps=5", "train.eval_every=0")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "small_llama.py"), str(tmp_path / "llama"), *short],
        capture_output=True, text=True, timeout=2 * LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert tells(done.stdout, "pipe 2", "tensor 2")


@pytest.mark.full
def test_finetune_chat_learns_and_its_merged_folder_answers_alike(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune_chat.py"), str(tmp_path / "chat")],
        capture_output=True, text=True, timeout=3 * LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The boat is green." in done.stdout and "answers the same" in done.stdout
    assert "of validation data" in done.stdout and "of polite" in done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path):
    assert len(path.read_text().splitlines()) <= 105
