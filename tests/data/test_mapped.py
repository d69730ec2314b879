"""A file that becomes shorter during a run is named; reading its map would raise SIGBUS."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.texts import json_lines, pairs, sentences
from tests.train import parity
from torchdistpackage.data.tokens.mapped import MappedTensors
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.environment.failure import Failure, FailureKind, summary
from torchdistpackage.errors import DataError, RankError

RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "model.vocab=300", "data.seq_len=16"),
    *("data.global_batch=8", "pipeline.microbatches=2", "train.steps=20", "optim.warmup_steps=1"),
]


def cut_short(overrides: list[str], files: list[str]) -> None:
    """Train, and truncate the files on the way, as `cp` onto them does.

    Up to 16 small batches are read at once, so a later step is the first to read a truncated file.
    """
    run = parity.trainer([*RUN, *overrides])
    run.train_step(1).wait()
    for file in files:
        os.truncate(file, 0)
    for step in range(2, 21):
        run.train_step(step).wait()


def source(kind: str, folder: Path) -> tuple[list[str], list[Path]]:
    """Return (settings of a run, files that it maps)."""
    if kind == "tokens":
        file = folder / "ids.bin"
        (np.arange(20_000) % 300).astype(np.uint16).tofile(file)
        return ["data.name=tokens", f"data.path={file}"], [file]
    if kind in ("text", "folder"):
        (folder / "texts").mkdir()
        files = [folder / "texts" / f"{name}.txt" for name in ("ab" if kind == "folder" else "a")]
        for file in files:
            file.write_text(f"{file.stem} alpha " * 4000)
        return ["data.name=text", f"data.path={folder}/texts"], files
    made = pairs(folder, [("alpha", x) for x in sentences(300)])
    if kind == "tokens.bin":
        made = json_lines(folder, sentences(300))
    entry = tokenized(made, folder / "cache").folder
    settings = ["data.name=jsonl", f"data.path={made.path}", f"data.tokenizer={made.tokenizer}"]
    return [*settings, f"data.cache={folder}/cache", f"data.field={made.field}"], [entry / kind]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["tokens", "text", "folder", "tokens.bin", "counted.bin"])
def test_a_file_that_becomes_shorter_under_a_run_is_named(ranks, tmp_path, kind):
    settings, files = source(kind, tmp_path)
    said = [
        f"DataError: {file} had {file.stat().st_size:,} bytes when this run began to read it, and "
        f"has 0 now"
        for file in files
    ]
    with pytest.raises(RankError) as caught:
        ranks(1).run(cut_short, settings, [str(file) for file in files])
    assert any(text in str(caught.value) for text in said), caught.value


def test_only_the_file_that_is_mapped_counts(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123")
    file = MappedTensors.of(path)
    path.write_bytes(b"012345")
    file.check()
    (tmp_path / "other").write_bytes(b"0")
    (tmp_path / "other").rename(path)  # the map has the earlier one
    file.check()
    path.unlink()
    file.check()
    path.write_bytes(b"0123")
    file = MappedTensors.of(path)
    os.truncate(path, 3)
    with pytest.raises(DataError, match=r"had 4 bytes when .* and has 3 now; do not change data"):
        file.check()


def test_a_rank_that_died_of_a_map_is_told_what_it_may_be():
    failure = Failure(0, "n", 1, 1.0, FailureKind.SIGNAL, -7)
    assert summary(failure) == (
        "killed by signal 7 (SIGBUS) (perhaps a mapped file, such as data, became shorter, or "
        "/dev/shm is full)"
    )
