"""A manifest comes back as it was written, or not at all. No torch."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.checkpoint import manifest as manifests
from torchdistpackage.checkpoint.manifest import (
    FileFacts,
    Manifest,
    TensorChunk,
    TensorEntry,
    read_manifest,
)
from torchdistpackage.errors import CheckpointError

counts = st.integers(0, 2**40)
boxes = st.lists(counts, max_size=3).map(tuple)
pieces = st.builds(TensorChunk, st.text(), st.text(), boxes, boxes)
entries = st.builds(TensorEntry, boxes, st.text(), st.lists(pieces, max_size=3).map(tuple))
manifest_values = st.builds(
    Manifest,
    step=counts,
    tokens=counts,
    degrees=st.lists(st.tuples(st.text(), counts), max_size=3).map(tuple),
    tensors=st.dictionaries(st.text(), entries, max_size=3),
    files=st.dictionaries(
        st.text(), st.builds(FileFacts, counts, st.text(), st.none()), max_size=3
    ),
    facts=st.dictionaries(st.text(), counts | st.text() | st.floats(allow_nan=False)),
)
ONE = Manifest(
    step=400,
    tokens=1234,
    degrees=(("data", 2),),
    tensors={"w": TensorEntry((4, 2), "float32", (TensorChunk("a", "w[0]", (0, 0), (4, 2)),))},
    files={"a": FileFacts(96, "07")},
    facts={"seed": 1, "lr": 1e-3},
)


def test_parameters_of_another_model_are_named():
    assert ONE.differences({"w": (4, 2)}) == ""
    assert ONE.differences({"w": (4, 3)}) == "w has shape (4, 2), where the model has (4, 3)"
    others = {f"v{i}": (2,) for i in range(8)}
    assert ONE.differences(others).startswith("v0 is missing; v1 is missing")
    assert ONE.differences(others).endswith("v5 is missing; 3 more")


@given(manifest_values)
def test_a_manifest_reads_back_equal(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_no_changed_byte_goes_unseen():
    text = ONE.to_json()
    for at, old in enumerate(text):
        for new in "0", "9", " ", "x":
            if new != old:
                try:
                    assert Manifest.from_json(text[:at] + new + text[at + 1 :]) == ONE
                except CheckpointError:
                    continue


def test_no_shorter_manifest_is_read():
    text = ONE.to_json()
    for length in range(len(text)):
        with pytest.raises(CheckpointError):
            Manifest.from_json(text[:length])


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"crc32": 0, "manifest": []}', "\0"])
def test_other_json_is_refused(text):
    with pytest.raises(CheckpointError):
        Manifest.from_json(text)


def test_another_format_is_named():
    whole = json.loads(ONE.to_json())
    whole["manifest"]["format"] = 99
    with pytest.raises(CheckpointError, match="format 99; this version reads 1"):
        Manifest.from_json(json.dumps(whole))


def test_reading_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path} has no manifest.json")):
        read_manifest(tmp_path)
    (tmp_path / manifests.NAME).write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / manifests.NAME))):
        read_manifest(tmp_path)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 1), st.integers(1, 2))
def test_a_box_is_covered_once_by_whatever_pieces_overlap_it(row, rows, column, columns):
    pieces = (
        TensorChunk("a", "0", (0, 0), (1, 2)),
        TensorChunk("b", "0", (1, 0), (3, 1)),
        TensorChunk("c", "0", (1, 1), (3, 1)),
    )
    box = (slice(row, min(row + rows, 4)), slice(column, min(column + columns, 2)))
    filled = {}
    for piece, of_piece, of_box in TensorEntry((4, 2), "float32", pieces).covering(box):
        cells = (
            itertools.product(*(range(s.start, s.stop) for s in x)) for x in (of_piece, of_box)
        )
        for source, target in zip(*cells, strict=True):
            assert target not in filled
            filled[target] = tuple(o + i for o, i in zip(piece.offset, source, strict=True))
    wanted = itertools.product(*(range(s.start, s.stop) for s in box))
    assert sorted(filled.values()) == sorted(wanted)
    for target, cell in filled.items():
        assert cell == tuple(s.start + i for s, i in zip(box, target, strict=True))
