"""`model.lora.load_in_4bit`: over 4-bit weights every layout trains as one process does."""

import json
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from tests.tells import tells
from tests.train import parity
from tests.train.lora_ranks import initial_of, quiet
from tests.train.qlora_ranks import (
    held_bytes,
    losses_of,
    merged_by_peft,
    of_avx512,
    of_bitsandbytes,
    of_rounded,
    qlora_steps,
    rounded,
    third_step_of,
    two_steps_of,
)
from tests.train.test_transformers import MODELS, asked
from tests.train.transformers_ranks import RUN, save_model
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.derive import local_shape
from torchdistpackage.layout.four_bit import PackedFormat, keeps_blocks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.parallel.tensor import four_bit
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.topology.mesh import Mesh

RANKS_IMPORT = ("peft", "bitsandbytes")
FULL = (pytest.mark.full,)
WIDE = {"hidden_size": 64, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
CASES = {
    "llama": (WIDE, "[q_proj, down_proj]", "nf4"),
    "llama, tied": (WIDE | {"num_key_value_heads": 2}, "[v_proj, o_proj, up_proj]", "fp4"),
    "gemma2": (WIDE, "[all-linear]", "nf4"),
    "gpt2": ({"n_embd": 128, "n_layer": 2, "n_head": 2}, "[c_attn]", "nf4"),
    "llama, double": (WIDE | {"intermediate_size": 512}, "[q_proj, down_proj]", "nf4+"),
    "llama, int8": (MODELS["llama"], "[q_proj, down_proj]", "int8"),
    "gpt2, int8": (MODELS["gpt2"], "[c_attn]", "int8"),
}
KEYS = {
    "nf4": "load_in_4bit: true",
    "fp4": "load_in_4bit: true, bnb_4bit_quant_type: fp4",
    "nf4+": "load_in_4bit: true, bnb_4bit_use_double_quant: true",
    "int8": "load_in_8bit: true",
}
LAYOUTS = {
    "alone": {},
    "tensor2": {"tensor": 2},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
    "data2-zero3": {"data": 2, "zero": 3},
    "data2xpipe2": {"data": 2, "pipe": 2},
    "tensor2-sequence": {"tensor": 2, "sequence": 2},
    "tensor4": {"tensor": 4},  # ranks share heads of keys
}


def lora(name: str) -> str:
    _, target, quant_type = CASES[name]
    return f"model.lora={{r: 3, alpha: 6, target: {target}, {KEYS[quant_type]}}}"


def options_of(name: str) -> dict:
    """For peft."""
    target = CASES[name][1]
    return {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": "all-linear" if "all" in target else target[1:-1].split(", "),
        "fan_in_fan_out": name.startswith("gpt2"),
    }


@pytest.fixture(scope="session")
def rounded_model(ranks, tmp_path_factory):
    """(folder, what peft makes of it over rounded weights in one process) by name, made once."""
    made: dict[str, tuple[str, tuple]] = {}

    def of(name: str) -> tuple[str, tuple]:
        if name not in made:
            sizes, _, quant_type = CASES[name]
            folder = str(tmp_path_factory.mktemp("qlora") / "model")
            ranks(1).run(
                save_model, MODELS.get(name, MODELS[name.partition(",")[0]]) | sizes, folder
            )
            held = ranks(1).run(initial_of, [f"model.hf={folder}", lora(name)])
            initial, options = parity.whole(held), options_of(name)
            made[name] = folder, ranks(1).run(of_rounded, folder, initial, options, quant_type)[0]
        return made[name]

    return of


def cases():
    small = {("llama", "pipe2xtensor2")}
    for name in CASES:
        for layout in LAYOUTS if not name.startswith("gpt2") else list(LAYOUTS)[:-1]:
            yield pytest.param(name, layout, marks=() if (name, layout) in small else FULL)


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_three_steps_are_those_of_peft_over_rounded_weights(ranks, rounded_model, name, layout):
    folder, truth = rounded_model(name)
    size, changes = asked(LAYOUTS[layout])
    found = ranks(size).run(qlora_steps, [f"model.hf={folder}", lora(name), *changes])
    for step, expected in enumerate(truth.gradients):
        parity.expect_close([mine.gradients[step] for mine, _ in found], [expected])
    adapters = [[x for x in mine.weights if ".lora_" in x[0]] for mine, _ in found]
    parity.expect_close(adapters, [truth.weights])
    for mine, _ in found:
        assert mine.losses == pytest.approx(truth.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("llama", "tensor2", "data2xpipe2"),
        pytest.param("gpt2", "data2-zero3", "pipe2xtensor2", marks=FULL),
        pytest.param("llama, double", "data2xpipe2", "data2-zero3", marks=FULL),
        pytest.param("llama, int8", "tensor2", "data2xpipe2", marks=FULL),
    ],
)
def test_a_run_goes_on_and_is_merged_into_what_it_was_trained_over(
    ranks, rounded_model, tmp_path, capsys, name, first, then
):
    folder, truth = rounded_model(name)
    overrides = [f"model.hf={folder}", lora(name)]
    size, changes = asked(LAYOUTS[first])
    before = ranks(size).run(two_steps_of, [*overrides, *changes], str(tmp_path))
    manifest = read_manifest(tmp_path / "checkpoints" / "step_000002")
    assert all(".lora_" in key for key in manifest.tensors)
    size, changes = asked(LAYOUTS[then])
    found = ranks(size).run(third_step_of, [*overrides, *changes], str(tmp_path))
    parity.expect_close([mine.gradients[0] for mine in found], [truth.gradients[2]])
    adapters = [[x for x in mine.weights if ".lora_" in x[0]] for mine in found]
    parity.expect_close(adapters, [truth.weights])
    assert [*before[0], *found[0].losses] == pytest.approx(truth.losses, rel=1e-9)
    with quiet():
        assert main(["export", str(tmp_path), str(tmp_path / "apart")]) == 0
        assert main(["export", str(tmp_path), str(tmp_path / "merged"), "--merge"]) == 0
    assert f"{8 if CASES[name][2] == 'int8' else 4}-bit values of" in capsys.readouterr().out
    quant_type = CASES[name][2]
    (expected,) = ranks(1).run(merged_by_peft, folder, str(tmp_path / "apart"), quant_type)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged and all(torch.equal(x, expected[key]) for key, x in merged.items())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "pipe2xtensor2"),
        pytest.param("llama", "data2xpipe2", marks=FULL),
        pytest.param("llama, double", "data2xpipe2", marks=FULL),
        pytest.param("llama, double", "tensor2", marks=FULL),
        pytest.param("llama, int8", "pipe2xtensor2", marks=FULL),
        pytest.param("gpt2, int8", "tensor2", marks=FULL),
    ],
)
def test_a_plan_has_the_bytes_that_ranks_hold(ranks, rounded_model, name, layout):
    size, changes = asked(LAYOUTS[layout])
    overrides = [*RUN, f"model.hf={rounded_model(name)[0]}", lora(name), *changes]
    for held, planned in ranks(size).run(held_bytes, [*overrides, "precision.dtype=float32"]):
        assert held == planned


