"""Checkpoints of split models: saved on some ranks, resumed on others, as one process goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.auto.models import language_model, prompt, same_state, twin
from torchdistpackage import NaiveDDP, ZeroOptimizer, tensor_parallel, tpc
from torchdistpackage.checkpoint.load import load
from torchdistpackage.checkpoint.save import save

# heads and vocabularies that no number of ranks divides; on 2 ranks a key head is held by both
LLAMA = {"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 101}
GPT2 = {"n_head": 3}
MODELS = {"llama": LLAMA, "gpt2": GPT2}


def step(model: Any, optimizer: Any, rows: slice = slice(None)) -> None:
    inputs = {name: x[rows] for name, x in prompt().items()}
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    optimizer.zero_grad()
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    optimizer.step()


def train(folder: str, family: str, data: int, tensor: int, stage: int, is_first: bool) -> None:
    """Step 1 and a checkpoint, or from there step 2; the state is that of one process."""
    tpc.setup_process_groups([("data", data), ("tensor", tensor)])
    model = language_model(family, **MODELS[family])
    split: Any = tensor_parallel(twin(model), distributed=True)
    if not is_first:
        with torch.no_grad():
            for parameter in split.parameters():
                parameter *= 3
    expected = torch.optim.AdamW(model.parameters(), lr=0.01)
    inner = torch.optim.AdamW(split.parameters(), lr=0.01)
    net = split if stage else NaiveDDP(split)
    optimizer: Any = ZeroOptimizer(inner, split, stage=stage) if stage else inner
    common = {"topology": tpc.topology, "rank": tpc.rank, "params": net, "optimizer": optimizer}
    rows = slice(tpc.get_dp_rank(), tpc.get_dp_rank() + 1) if data > 1 else slice(None)
    step(model, expected)
    if is_first:
        step(net, optimizer, rows)
        save(folder, step=1, tokens=14, **common)
    else:
        load(f"{folder}/step_000001", **common)
        if tensor == 1:
            unsplit = twin(model)
            with torch.no_grad():
                for parameter in unsplit.parameters():
                    parameter.zero_()
            load(f"{folder}/step_000001", **{**common, "params": unsplit, "optimizer": None})
            found, state = unsplit.state_dict(), model.state_dict()
            torch.testing.assert_close(found, state, atol=1e-9, rtol=0)
        step(model, expected)
        step(net, optimizer, rows)
    if stage:
        optimizer.finish()
    same_state(split, model, 1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "stage"),
    [
        ("llama", 1),
        ("gpt2", 0),
        pytest.param("llama", 0, marks=pytest.mark.full),
        pytest.param("gpt2", 1, marks=pytest.mark.full),
        pytest.param("gpt2", 3, marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_goes_on_beside_data_parallelism(ranks, tmp_path, family, stage):
    for is_first, (data, tensor) in ((True, (2, 2)), (False, (1, 3)), (False, (2, 1))):
        ranks(data * tensor).run(train, str(tmp_path), family, data, tensor, stage, is_first)
