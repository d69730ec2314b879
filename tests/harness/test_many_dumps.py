"""A hang report of thousands of ranks: its bytes, its time, and who lists the folder. No torch."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.harness.many_dumps import LATE, dump_of, topology_of
from torchdistpackage.harness.hang import dump
from torchdistpackage.harness.hang.diagnosis import diagnose
from torchdistpackage.harness.hang.dump import Folder, State, from_json
from torchdistpackage.harness.hang.packed import pack

MOST_BYTES = 10e6 / 4096


def test_a_dump_has_few_bytes_however_many_ranks_there_are():
    for num_ranks in (256, 4096):
        dump = dump_of(300 % num_ranks, num_ranks, topology_of(num_ranks))
        text = pack(asdict(dump))
        assert len(text) < MOST_BYTES
        read = from_json(text)
        assert read.snapshot is not None and dump.snapshot is not None
        for group, before in zip(read.snapshot["groups"], dump.snapshot["groups"], strict=True):
            assert list(group["ranks"]) == before["ranks"]
        assert read.snapshot["calls"] == dump.snapshot["calls"]
        assert (list(read.stacks), read.process) == (list(dump.stacks), dump.process)


def test_ranks_that_lie_on_no_mesh_are_kept_one_by_one():
    dump = dump_of(0, 64, topology_of(64))
    odd = {**dump.snapshot, "groups": [{"ranks": [0, 1, 5, 9], "axis": ""}], "calls": []}  # type: ignore
    read = from_json(pack(asdict(replace(dump, snapshot=odd))))
    assert read.snapshot is not None and read.snapshot["groups"][0]["ranks"] == [0, 1, 5, 9]


@pytest.mark.parametrize("num_ranks", [256, pytest.param(4096, marks=pytest.mark.full)])
def test_one_rank_reads_all_files_and_finds_the_late_rank_in_two_seconds(
    tmp_path: Path, num_ranks: int
):
    topo, folder = topology_of(num_ranks), Folder(tmp_path, "x")
    folder.make()
    for rank in range(num_ranks):
        folder.write(dump_of(rank, num_ranks, topo))
    num_bytes = sum(x.stat().st_size for x in tmp_path.rglob("*") if x.is_file())
    assert num_bytes < 10e6 * num_ranks / 4096
    taken_s: list[float] = []
    for _ in range(3):  # a busy machine counts more CPU for the same work
        began_s = time.process_time()
        found = diagnose(num_ranks, Folder(tmp_path, "x").read(), topology=topo)
        taken_s.append(time.process_time() - began_s)
        if taken_s[-1] < 2 * num_ranks / 4096:
            break
    assert min(taken_s) < max(0.5, 2 * num_ranks / 4096), taken_s
    assert found.suspects[0].rank == LATE
    assert f"{num_ranks - 1} other ranks wait for it" in found.suspects[0].what


def test_a_dump_is_read_again_only_if_it_has_changed(tmp_path: Path, monkeypatch):
    """Who writes the report looks several times, until all have answered."""
    topo, folder = topology_of(64), Folder(tmp_path, "x")
    folder.make()
    for rank in range(64):
        folder.write(dump_of(rank, 64, topo))
    first, texts = folder.read(), list[str]()
    monkeypatch.setattr(dump, "from_json", lambda text: texts.append(text) or from_json(text))
    assert folder.read() == first and texts == []
    folder.write(replace(first[5], state=State.LEFT))
    again = folder.read()
    assert len(texts) == 1 and again[5].state is State.LEFT
    assert {**again, 5: first[5]} == first


def test_only_who_writes_the_report_lists_the_folder_of_all(tmp_path: Path, monkeypatch):
    folder, topo = Folder(tmp_path, "x"), topology_of(64)
    folder.make()
    for rank in range(64):
        folder.write(dump_of(rank, 64, topo))
    listed: list[str] = []
    names = os.listdir

    def listdir(path: Path) -> list[str]:
        found = names(path)
        listed.extend(found)
        return found

    monkeypatch.setattr(os, "listdir", listdir)
    for rank in range(64):
        assert len(folder.read_host(f"node{rank // 8:04d}")) == 8
        assert folder.num_reporting(below=rank) == min(rank, 3)
    folder.remove_if_all_left(64)
    assert len(listed) == 64 * 8, "each rank those of its node"
    assert len(folder.read()) == 64