@pytest.mark.full
def test_losses_are_those_of_transformers_own_model_in_4_bits(ranks, rounded_model):
    folder, _ = rounded_model("llama")
    overrides = [f"model.hf={folder}", lora("llama"), "precision.dtype=float32"]
    held = ranks(1).run(initial_of, overrides)
    (truth,) = ranks(1).run(of_bitsandbytes, folder, parity.whole(held), options_of("llama"))
    size, changes = asked(LAYOUTS["tensor2"])
    for found in ranks(size).run(losses_of, [*overrides, *changes]):
        assert found == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("shape", [(300, 64), (8, 32), (513, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quant_type", ["nf4+", "fp4+", "int8"])
def test_values_are_the_bits_of_bitsandbytes(quant_type, dtype, shape):
    packing = PackedFormat(quant_type.removesuffix("+"), double_quant=quant_type.endswith("+"))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    values, state = four_bit.packed(weight, packing)
    assert values.nbytes + state.num_bytes == packing.num_bytes(weight.numel(), len(weight))
    wide = torch.float32 if quant_type == "int8" else dtype
    expected = rounded(weight.to(wide), quant_type)
    assert torch.equal(four_bit.unpacked(values, state, wide), expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_has_the_double_scales_of_its_blocks(dim):
    """Also where heads of a fused matrix are cut one by one, and blocks of scales are cut."""
    shape, parts = (384, 192), ((128, 256), ()) if dim == 0 else ((), ())
    split = tuple(("tensor",) if x == dim else () for x in range(2))
    layout, mesh = Layout("w", shape, split, parts=parts, uneven=True), Mesh((("tensor", 3),))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packing = PackedFormat("nf4", double_quant=True)
    _, whole = four_bit.packed(weight, packing)
    values = four_bit.unpacked(*four_bit.packed(weight, packing), torch.float32)
    numbers = torch.arange(weight.numel()).view(shape) // 64
    for index in range(3):
        shard = four_bit.PackedShard(layout, 1, mesh, index, None)
        part = torch.empty(local_shape(layout, mesh, index))
        copy_part(part, numbers.float(), layout, mesh, index)
        assert torch.equal(shard.block_numbers(part.device), part.flatten()[::64].long())
        copy_part(part, weight, layout, mesh, index)
        with patch.object(four_bit.PackedShard, "join", lambda *_: whole_absmax(weight)):
            found = four_bit.unpacked(*four_bit.packed(part, packing, None, shard), torch.float32)
        copy_part(part, values, layout, mesh, index)
        assert torch.equal(found, part)
    assert whole.double is not None


def whole_absmax(weight: torch.Tensor) -> torch.Tensor:
    return four_bit.packed(weight, PackedFormat("nf4"))[1].absmax


def test_cuts_within_blocks_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    config = loads("{}", overrides=[f"model.hf={tmp_path}", lora("llama"), "parallel.tensor=2"])
    with pytest.raises(ConfigError) as caught:
        make_plan(config, 2)
    said = str(caught.value)
    assert tells(said, "parallel.tensor=2", "12 weights", "model.layers.0.mlp.down")
    assert "set tensor to 1, or model.lora.load_in_4bit to false" in said


@pytest.mark.parametrize(
    ("shape", "split", "inputs", "keeps"),
    [
        ((6, 64), 0, 1, True),
        ((6, 64), 1, 1, False),
        ((6, 128), 1, 1, True),
        ((6, 192), 1, 1, False),
        ((8, 32), 0, 1, True),
        ((6, 32), 0, 1, False),
        ((64, 6), 1, 0, True),
        ((192, 6), 0, 0, False),
    ],
)
def test_blocks_stay_whole_where_a_cut_goes_between_them(shape, split, inputs, keeps):
    """As bitsandbytes rounds the parts and the whole."""
    axes = tuple(("tensor",) if dim == split else () for dim in range(2))
    layout, mesh = Layout("w", shape, axes), Mesh((("tensor", 2),))
    assert keeps_blocks(layout, inputs, mesh) is keeps
    torch.manual_seed(0)
    whole = torch.randn(shape if inputs else shape[::-1])
    parts = whole.chunk(2, split if inputs else 1 - split)
    joined = torch.cat(
        [rounded(x.contiguous(), "nf4") for x in parts], split if inputs else 1 - split
    )
    assert torch.equal(joined, rounded(whole, "nf4")) is keeps


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("kernel", "verdict", "text"),
    [
        (None, None, ""),
        (
            of_avx512,
            four_bit.KernelVerdict(by_rows=False, by_blocks=True),
            "by blocks, which is right",
        ),
        (
            lambda v, s: 0 * of_avx512(v, s),
            four_bit.KernelVerdict(False, False),
            "by a table, which is",
        ),
    ],
    ids=["its own", "of AVX-512", "none right"],
)
def test_a_kernel_that_is_wrong_on_this_processor_is_found(
    monkeypatch, quant_type, kernel, verdict, text
):
    """Weights are those of the code book, whatever bitsandbytes computes here."""
    monkeypatch.setattr(four_bit, "_CHECKED", {})
    if kernel is not None:
        monkeypatch.setattr("bitsandbytes.functional.dequantize_4bit", kernel)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = four_bit.checked_kernel(torch.device("cpu"), dtype, quant_type)
        assert verdict is None or found == verdict
        for shape in ((8, 32), (6, 96), (6, 160), (100, 48), (2, 192), (5, 7)):
            weight = torch.randn(shape).to(dtype)
            packing = PackedFormat(quant_type)
            values, state = four_bit.packed(weight, packing)
            num_bytes = packing.num_bytes(weight.numel(), len(weight))
            assert values.nbytes + state.num_bytes == num_bytes
            back = four_bit.unpacked(values, state, dtype)
            rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
            torch.testing.assert_close(back, rounded(weight, quant_type), rtol=rtol, atol=0)
    if kernel is not None:
        lines = four_bit.kernel_notes()
        assert len(lines) == 3 and all(text in line for line in lines)
        assert f"wrong values on this processor for {quant_type} in float32 on cpu" in lines[0]
