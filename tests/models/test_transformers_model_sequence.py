"""`model.hf` under sequence parallelism: between the blocks ranks hold their part of a sequence."""

import json
from typing import Any

import pytest
import torch

from tests.train.test_transformers import MODELS
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.models.lora_layout import Lora
from torchdistpackage.models.transformers_layout import TransformersShape, shape_of_section
from torchdistpackage.models.transformers_model import stage

BATCH, SEQ_LEN = 2, 24
SIZE = 2


def saved_bytes(config: str, sequence_parallel: bool) -> tuple[tuple[int, ...], int]:
    """(shape of what the first two of three blocks hand on, bytes that a backward of it keeps)."""
    tpc.setup_process_groups([("tensor", SIZE)])
    shape = shape_of_section({"hf": config}, SEQ_LEN, sequence_parallel)
    made = stage(shape, pieces=range(2), group=tpc.get_group("tensor"))
    parameters = {p.untyped_storage().data_ptr() for p in made.parameters()}
    kept: dict[int, int] = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = made(torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64))
    if sequence_parallel:
        with pytest.raises(LayoutError, match="25"):
            made(torch.zeros(BATCH, SEQ_LEN + 1, dtype=torch.int64))
    return tuple(output.shape), sum(kept.values())


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(x, marks=pytest.mark.full) for x in ("gpt2", "opt", "bloom"))]
)
def test_ranks_keep_less_for_the_backward(ranks, tmp_path, name):
    """Norms and residual streams halve; inputs of the products, and attention, are as before."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODELS[name]))
    whole, part = (ranks(SIZE).run(saved_bytes, str(config), on)[0] for on in (False, True))
    dim = MODELS[name].get("hidden_size", 16)
    assert whole[0] == (BATCH, SEQ_LEN, dim)
    assert part[0] == (BATCH, SEQ_LEN // SIZE, dim)
    assert part[1] < 0.9 * whole[1]


DROPS = {"resid_pdrop": 0.5, "embd_pdrop": 0.5}
ALIKE = ("decoder.transformer.drop", "decoder.transformer.h.0.attn.c_attn.lora_dropout.default")
APART = (
    *("decoder.transformer.h.0.attn.resid_dropout", "decoder.transformer.h.0.mlp.dropout"),
    "decoder.transformer.h.0.attn.c_proj.lora_dropout.default",
)


def dropped(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By layer of dropout which elements it dropped in one forward."""
    tpc.setup_process_groups([("tensor", SIZE)])
    lora = Lora(4, 8.0, 0.5, ("c_attn", "c_proj"))
    shape = TransformersShape("gpt2", config, SEQ_LEN, True, lora)
    made = stage(shape, group=tpc.get_group("tensor"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    masks: dict[str, torch.Tensor] = {}
    made.train()
    for name in (*ALIKE, *APART):
        layer = made.get_submodule(name)
        layer.register_forward_hook(lambda _, __, y, name=name: masks.update({name: y == 0}))
    torch.manual_seed(0)  # as ranks drew parts of different sizes
    made(torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64))
    return masks


@pytest.mark.full
def test_dropout_is_alike_where_ranks_hold_the_same(ranks):
    """Before the blocks and in front of an adapter that is given all positions; not between."""
    one, other = ranks(SIZE).run(dropped, {**MODELS["gpt2"], **DROPS})
    for name in ALIKE:
        assert torch.equal(one[name], other[name]) and one[name].any(), name
    for name in APART:
        assert not torch.equal(one[name], other[name]), name
