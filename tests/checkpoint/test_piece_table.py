"""A rank sends the header of its file once; a later save of the same shapes sends its digest."""

from pathlib import Path

import torch

from torchdistpackage.checkpoint.manifest import Manifest, TensorChunk, TensorEntry
from torchdistpackage.checkpoint.piece_table import PieceTable, WrittenFiles
from torchdistpackage.checkpoint.writer import write_safetensors

FILE = "rank_00000.safetensors"


def written(folder: Path, tables: tuple[PieceTable, PieceTable], length: int) -> WrittenFiles:
    """Write one tensor, and hand what a rank says of it to the rank that commits."""
    of_rank, of_committer = tables
    folder.mkdir()
    chunk = TensorChunk(FILE, "w", (0,), (length,))
    header = Manifest(0, 0, (), {"w": TensorEntry((length,), "float32", (chunk,))}, {}).to_json()
    facts = write_safetensors(folder / FILE, {"w": torch.zeros(length)}, {"pieces": header})
    told = of_rank.describe(folder, {FILE: facts})
    of_committer.take([told])
    assert of_committer.tensors(told.files)["w"].shape == (length,)
    return told


def test_a_second_save_of_the_same_shapes_sends_only_digests(tmp_path: Path):
    tables = of_rank, _ = PieceTable(), PieceTable()
    first = written(tmp_path / "first", tables, 4)
    (digest,) = first.digests.values()
    assert set(first.headers) == {digest}
    # until the save is agreed on, the committer may lack the header, as after one that failed
    assert of_rank.describe(tmp_path / "first", first.files).headers == first.headers
    of_rank.arrived(first)
    second = written(tmp_path / "second", tables, 4)
    assert second.headers == {} and second.digests == first.digests
    other = written(tmp_path / "other", tables, 5)
    assert set(other.headers) == {*other.digests.values()} != {digest}
