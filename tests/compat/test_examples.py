"""The examples that use the wing, as a user runs them."""

import re
from pathlib import Path

import pytest

from tests.examples import test_examples
from tests.examples.test_examples import FLOAT64_NOISE, Start, numbers, started

start = test_examples.start


@pytest.mark.full
@started(3, 3, 3)
def test_two_tower_brings_images_and_names_together(start: Start):
    text = start.printed("two_tower")
    (accuracy,) = numbers(r"([\d.]+) of 360 held-out digits", text)
    assert accuracy > 0.9  # by chance 0.1


SPLIT = "--enable-model-parallel"
FLOAT32_NOISE = 1e-4
"""Of a loss after some dozens of steps whose sums are added in another order."""


def arcface_bytes(classes: int, batch: int, size: int) -> int:
    """What a rank holds at most, counted from the example's shapes in float64, 8 bytes a number.

    A large head peaks in the backward of its normalised weight: weight, momentum, gradient, the
    normalised one, and three terms of its gradient, beside the cosines. A large batch peaks in
    that of cross entropy: five of the size of my logits, beside weight, momentum and the
    normalised one. The backbone is whole: weight, momentum, gradient and the bucket in which it
    is sent. So are the input and what each layer gives of my samples, and the features of all
    samples, gathered, normalised, and their gradient.
    """
    bits, hidden, width = 20, 256, 128
    mine = -(-classes // size)
    head, logits, norms = mine * width, mine * batch, 4 * mine
    backbone = bits * hidden + hidden + 1 + hidden * width + width
    samples = batch // size * (bits + 2 * hidden + width) + 3 * batch * width
    return 8 * (max(7 * head + logits, 3 * head + 5 * logits) + norms + 4 * backbone + samples)


@started(2, 2, 4)
def test_torchshard_arcface_learns_as_one_process_and_holds_its_share(start: Start):
    classes, batch, steps = (500, 64, 30) if start.size < 4 else (1000, 256, 60)
    # the margin bends where a cosine changes its sign: float32's noise is not small after it
    text = start.printed("torchshard_arcface", *map(str, (classes, batch, steps)), "float64")
    pattern = r"{} ranks: loss ([\d.]+), accuracy ([\d.]+), ([\d.]+) MiB"
    whole = numbers(pattern.format(1), text)
    loss, accuracy, mib = numbers(pattern.format(start.size), text)
    assert loss == pytest.approx(whole[0], abs=1e-5)  # as many digits are printed
    assert accuracy == whole[1]
    assert accuracy > 0.2  # by chance 1 in 500
    for size, found in ((1, whole[2]), (start.size, mib)):
        assert 0.7 < found * 2**20 / arcface_bytes(classes, batch, size) < 1


@pytest.mark.full
@started(2, 2, 4)
def test_torchshard_classifier_learns_alike_under_its_flags(start: Start):
    def found(*flags: str) -> list[float]:
        text = start.printed("torchshard_classifier", *flags)
        steps = ["10", "20"] * 3 if "--print-freq" in flags else []
        assert re.findall(r"step (\d+): loss", text) == steps
        return numbers(r"accuracy ([\d.]+), loss ([\d.]+)", text)

    plain = found("--print-freq", "10")
    assert plain[0] > 0.9
    if start.how != "forked":
        for name, value in {"seed": "1", "momentum": "0.8", "weight-decay": "0.1"}.items():
            assert abs(found(f"--{name}", value)[1] - plain[1]) > 10 * FLOAT32_NOISE, name
        assert found("--print-freq", "10") == plain  # and checkpoint.pt is that of these flags
    cases = [("-1", "--enable-zero-optim")] if start.how == "forked" else [("1",), ("0",)]
    for dim, *flags in cases:
        split = found(SPLIT, "--model-parallel-dim", dim, *flags)
        assert split == pytest.approx(plain, abs=FLOAT32_NOISE)
    read = found("--evaluate", "--resume", "checkpoint.pt")  # a file like any other
    assert read == pytest.approx(plain, abs=FLOAT32_NOISE)


@pytest.mark.full
@started(2, 2, 4)
def test_torchshard_mini_gpt_learns_alike_under_its_flags(start: Start):
    def found(*flags: str) -> float:
        return numbers(r"([\d.]+) nats", start.printed("torchshard_mini_gpt", *flags))[0]

    plain = found("--enable-zero-optim")
    assert plain < 2.8  # ln 256 = 5.5; 3.2 by how frequent each byte is
    assert found(SPLIT) == pytest.approx(plain, abs=FLOAT32_NOISE)
    if start.how != "forked":
        assert found(SPLIT, "--enable-one-data-group") == pytest.approx(plain, abs=FLOAT32_NOISE)
        assert found(SPLIT, "--enable-amp-mode") == pytest.approx(plain, abs=0.02)


@started(2, 4, 2)
def test_tensor_parallel_block_is_its_serial_twin(start: Start):
    text = start.printed("tensor_parallel_block")
    here, all_of_them = numbers(r"(\d+) of (\d+) weights on each", text)
    (difference,) = numbers(r"largest difference (\S+)", text)
    assert difference < FLOAT64_NOISE
    assert here / all_of_them < 1.05 / start.size  # norms and row biases stay whole


@pytest.mark.full
def test_an_example_starts_its_own_ranks(tmp_path: Path):
    """What it prints was looked at above."""
    text = Start("by hand", 4, tmp_path, None).printed("tensor_parallel_block")
    assert "4 ranks: 12736 of 49792 weights" in text
