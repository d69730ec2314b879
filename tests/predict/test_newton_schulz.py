"""Muon's split matrices are iterated on where that takes the least time by bytes and products.

No torch.
"""

from torchdistpackage.layout.layout import HeadSplit, Layout
from torchdistpackage.predict.newton_schulz import (
    SplitMatrix,
    iterated_together,
    matrices_of,
    split_dim,
)

LONG = ((SplitMatrix(1, 65536, 256),), True)
SQUARE = ((SplitMatrix(1, 4096, 4096),), True)
WIDE = ((SplitMatrix(1, 256, 65536),), True)


def test_sides_of_fused_parts_are_those_that_ranks_split():
    layout = Layout("qkv", (24, 10), (("tensor",), ()), parts=((16, 4, 4), ()))
    assert matrices_of(layout, 3) == tuple(SplitMatrix(3, n, 10) for n in (16, 4, 4))
    assert split_dim(layout) == -2
    turned = Layout("qkv", (10, 24), ((), ("tensor",)), parts=((), (16, 8)))
    assert matrices_of(turned, 1) == (SplitMatrix(1, 16, 10), SplitMatrix(1, 8, 10))
    across = Layout("out", (10, 24), (("tensor",), ()), parts=((), (16, 8)))
    assert matrices_of(across, 1) == (SplitMatrix(1, 10, 16), SplitMatrix(1, 10, 8))


def test_what_two_ranks_hold_both_is_brought_together():
    """A sum over ranks would count the shared head twice."""
    heads = HeadSplit(1, 1, shared=True)
    layout = Layout("k", (8, 16), (("tensor",), ()), heads=heads)
    assert split_dim(layout) is None
    assert split_dim(Layout("w", (8, 8), (("tensor",), ("data",)))) is None
    assert iterated_together((((SplitMatrix(1, 8, 16),), False),), 2, 2, "together") == frozenset()


def test_the_choice_follows_bytes_and_products():
    many = (SQUARE,) * 64
    assert iterated_together(many, 8, 2) == frozenset(), "owners share them evenly"
    assert iterated_together((SQUARE,), 8, 2) == {0}, "seven ranks would wait for one"
    assert iterated_together((LONG, *many), 8, 2) == {0}, "few bytes, and as few products"
    assert 0 not in iterated_together((WIDE, *many), 8, 2), "squares of 65,536 for a few products"
    assert iterated_together((WIDE, SQUARE), 8, 2, "together") == {0, 1}
    assert iterated_together((LONG, SQUARE), 8, 2, "gather") == frozenset()
    assert iterated_together((LONG,), 1, 2) == frozenset()
