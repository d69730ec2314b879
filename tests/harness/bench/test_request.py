"""Sizes, operations and element types as people write them, and what is said to those that err.

No torch.
"""

import re

import pytest

from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.bench.request import (
    ELEMENT_BYTES,
    parse_names,
    parse_sizes,
    whole_elements,
)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KiB:16KiB", [2**10, 2**11, 2**12, 2**13, 2**14]),
        ("1KiB:16MiB:x4", [2**10 * 4**i for i in range(8)]),
        ("1KiB:3KiB", [2**10, 2**11]),
        ("4 MiB, 12,1kb", [12, 1000, 2**22]),
        ("1KiB:2KiB,2KiB:4KiB", [2**10, 2**11, 2**12]),
        ("1.5k", [1536]),
        ("7", [7]),
        ("7b:7B", [7]),
    ],
)
def test_sizes_are_bytes_in_ascending_order(text, sizes):
    assert list(parse_sizes(text)) == sizes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no size is named"),
        (" , ", "no size is named"),
        ("0", "size '0' is 0 bytes"),
        ("0KiB:4KiB", "size '0KiB' is 0 bytes"),
        ("0.5", "is 0.5 bytes"),
        ("-4", "'-4' is not a size"),
        ("4XB", "'4XB' is not a size; write a number and B, KiB"),
        ("four", "is not a size"),
        ("4KiB:1KiB", "goes up, e.g. 1KiB:16MiB:x4"),
        ("1KiB:4KiB:x1", "'x1' is not a step"),
        ("1KiB:4KiB:fast", "'fast' is not a step"),
        ("1:2:3:4", "a range is FROM:TO"),
    ],
)
def test_a_text_that_is_no_size_is_refused_with_what_would_be(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_sizes(text)


def test_names_are_kept_in_order_and_once():
    found = parse_names("broadcast, p2p,broadcast", "operation", COLLECTIVES)
    assert found == ("broadcast", "p2p")


@pytest.mark.parametrize(
    ("what", "names", "said"),
    [
        ("operation", COLLECTIVES, r"'gahter' \(did you mean all_gather\?\); .* p2p, p2p_both"),
        ("dtype", ELEMENT_BYTES, "there is no dtype 'gahter'; .*float32, float64"),
    ],
)
def test_an_unknown_name_is_answered_with_all_there_are(what, names, said):
    with pytest.raises(ConfigError, match=said):
        parse_names("gahter", what, names)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bf16", 2), ("uint8", 1)])
def test_elements_are_the_fewest_that_hold_the_bytes_and_divide(num_parts, dtype, width):
    for size_bytes in range(1, 100):
        number = whole_elements(size_bytes, dtype, num_parts)
        assert number % num_parts == 0 and number * width >= size_bytes
        assert (number - num_parts) * width < size_bytes
