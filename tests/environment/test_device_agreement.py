"""What ranks publish of their devices, and what is made of it."""

from dataclasses import replace

import pytest

from torchdistpackage.environment.device import RankDevice, disagreement


def node(number: int, ranks: int, device: str, num_visible: int, **more: object):
    backend = "nccl" if device == "cuda" else "gloo"
    first = RankDevice(
        number * ranks, f"n{number}", number, ranks, device, backend, "", num_visible, False, 0
    )
    return [replace(first, rank=number * ranks + i, **more) for i in range(ranks)]


def test_it_travels_as_text():
    (one,) = node(3, 1, "cuda", 8, problem="a b")
    assert RankDevice.from_json(one.to_json().encode()) == one


ALLOWED = {
    "GPUs for all": [*node(0, 8, "cuda", 8), *node(1, 8, "cuda", 8)],
    "one machine, too few": node(0, 2, "cpu", 1),
    "no GPUs at all": [*node(0, 2, "cpu", 0), *node(1, 2, "cpu", 0)],
    "gloo asked for": [
        *node(0, 2, "cpu", 1, asked="gloo"),
        *node(1, 2, "cpu", 1, asked="gloo"),
    ],
    "hidden": [
        *node(0, 2, "cpu", 0, hides_gpus=True, num_given=8),
        *node(1, 2, "cpu", 0, hides_gpus=True, num_given=8),
    ],
    "all nodes share": [*node(0, 4, "cuda", 2, sharing=2), *node(1, 4, "cuda", 2, sharing=2)],
    "gloo on GPUs": node(0, 2, "cuda", 2, backend="gloo", asked="gloo"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str):
    assert disagreement(ALLOWED[name]) == ""


REFUSED = {
    "another version on one host": (
        [
            *node(0, 2, "cuda", 2, versions="torch 2.13, Python 3.11.4"),
            *node(1, 2, "cuda", 2, versions="torch 2.12, Python 3.11.4"),
            *node(2, 2, "cuda", 2, versions="torch 2.13, Python 3.11.4"),
        ],
        [
            "different versions",
            "torch 2.12, Python 3.11.4 on n1 (ranks 2 to 3)",
            "torch 2.13, Python 3.11.4 on n0; n2 (ranks 0 to 1, 4 to 5)",
            "launch.same_versions",
        ],
    ),
    "one node short": (
        [*node(0, 8, "cuda", 8), *node(1, 8, "cpu", 7), *node(2, 8, "cuda", 8)],
        ["n1 shows 7 GPUs to 8 ranks (ranks 8 to 15)", "the other 16 ranks", "launch.share_gpus"],
    ),
    "all nodes short": (
        [*node(0, 2, "cpu", 1), *node(1, 2, "cpu", 1)],
        ["too few GPUs", "n0 shows 1 GPU to 2 ranks", "n1 shows 1 GPU to 2 ranks"],
    ),
    "given by Slurm": (
        node(0, 4, "cpu", 1, num_given=1),
        ["n0 shows 1 GPU of the 1 that Slurm gave to 4 ranks (ranks 0 to 3)"],
    ),
    "one node shares": (
        [*node(0, 4, "cuda", 4), *node(1, 4, "cuda", 2, sharing=2)],
        ["n0 shows 4 GPUs to 4 ranks", "n1 shows 2 GPUs to 4 ranks", "launch.share_gpus"],
    ),
    "nccl asked for, and GPUs are short": (
        [*node(0, 2, "cpu", 1, asked="nccl"), *node(1, 2, "cpu", 1, asked="nccl")],
        ["too few GPUs", "n0 shows 1 GPU to 2 ranks"],
    ),
    "problems": (
        [*node(0, 1, "cuda", 1), *node(1, 1, "cpu", 0, problem="names 2")],
        ["rank 1 on n1: names 2"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    ranks, expected = REFUSED[name]
    told = disagreement(ranks)
    assert all(part in told for part in expected), told
    assert "\n" not in told


def test_of_many_hosts_a_few_are_named():
    ranks = [one for n in range(400) for one in node(n, 8, "cpu" if n % 2 else "cuda", 8)]
    told = disagreement(ranks)
    assert len(told) < 1500 and "and 192 more hosts" in told


def test_a_rank_of_a_later_version_that_says_more_is_understood():
    (one,) = node(0, 1, "cpu", 0)
    assert RankDevice.from_json(one.to_json()[:-1] + ', "more": 1}') == one
