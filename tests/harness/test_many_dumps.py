"""A hang report of thousands of ranks: its bytes, its time, and who lists the folder."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.harness.many_dumps import LATE, dump_of, topology_of
from torchdistpackage.harness.hang.diagnosis import diagnose
from torchdistpackage.harness.hang.dump import Folder, from_json
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
def test_one_rank_reads_all_dumps_and_finds_the_late_one_in_two_seconds(num_ranks: int):
    topo = topology_of(num_ranks)
    texts = [pack(asdict(dump_of(rank, num_ranks, topo))) for rank in range(num_ranks)]
    began_s = time.process_time()
    dumps = {rank: from_json(text) for rank, text in enumerate(texts)}
    found = diagnose(num_ranks, dumps, topology=topo)
    assert time.process_time() - began_s < 2
    assert found.suspects[0].rank == LATE
    assert f"{num_ranks - 1} other ranks wait for it" in found.suspects[0].what


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
