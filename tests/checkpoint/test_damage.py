"""A checkpoint that cannot be true, however it came to be so, is passed over for an older one."""

import json
import logging
import os
import random
import shutil
import signal
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchdistpackage.checkpoint.commit import commit, latest, make_temporary, measure, settle
from torchdistpackage.checkpoint.load import latest_together
from torchdistpackage.checkpoint.manifest import (
    NAME,
    Manifest,
    TensorChunk,
    TensorEntry,
    read_manifest,
)
from torchdistpackage.errors import CheckpointError

SHARD = "rank00000.safetensors"
LIMIT_S = 120


@pytest.fixture(autouse=True)
def never_hangs() -> Iterator[None]:
    """What waits for a pipe or reads a device for ever ends the test instead."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"over {LIMIT_S} s"))
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def write(folder: Path, step: int) -> Path:
    """A checkpoint of one tensor in two pieces."""
    temporary = make_temporary(folder, step)
    tensors = {"w[0]": torch.arange(4.0).view(2, 2), "w[1]": torch.arange(4.0).view(2, 2)}
    save_file(tensors, temporary / SHARD, metadata={"integers": "{}"})
    pieces = tuple(TensorChunk(SHARD, f"w[{i}]", (2 * i, 0), (2, 2)) for i in (0, 1))
    settle(temporary / SHARD)
    files = {SHARD: measure(temporary / SHARD)}
    entry = TensorEntry((4, 2), "float32", pieces)
    return commit(temporary, Manifest(step, 7, (), {"w": entry}, files, {"seed": 1}))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with a checkpoint of step 1, and one of step 2 to be damaged."""
    for step in (1, 2):
        write(tmp_path, step)
    assert latest(tmp_path, checksums=True) == tmp_path / "step_000002"
    return tmp_path


def passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The older one is found, and the newer is named with what is wrong."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert latest(folder, checksums=True) == folder / "step_000001"
    (record,) = caplog.records
    text = record.getMessage()
    assert "step_000002 is damaged and skipped: " in text
    assert len(text) < 1000
    return text


