"""Formats of others: what is exported they read, and what they wrote loads here."""

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tells import facts_pattern
from torchdistpackage.checkpoint.compare import largest_difference, stats_of
from torchdistpackage.checkpoint.formats.dcp import read_dcp
from torchdistpackage.checkpoint.formats.files import (
    read_safetensors,
    read_suffixed,
    read_torch,
)
from torchdistpackage.checkpoint.formats.importing import write_checkpoint
from torchdistpackage.checkpoint.formats.names import as_ours, as_theirs, read_names
from torchdistpackage.checkpoint.formats.source import TensorSource, checkpoint_source
from torchdistpackage.checkpoint.formats.table import FORMATS
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.save import save
from torchdistpackage.cli.main import main
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.lazy import resolve
from torchdistpackage.topology.mesh import topology

SHAPE = (8, 6)


def full(name: str) -> Tensor:
    draw = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return torch.randn(SHAPE, generator=draw)


def split(folder: str) -> None:
    """A checkpoint of two tensor ranks: one weight by rows, one by columns, and AdamW's state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = topology((("tensor", size),), size)
    cut = {"rows": (("tensor",), ()), "columns": ((), ("tensor",))}
    params = {}
    for name, axes in cut.items():
        dim = 0 if axes[0] else 1
        part = full(name).chunk(size, dim)[rank].contiguous()
        params[name] = (nn.Parameter(part), Layout(name, SHAPE, axes))
    optimizer = torch.optim.AdamW([p for p, _ in params.values()], lr=0.1)
    for p, _ in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    where = {"topology": world, "rank": rank}
    save(folder, step=5, tokens=70, params=params, optimizer=optimizer, **where)


@pytest.fixture(scope="module")
def written(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    ranks(2).run(split, str(folder))
    return folder / "step_000005"


def tensors_of(source: TensorSource) -> dict[str, Tensor]:
    return {name: source.read(name) for name in source.tensors}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in one
    )


def test_each_format_reads_what_was_exported(written, tmp_path):
    source = checkpoint_source(written)
    truth = tensors_of(source)
    assert truth["rows#exp_avg"].shape == SHAPE and truth["rows#step"].item() == 1
    both_ways = [spec for spec in FORMATS.values() if spec.write and spec.read]
    for spec in both_ways:
        resolve(spec.write)(source, tmp_path / spec.name)
    assert same(load_file(tmp_path / "safetensors"), truth)
    content = torch.load(tmp_path / "torch", weights_only=True)
    assert same({**content["model"], **content["optimizer"]}, truth)
    assert (content["step"], content["tokens"]) == (5, 70)
    state = {name: torch.full_like(x, 9) for name, x in truth.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(state, truth)
    assert {spec.name for spec in both_ways} >= {"torch", "safetensors", "dcp"}
    for spec in both_ways:
        again = resolve(spec.read)(tmp_path / spec.name)
        assert same(tensors_of(again), truth), spec.name
        path = write_checkpoint(again, tmp_path / f"back_{spec.name}")
        assert same(tensors_of(checkpoint_source(path)), truth), spec.name


def by_dcp(folder: str) -> None:
    """What DCP writes of a DTensor on two ranks, and of plain tensors."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(full("w"), mesh, [Shard(0)]), "b": full("b"), "step": 3}
    dcp.save(state, checkpoint_id=folder)


