"""A GPT learns to copy a key from 8,192 tokens back, its sequences on two ranks.

    python examples/long_context.py                8,192 tokens, context 2, in about a minute

A sample begins with a key in random order, a token for each of its places; then comes noise, and
at the end the places are asked for. The distance doubles whenever the key has been learned at the
one before. One process repeats the first steps, and at the end what was learned.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage import NaiveDDP, run_or_launch, setup_distributed, tpc
from torchdistpackage.comm import collectives
from torchdistpackage.layout.rope import Rope
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.parallel import initialize
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.tensor.attention import WholeSequence

PLACES, LETTERS, NOISE = 8, 8, 16
KEYS = PLACES * LETTERS  # token p * LETTERS + l is letter l at place p
VOCAB, IGNORE = KEYS + PLACES + NOISE, -100
THETA = 1e12  # most channels hardly turn over 8,192 positions, so that places are found anywhere
LEARNED, AT_MOST = 0.02, 600  # loss at which the distance doubles, and its most steps
BESIDE = 3  # steps that one process repeats


def sample(tokens: int, step: int, batch: int) -> tuple[Tensor, Tensor]:
    """(ids, targets), each (B, tokens), the same on all ranks; answers alone have targets."""
    draw = torch.Generator().manual_seed(step)
    key = torch.arange(0, KEYS, LETTERS) + torch.randint(LETTERS, (batch, PLACES), generator=draw)
    ids = torch.randint(KEYS + PLACES, VOCAB, (batch, tokens), generator=draw)
    ids[:, :PLACES] = key.gather(1, torch.rand(batch, PLACES, generator=draw).argsort(1))
    ids[:, -PLACES:] = KEYS + torch.arange(PLACES)
    return ids, torch.cat([torch.full((batch, tokens - PLACES), IGNORE), key], 1)


def loss_of(model: GPT, forward: torch.nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """The sum over this rank's answers, by the number of all."""
    total, _ = model.loss(forward(model.sequence.part(ids)), model.sequence.part(targets))
    return total / (targets != IGNORE).sum()


def learn(tokens: int, group: dist.ProcessGroup) -> tuple[GPT, list[float]]:
    """A model and its losses. group: the ranks that share each sequence."""
    # in zigzag order, the default, both ends would be on one rank, and no answer crossed over
    is_alone = group.size() == 1
    sequence = WholeSequence() if is_alone else ContextSequence(group, order="contiguous")
    shape = GPTShape(1, 64, 2, VOCAB, tokens, tied=False, rope=Rope(theta=THETA))
    model = GPT(shape, group=tpc.get_group("tensor"), sequence=sequence)
    initialize(model, model.layouts(), tpc.topology.dense, tpc.rank, seed=0)
    # gradients are summed over the ranks that hold parts of a sequence, as over those of data
    forward = model if is_alone else NaiveDDP(model, reduce_op="sum")
    optimizer = torch.optim.AdamW(model.parameters())
    losses, begin, distance = [], time.monotonic(), min(64, tokens)
    while distance <= tokens:
        # few long samples fit into a step, so that its gradient is noisier
        optimizer.param_groups[0]["lr"] = 3e-3 if distance < 2048 else 1e-3
        for _ in range(AT_MOST):
            optimizer.zero_grad()
            loss = loss_of(model, forward, *sample(distance, len(losses), max(1024 // distance, 1)))
            loss.backward()
            optimizer.step()
            losses.append(float(collectives.reduce(loss.detach(), group)))
            if is_alone and len(losses) == BESIDE:
                return model, losses
            if losses[-1] < LEARNED:
                break
        if tpc.rank == 0:
            spent_s = time.monotonic() - begin
            print(f"{distance} tokens, step {len(losses)}, {spent_s:.1f} s: loss {losses[-1]:.4f}")
        distance *= 2
    return model, losses


def train(tokens: int) -> None:
    tpc.setup_process_groups([("context", setup_distributed()[1])])
    group, unseen = tpc.get_group("context"), sample(tokens, -1, 4)
    model, losses = learn(tokens, group)
    with torch.no_grad():
        together = float(collectives.reduce(loss_of(model, model, *unseen), group))
    if tpc.rank == 0:
        alone, first = learn(tokens, tpc.get_group("tensor"))
        gap = max(abs(a - b) for a, b in zip(first, losses, strict=False))
        print(f"one process, {BESIDE} steps: loss {first[-1]:.6f}, at most {gap:.1e} apart")
        alone.load_state_dict(model.state_dict())
        with torch.no_grad():
            loss, told = loss_of(alone, alone, *unseen), alone(unseen[0]).argmax(-1).t()
        right = (told == unseen[1])[unseen[1] != IGNORE]
        print(f"unseen samples: loss {together:.6f}, one process {loss:.6f}")
        print(f"copied {right.sum()} of {len(right)} from {tokens - 2 * PLACES} tokens back")
    tpc.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the longest sample")
    run_or_launch(train, parser.parse_args().tokens, num_procs=2)