def forge(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the manifest and put its checksum right."""
    body = json.loads((path / NAME).read_text())["manifest"]
    edit(body)
    crc32 = zlib.crc32(json.dumps(body).encode())
    (path / NAME).write_text(json.dumps({"crc32": crc32, "manifest": body}))


NAMES = ["../x", "/etc/passwd", "/dev/zero", "a/b", ".", "..", "", "a\0", "x" * 300, "\ud800"]


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop(SHARD)
        for piece in body["tensors"]["w"]["pieces"]:
            piece["file"] = name

    return edit


def put(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def edit(body: dict[str, Any]) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return edit


W, P = ("tensors", "w"), ("tensors", "w", "pieces", 1)
LIES = [
    *map(renamed, NAMES),
    *(put(step, "step") for step in (3, -2, "2", True, 2.0, None, 10**30, [2])),
    *(put(x, "tokens") for x in (-1, "7", float("inf"))),
    *(put(x, *W, "dtype") for x in ("save", "float16", 3, "")),
    *(put(x, *W, "shape") for x in ([4], [4, 2, 1], [-4, -2], [2**62, 2], [4, 3], "42", None)),
    *(put(x, *P, "offset") for x in ([0, 0], [3, 0], [2], [-2, 0], [2**62, 0], [2.0, 0])),
    *(put(x, *P, "lengths") for x in ([1, 2], [2, 3], [2], [-2, 2], [4, 2])),
    *(put(x, *P, "key") for x in ("w[0]x", 5, None)),
    put("another", *P, "file"),
    put([], *W, "pieces"),
    *(put(x, "files", SHARD, "size_bytes") for x in (0, 2**62, -1, "96", None)),
    *(put(x, "files", SHARD, "crc32") for x in (0, "x")),
    *(put(x, "files", SHARD, "xxh3") for x in (0, "x", None)),
    *(put(x, "facts") for x in ({"seed": [1]}, {"seed": {"a": {}}}, [1], None)),
    *(put(x, "degrees") for x in ([["data"]], [["data", "2"]], [[2, 2]], 5)),
    *(put(x, key) for key in ("files", "tensors", "format") for x in (None, [], "x", 5)),
    *(lambda body, key=key: body.pop(key) for key in ("step", "files", "tensors", "facts")),
]


def test_a_manifest_that_cannot_be_true_is_passed_over(two: Path, caplog):
    path = two / "step_000002"
    whole = (path / NAME).read_bytes()
    for lie in LIES:
        forge(path, lie)
        passed_over(two, caplog)
        (path / NAME).write_bytes(whole)
    assert latest(two, checksums=True) == path


def deep(text: str) -> str:
    return text * 200_000


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(to: str | Path) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.unlink()
        path.symlink_to(to)

    return make


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def outside(path: Path) -> None:
    """A true copy elsewhere, and a link to it."""
    other = path.parents[1] / "elsewhere"
    shutil.move(path, other)
    path.symlink_to(other)


KINDS = [fifo, link("/dev/zero"), link("/nowhere"), folder, outside, Path.unlink]


@pytest.mark.parametrize("name", [NAME, SHARD])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_opened(two: Path, caplog, name: str, kind: Callable[[Path], None]):
    kind(two / "step_000002" / name)
    passed_over(two, caplog)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "\0", '{"manifest": 1e999, "crc32": 1}', '{"crc32": NaN}'),
        *(deep("["), deep('{"manifest":'), '{"manifest": ' + deep("[") + deep("]") + "}"),
        *('{"crc32": ' + "9" * 5000 + "}", b"\xff\xfe"),
    ],
    ids=range(12),
)
def test_what_is_no_manifest_is_passed_over(two: Path, caplog, text: str | bytes):
    content = text if isinstance(text, bytes) else text.encode()
    (two / "step_000002" / NAME).write_bytes(content)
    passed_over(two, caplog)


def with_header(edit: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return change


SHARDS = [
    lambda b: b"",
    lambda b: b[:4],
    lambda b: b[:-1],
    lambda b: b + b"\0",
    lambda b: struct.pack("<Q", 2**63) + b[8:],
    lambda b: struct.pack("<Q", len(b)) + b[8:],
    lambda b: struct.pack("<Q", 200_000) + deep("[").encode(),
    lambda b: struct.pack("<Q", 2) + b"[]" + b[8:],
    with_header(lambda h: h["w[1]"].update(data_offsets=[0, 16])),
    with_header(lambda h: h["w[1]"].update(data_offsets=[16, 2**62])),
    with_header(lambda h: h["w[1]"].update(data_offsets=[16])),
    with_header(lambda h: h["w[1]"].update(shape=[1, 4])),
    with_header(lambda h: h["w[1]"].update(shape=[2, -2])),
    with_header(lambda h: h["w[1]"].update(dtype="I32")),
    with_header(lambda h: h["w[1]"].update(dtype="X")),
    with_header(lambda h: h.update({"w[2]": h.pop("w[1]")})),
    with_header(lambda h: h.update({"w[1]": 5})),
]


@pytest.mark.parametrize("checksum", ["stale", "put right"])
def test_a_file_that_lies_is_passed_over(two: Path, caplog, checksum: str):
    path = two / "step_000002"
    whole, manifest = (path / SHARD).read_bytes(), (path / NAME).read_bytes()
    for change in SHARDS:
        (path / SHARD).write_bytes(change(whole))
        if checksum == "put right":
            found = measure(path / SHARD)
            facts = {"size_bytes": found.size_bytes, "xxh3": found.xxh3}
            forge(path, put(facts, "files", SHARD))
        passed_over(two, caplog)
        (path / SHARD).write_bytes(whole)
        (path / NAME).write_bytes(manifest)


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.full)])
def test_any_damage_leaves_the_older_one_or_none(examples: int):
    """Random bytes of random files: what is found is whole, and nothing raises."""

    @settings(max_examples=examples)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        draw = random.Random(seed)
        with tempfile.TemporaryDirectory() as name:
            top = Path(name)
            kept = [(path, read_manifest(path)) for path in (write(top, 1), write(top, 2))]
            for _ in range(draw.randint(1, 4)):
                path = draw.choice([path / n for path, _ in kept for n in (NAME, SHARD)])
                content = bytearray(path.read_bytes())
                at = draw.randrange(len(content) or 1)
                content[at : at + draw.choice([0, 1, 1, 40])] = draw.choice(
                    [draw.randbytes(1), b"", b"9" * 400, b"[" * 9000, b"\0", b"\xef\xbb\xbf"]
                )
                path.write_bytes(content)
            found = latest(top, checksums=True)
            truth = dict(kept)
            assert found is None or read_manifest(found) == truth[found]

    check()


def search(folder: str) -> str:
    try:
        return str(latest_together(folder, rank=dist.get_rank()))
    except CheckpointError as error:
        return f"refused: {error}"


def test_ranks_agree_on_the_older_one_and_refuse_to_begin_anew(ranks, two: Path):
    fifo(two / "step_000002" / NAME)
    assert ranks(2).run(search, str(two)) == [str(two / "step_000001")] * 2
    forge(two / "step_000001", put(9, "step"))
    first, second = ranks(2).run(search, str(two))
    assert first == second
    assert first.startswith(f"refused: {two} has 2 checkpoints, but none is complete")
    assert "step 9" in first
    assert ranks(2).run(search, str(two / "none")) == ["None"] * 2