def loaded(path: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = Layout("w", SHAPE, ((), ("tensor",)))
    params = {
        "w": (nn.Parameter(torch.zeros(8, 6 // size)), layout),
        "b": (nn.Parameter(torch.zeros(SHAPE)), Layout("b", SHAPE)),
    }
    load(path, params=params, topology=topology((("tensor", size),), size), rank=rank)
    assert torch.equal(params["w"][0], full("w").chunk(size, 1)[rank])
    assert torch.equal(params["b"][0], full("b"))


def test_what_dcp_wrote_on_two_ranks_loads_here_on_two_and_on_one(ranks, tmp_path):
    ranks(2).run(by_dcp, str(tmp_path / "dcp"))
    path = write_checkpoint(read_dcp(tmp_path / "dcp"), tmp_path)
    ranks(2).run(loaded, str(path))
    ranks(1).run(loaded, str(path))


class Evil:
    def __reduce__(self):
        return print, ("run",)


def test_code_in_files_of_others_is_not_run(tmp_path, capsys):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"builtins\.print, which DCP metadata never"):
        read_dcp(tmp_path / "dcp")
    torch.save({"w": torch.ones(1), "x": Evil()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_torch(tmp_path / "x.pt")
    assert "run" not in capsys.readouterr().out


NAMES = """
blocks.*.qkv.weight: decoder.layers.self_attention.linear_qkv.weight[*]
blocks.*.up.weight: layers.*.feed_forward.w1.weight
embed.weight: tok_embeddings.weight
"""


def source_of(tensors: dict[str, Tensor]) -> TensorSource:
    described = {
        k: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for k, x in tensors.items()
    }
    return TensorSource(described, tensors.__getitem__)


def test_names_of_titan_and_stacked_layers_of_megatron_become_ours(tmp_path):
    (tmp_path / "names.yaml").write_text(NAMES)
    rules = read_names(tmp_path / "names.yaml")
    stacked = torch.randn(3, 4, 2)
    theirs = {
        "decoder.layers.self_attention.linear_qkv.weight": stacked,
        "layers.0.feed_forward.w1.weight": torch.randn(2, 2),
        "layers.11.feed_forward.w1.weight": torch.randn(2, 2),
        "tok_embeddings.weight": torch.randn(5, 2),
        "freqs_cis": torch.randn(1),
    }
    ours = tensors_of(as_ours(source_of(theirs), rules))
    assert same(
        ours,
        {
            **{f"blocks.{i}.qkv.weight": stacked[i] for i in range(3)},
            "blocks.0.up.weight": theirs["layers.0.feed_forward.w1.weight"],
            "blocks.11.up.weight": theirs["layers.11.feed_forward.w1.weight"],
            "embed.weight": theirs["tok_embeddings.weight"],
        },
    )
    back = as_theirs(source_of({k: x for k, x in ours.items() if "qkv" not in k}), rules[1:])
    assert same(tensors_of(back), {k: x for k, x in theirs.items() if k.startswith(("l", "t"))})
    with pytest.raises(CheckpointError, match="stacked layers"):
        as_theirs(source_of(ours), rules)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "`our name: their name`"),
        ("a.*: b\n", r"has 1 `\*`, b 0"),
        ("a: 3\n", "got '3'"),
        ("a: [\n", "cannot be read as YAML"),
        ("a: x\nb: x\nc: y\n", None),
    ],
)
def test_a_mapping_file_that_is_none_is_refused(tmp_path, text, words):
    (tmp_path / "n.yaml").write_text(text)
    if words is None:
        rules = read_names(tmp_path / "n.yaml")
        assert same(
            tensors_of(as_ours(source_of({"x": torch.ones(1)}), rules)), {"a": torch.ones(1)}
        )
        return
    with pytest.raises(CheckpointError, match=words):
        read_names(tmp_path / "n.yaml")


def test_files_of_the_suffix_are_joined(tmp_path):
    whole = {"a.weight": torch.randn(4, 2), "b.weight": torch.randn(4, 2)}
    norm = torch.randn(2)
    for pipe, name in enumerate(("a", "b")):
        for tensor in range(2):
            part = whole[f"{name}.weight"].chunk(2)[tensor].clone()
            state = {f"{name}.weight": part, f"{name}.norm": norm}
            torch.save({"model": state}, tmp_path / f"ck_tp_{tensor}_pp_{pipe}.pth")
    found = tensors_of(read_suffixed(tmp_path / "ck_tp_0_pp_0.pth"))
    assert same(found, {**whole, "a.norm": norm, "b.norm": norm})
    (tmp_path / "ck_tp_1_pp_1.pth").unlink()
    with pytest.raises(CheckpointError, match=facts_pattern("rank 1", "rank 1")):
        read_suffixed(tmp_path / "ck_tp_0_pp_0.pth")


def test_statistics_and_differences_know_of_nan():
    nan, inf = float("nan"), float("inf")
    found = stats_of(torch.tensor([1.0, 3.0, nan, inf]))
    assert (found.mean, found.std, found.smallest, found.largest) == (2.0, 1.0, 1.0, 3.0)
    assert found.num_nonfinite == 2
    one = torch.tensor([1.0, nan, inf])
    assert largest_difference(one, one.clone()) == 0
    assert largest_difference(one, torch.tensor([1.5, nan, inf])) == 0.5
    assert largest_difference(one, torch.tensor([1.0, 2.0, inf])) == inf
    assert largest_difference(one, torch.tensor([1.0, nan, -inf])) == inf


def test_the_command_tells_what_is_there(written, tmp_path, capsys):
    folder = str(written.parent)
    assert main(["checkpoint", "ls", folder]) == 0
    out = capsys.readouterr().out
    assert "tensor=2" in out and " 70 " in out and "latest, kept" in out
    assert main(["checkpoint", "show", folder, "--stats"]) == 0
    out = capsys.readouterr().out
    assert "dim 0 in 2" in out and "dim 1 in 2" in out and "8x6" in out
    assert main(["checkpoint", "verify", folder]) == 0
    target = str(tmp_path / "x.safetensors")
    assert main(["checkpoint", "export", folder, target, "--to", "safetensors"]) == 0
    assert main(["checkpoint", "export", folder, target, "--to", "safetensors"]) == 2
    into = str(tmp_path / "in")
    words = ["checkpoint", "import", target, into, "--from", "safetensors", "--step", "5"]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["checkpoint", "diff", folder, into]) == 0, "written by 2 ranks, and by 1"
    assert "all 8 tensors are equal" in capsys.readouterr().out


def test_verify_and_diff_find_a_flipped_bit(written, tmp_path, capsys):
    source = checkpoint_source(written)
    path = write_checkpoint(source, tmp_path)
    file = path / "rank00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "has checksum" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(written), str(path)]) == 1
    assert "1 tensors differ" in capsys.readouterr().out


MEMORY = """
import sys
from pathlib import Path
from torchdistpackage.checkpoint.formats.importing import write_checkpoint
from torchdistpackage.checkpoint.formats.source import TensorSource, checkpoint_source
from torchdistpackage.checkpoint.formats.files import write_safetensors_file, write_torch
import torch
def anonymous():
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("RssAnon:"))
folder = Path(sys.argv[1])
described = {f"w{i}": ("float32", (1024, 1024)) for i in range(24)}
path = write_checkpoint(TensorSource(described, lambda n: torch.ones(1024, 1024)), folder)
before = anonymous()
for write, name in ((write_safetensors_file, "a"), (write_torch, "b")):
    write(checkpoint_source(path), folder / name)
    assert anonymous() - before < 16 << 10, (name, anonymous() - before)
"""


@pytest.mark.full
def test_an_export_holds_a_tensor_and_not_the_checkpoint(tmp_path):
    """Of 96 MB in tensors of 4 MB; pages of files, which the kernel takes back, do not count."""
    subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], check=True, timeout=120)
    assert (tmp_path / "a").stat().st_size > 96 << 20


def test_a_file_without_a_name_for_its_tensors_is_refused(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=facts_pattern("a.safetensors", "b.safetensors")):
        read_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="there is no tensor to import"):
        write_checkpoint(source_of({}), tmp_path)


def test_what_is_no_folder_of_dcp_is_refused(tmp_path):
    """A file, a folder without metadata, and a pipe, which is not waited for."""
    file, pipe = tmp_path / "file", tmp_path / "pipe"
    file.write_text("x")
    pipe.mkdir()
    os.mkfifo(pipe / ".metadata")
    for path, text in ((file, "has no .metadata"), (tmp_path, "has no"), (pipe, "is a pipe")):
        with pytest.raises(CheckpointError, match=text):
            read_dcp(path)
