"""A shard in the wrong place is a difference, though its numbers are right."""

import torch

from torchdistpackage.equivalence.placed import assembled, copies_differ, worst_gap

FULL = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
TOP, BOTTOM = ((slice(0, 2), slice(0, 4)), (slice(2, 4), slice(0, 4)))


def test_shards_are_compared_at_their_place():
    right = [{"w": [(TOP, FULL[:2])]}, {"w": [(BOTTOM, FULL[2:])]}]
    assert worst_gap("w", FULL, right, 1e-9) is None
    swapped = [{"w": [(BOTTOM, FULL[:2])]}, {"w": [(TOP, FULL[2:])]}]
    gap, _ = worst_gap("w", FULL, swapped, 1e-9)
    assert gap == 8 / 15
    assert worst_gap("w", FULL, right[:1], 1e-9) == (None, 0)
    wrong_shape = [*right[:1], {"w": [(BOTTOM, FULL)]}]
    assert worst_gap("w", FULL, wrong_shape, 1e-9) == (None, 1)


def test_a_full_tensor_takes_the_element_that_is_further_off():
    ranks = [{"w": [(TOP, FULL[:2])]}, {"w": [(TOP, 2 * FULL[:2])]}]
    full = assembled({"w": FULL}, ranks)["w"]
    assert torch.equal(full[:2], 2 * FULL[:2]) and not full[2:].any()


def test_copies_of_a_box_are_compared_with_each_other():
    ranks = [
        {"w": [(TOP, FULL[:2])]},
        {"w": [(TOP, FULL[:2].clone())]},
        {"w": [(BOTTOM, FULL[2:])]},
    ]
    assert not copies_differ("w", ranks)
    assert copies_differ("w", [*ranks, {"w": [(TOP, FULL[:2] + 1)]}])
