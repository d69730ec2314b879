"""`model.hf` under sequence parallelism: between the blocks ranks hold their part of a sequence."""

import json

import pytest
import torch

from tests.train.test_transformers import MODELS
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.models.transformers_layout import shape_of_section
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
