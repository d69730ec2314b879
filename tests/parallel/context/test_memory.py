"""Bytes that a block holds between forward and backward fall with the ranks of its sequence."""

import pytest
import torch

from tests.ddp.allocated import Meter
from torchdistpackage import tpc
from torchdistpackage.models.gpt import GPTBlock
from torchdistpackage.models.gpt_layout import HALVES, GPTShape
from torchdistpackage.parallel import shard_sequence
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.tensor.attention import WholeSequence, rotary_tables

SEQ_LEN = 1024
SHAPE = GPTShape(layers=1, dim=128, heads=4, vocab=64, seq_len=SEQ_LEN, kv_heads=2)


def peak(size: int) -> int:
    """Of forward and backward, without parameters and their gradients, which stay as they are."""
    tpc.setup_process_groups([("context", size)])
    group = tpc.get_group("context")
    sequence = ContextSequence(group) if size > 1 else WholeSequence()
    common = {"group": tpc.get_group("tensor"), "axis": "tensor"}
    block = GPTBlock(SHAPE, 0, 0.0, HALVES, sequence=sequence, **common)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    tokens = sequence.tokens(SEQ_LEN // size, None, torch.device("cpu"))
    cos, sin = rotary_tables(SEQ_LEN, SHAPE.head_dim)
    tables = (
        (cos, sin) if tokens.positions is None else (cos[tokens.positions], sin[tokens.positions])
    )
    x = shard_sequence(torch.randn(SEQ_LEN, 1, SHAPE.dim), 0)

    def step():
        block(x.requires_grad_(), tables).sum().backward()
        x.grad = None

    step()
    meter = Meter()
    meter.run(step)
    return meter.peak - sum(p.nbytes for p in block.parameters())


@pytest.mark.late_in_full
def test_activations_fall_with_the_ranks(ranks):
    (alone,) = ranks(1).run(peak, 1)
    assert max(ranks(2).run(peak, 2)) < 0.55 * alone
    assert max(ranks(4).run(peak, 4)) < 0.30 * alone
