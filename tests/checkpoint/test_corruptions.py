"""Damage drawn from seeds: every checkpoint that is not what was written is passed over, with why.

A failure names its seed; `corrupt(path, random.Random(seed))` repeats it.
"""

import json
import logging
import os
import random
import resource
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchdistpackage.checkpoint import commit as commits
from torchdistpackage.checkpoint.commit import latest
from torchdistpackage.checkpoint.manifest import NAME, Manifest, TensorChunk, TensorEntry
from torchdistpackage.checkpoint.writer import write_safetensors

FILES = ("rank00000.safetensors", "rank00001.safetensors")
NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**62,
    2**63,
    10**40,
    1.5,
    float("nan"),
    float("inf"),
    "7",
    None,
    [],
    {},
)
LIMIT_S, LIMIT_BYTES = 2.0, 64 << 20


def write(folder: Path, step: int) -> Path:
    """Two tensors in two files, one of them in a piece in each."""
    temporary = commits.make_temporary(folder, step)
    draw = torch.Generator().manual_seed(step)
    pieces = {
        FILES[0]: {"w[0]": torch.randn(40, 50, generator=draw), "b[0]": torch.ones(7)},
        FILES[1]: {"w[1]": torch.randn(60, 50, generator=draw)},
    }
    facts = {n: write_safetensors(temporary / n, x, {}) for n, x in pieces.items()}
    w = (
        TensorChunk(FILES[0], "w[0]", (0, 0), (40, 50)),
        TensorChunk(FILES[1], "w[1]", (40, 0), (60, 50)),
    )
    entries = {
        "w": TensorEntry((100, 50), "float32", w),
        "b": TensorEntry((7,), "float32", (TensorChunk(FILES[0], "b[0]", (0,), (7,)),)),
    }
    return commits.commit(temporary, Manifest(step, 3, (("data", 2),), entries, facts, {"seed": 1}))


def flip(path: Path, draw: random.Random) -> None:
    file = path / draw.choice((NAME, *FILES))
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 50))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def truncate(path: Path, draw: random.Random) -> None:
    file = path / draw.choice((NAME, *FILES))
    os.truncate(file, draw.randrange(file.stat().st_size))


def lengthen(path: Path, draw: random.Random) -> None:
    with (path / draw.choice(FILES)).open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 5000)))


def zero(path: Path, draw: random.Random) -> None:
    """A block that was never written, as after a crash of a disk."""
    file = path / draw.choice(FILES)
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    content[at : at + 512] = bytes(len(content[at : at + 512]))
    file.write_bytes(content)


def swap(path: Path, draw: random.Random) -> None:
    one, other, third = path / FILES[0], path / FILES[1], path / "x"
    one.rename(third)
    other.rename(one)
    third.rename(other)


def other_step(path: Path, draw: random.Random) -> None:
    name = draw.choice((NAME, *FILES))
    shutil.copy(path.parent / "step_000001" / name, path / name)


def remove(path: Path, draw: random.Random) -> None:
    (path / draw.choice((NAME, *FILES))).unlink()


def link(path: Path, draw: random.Random) -> None:
    file = path / draw.choice((NAME, *FILES))
    target = draw.choice((file.name, "/dev/zero", "/dev/full", "/nowhere", ".", f"../{file.name}"))
    file.unlink()
    file.symlink_to(target)


def special(path: Path, draw: random.Random) -> None:
    file = path / draw.choice((NAME, *FILES))
    file.unlink()
    draw.choice((os.mkfifo, os.mkdir))(file)


def lie(path: Path, draw: random.Random) -> None:
    """A number or a text of the manifest becomes another, and its checksum is put right."""
    document = json.loads((path / NAME).read_text())
    body = document["manifest"]
    # which facts the writer noted, under which degrees, how many tokens: nobody can tell a lie
    places = list(leaves({k: body[k] for k in ("step", "tensors", "files", "format")}))
    where = draw.choice(places)
    holder: Any = body
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = draw.choice([x for x in NUMBERS if repr(x) != repr(holder[where[-1]])])
    text = json.dumps(body)
    document["crc32"] = zlib.crc32(text.encode())
    (path / NAME).write_text(json.dumps(document))


def leaves(value: Any, path: tuple = ()) -> Any:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*path, key))
    # `crc32` of a file is null where there is an `xxh3`, and `null` for it says the same
    elif path[-1] != "crc32":
        yield path


def header(path: Path, draw: random.Random) -> None:
    """The header of a file says another thing; checksum and size in the manifest are put right."""
    file = path / draw.choice(FILES)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    entry = head[draw.choice([k for k in head if k != "__metadata__"])]
    key = draw.choice(("dtype", "shape", "data_offsets"))
    old = entry[key]
    entry[key] = (
        draw.choice(("F64", "I8", "X", 3))
        if key == "dtype"
        else [draw.choice([x for x in NUMBERS if x != old[0]]), *old[1:]]
    )
    text = json.dumps(head).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    found = commits.measure(file)
    document = json.loads((path / NAME).read_text())
    body = document["manifest"]
    body["files"][file.name] |= {"size_bytes": found.size_bytes, "xxh3": found.xxh3}
    document["crc32"] = zlib.crc32(json.dumps(body).encode())
    (path / NAME).write_text(json.dumps(document))


KINDS: list[Callable[[Path, random.Random], None]] = [
    *(flip, truncate, lengthen, zero, swap, other_step, remove, link, special, lie, lie, header),
]


def corrupt(path: Path, draw: random.Random) -> str:
    """Damage a checkpoint in one way, or in two; says how."""
    # two of a kind could undo each other
    kinds = dict.fromkeys(draw.choice(KINDS) for _ in range(draw.choice((1, 1, 1, 2))))
    done = []
    for kind in kinds:
        if any(file.is_symlink() for file in path.iterdir()):
            break  # a second damage would read /dev/zero to its end
        try:
            kind(path, draw)
        except (OSError, ValueError):  # the first left nothing to damage further
            if not done:
                raise
        done.append(kind.__name__)
    return " and ".join(done)


@pytest.mark.parametrize("number", [40, pytest.param(400, marks=pytest.mark.full)])
def test_every_corruption_is_passed_over_with_a_reason(tmp_path: Path, caplog, number: int):
    whole = tmp_path / "whole"
    for step in (1, 2):
        write(whole, step)
    assert latest(whole, checksums=True) == whole / "step_000002"
    caplog.set_level(logging.WARNING)
    for seed in range(number):
        folder = tmp_path / f"seed{seed}"
        shutil.copytree(whole, folder)
        how = corrupt(folder / "step_000002", random.Random(seed))
        caplog.clear()
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        found = latest(folder, checksums=True)
        took_s = time.process_time() - began
        grew = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        name = f"seed {seed}: {how}"
        assert found == folder / "step_000001", name
        (text,) = [record.getMessage() for record in caplog.records]
        assert "step_000002 is damaged and skipped: " in text and len(text) < 1000, (
            f"{name}: {text}"
        )
        assert took_s < LIMIT_S and grew < LIMIT_BYTES, f"{name}: {took_s} s, {grew} bytes"
        shutil.rmtree(folder)
