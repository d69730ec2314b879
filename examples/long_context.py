"""A GPT is trained to copy a key from thousands of tokens back, its sequences on two ranks.

    python examples/long_context.py                    8,192 tokens, context 2, beside one process
    python examples/long_context.py --tokens 256 --steps 20

Each sample is noise, with a key of a few tokens near its beginning, and at its end a mark and the
key again. The loss is of the key alone, whose tokens are far more than one rank holds apart. The
first steps are repeated by one process, whose losses are the same.
"""

import argparse

import torch
import torch.distributed as dist

from torchdistpackage import NaiveDDP, run_or_launch, setup_distributed, tpc
from torchdistpackage.comm import collectives
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.parallel import initialize, shard_sequence
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.tensor.attention import WholeSequence

VOCAB, KEY, MARK = 32, 4, 31
IGNORE = -100
BESIDE = 3  # steps that one process repeats


def sample(tokens: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets), each (1, tokens), the same on all ranks; the key's targets alone count."""
    draw = torch.Generator().manual_seed(step)
    key = torch.randint(1, MARK, (KEY,), generator=draw)
    text = torch.zeros(tokens + 1, dtype=torch.int64)
    text[0], text[1 : 1 + KEY] = MARK, key
    text[-KEY - 1], text[-KEY:] = MARK, key
    targets = torch.full((tokens,), IGNORE)
    targets[-KEY:] = key
    return text[None, :-1], targets[None]


def run(tokens: int, steps: int, group: dist.ProcessGroup | None) -> list[float]:
    """The loss of each step, with sequences over the ranks of `group`; None: whole, on this one."""
    shape = GPTShape(layers=2, dim=64, heads=4, vocab=VOCAB, seq_len=tokens)
    sequence = WholeSequence() if group is None else ContextSequence(group)
    model = GPT(shape, group=tpc.get_group("tensor"), sequence=sequence)
    initialize(model, model.layouts(), tpc.topology.dense, tpc.rank, seed=0)
    # gradients are summed over the ranks that hold parts of a sequence, as over those of data
    wrapped = model if group is None else NaiveDDP(model, reduce_op="sum")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        ids, targets = sample(tokens, step)
        if group is not None:
            ids, targets = (shard_sequence(x, dim=1, group=group) for x in (ids, targets))
        optimizer.zero_grad()
        total, _ = model.loss(wrapped(ids), targets)
        (total / KEY).backward()
        optimizer.step()
        loss = total.detach() / KEY
        losses.append(float(loss if group is None else collectives.reduce(loss, group)))
    return losses


def train(tokens: int, steps: int) -> None:
    rank, size, _, _ = setup_distributed()
    tpc.setup_process_groups([("context", size)])
    together = run(tokens, steps, tpc.get_group("context"))
    if rank == 0:
        for step in range(0, steps, max(steps // 10, 1)):
            print(f"step {step + 1:3}  loss {together[step]:.6f}")
        print(f"step {steps:3}  loss {together[-1]:.6f}")
        alone = run(tokens, min(steps, BESIDE), None)
        gap = max(abs(a - b) for a, b in zip(together, alone, strict=False))
        print(f"one process, {len(alone)} steps: loss {alone[-1]:.6f}, at most {gap:.1e} apart")
    tpc.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    run_or_launch(train, options.tokens, options.steps, num_procs=2)
