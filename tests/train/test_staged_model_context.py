"""Of every sample each rank along context has its own tokens on its device, and no others."""

from unittest.mock import patch

import torch
from torch import Tensor

from tests.train import parity
from torchdistpackage.parallel.context.order import SequenceOrder
from torchdistpackage.train.staged_model import StagedModel

SEQ_LEN = 16
RUN = [
    "model.layers=1", "model.dim=8", "model.heads=2", "model.vocab=33", f"data.seq_len={SEQ_LEN}",
    f"data.args={{seq_len: {SEQ_LEN}, vocab: 33}}", "data.global_batch=4", "train.steps=2",
    "data.target=tests.train.sources:UnevenTokens", "optim.warmup_steps=0",
    "pipeline.microbatches=2", "precision.dtype=float64",
]  # fmt: skip


def moved(changes: list[str]) -> tuple[list[Tensor], int]:
    """What a step and a validation put on the device of this rank, and the tokens of the step."""
    run, seen = parity.trainer([*RUN, *changes]), []
    to_device = StagedModel.to_device

    def noted(self: StagedModel, x: Tensor) -> Tensor:
        seen.append(x.clone())
        return to_device(self, x)

    with patch.object(StagedModel, "to_device", noted):
        num_tokens = run.train_step(1).wait().tokens
        run.evaluate()
    run.close()
    return seen, num_tokens


def test_a_rank_moves_its_part_of_each_batch(ranks):
    ((whole, num_tokens),) = ranks(1).run(moved, [])
    assert whole and all(x.shape[1] == SEQ_LEN for x in whole)
    for rank, (mine, counted) in enumerate(ranks(2).run(moved, ["parallel.context=2"])):
        places = [i for each in SequenceOrder(SEQ_LEN, 2).parts[rank] for i in each]
        assert len(places) == SEQ_LEN // 2 and len(mine) == len(whole)
        for part, one in zip(mine, whole, strict=True):
            assert torch.equal(part, one[:, places])
        assert counted == num_tokens, "of all ranks, without those that the source masks"
