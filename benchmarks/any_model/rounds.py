"""One interleaved run: every side of a case generates and trains, taking turns."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.any_model.messages import alone, counted, sent_by
from benchmarks.any_model.models import CASES, Case, make, prompt, trained_on
from benchmarks.any_model.sides import ALONE, MESSAGES, OURS, SIDES, Side
from benchmarks.common import take_turns
from benchmarks.turns import Turn
from torchdistpackage.comm.runtime import leave, setup_distributed

TOLERANCE = 1e-5
"""Of logits, and of gradients of each parameter, relative to the largest of one process's."""
WORK = ("a token", "a step")
Work = dict[str, Callable[[], object]]
"""What a turn of each piece of work calls."""


def rank_main(name: str, sides: Sequence[str], rounds: int, folder: str) -> dict[str, Any]:
    """Of one rank: turns by work, side and round, and how far sides are from one process."""
    rank = setup_distributed()[0]
    case, place = CASES[name], Path(folder)
    if rank == 0:
        make(case).save_pretrained(place)
    dist.barrier()
    one = SIDES["one process"](case, place)
    expected = answers(case, one)
    running, distance = dict[str, Work](), dict[str, dict[str, float]]()
    for side in sides:
        if side in SIDES and (side not in ALONE or rank == 0):
            made = SIDES[side](case, place)
            distance[side] = distances(answers(case, made), expected)
            if max(distance[side].values()) > TOLERANCE:
                raise ValueError(f"{side}, {name}: {distance[side]} from one process")
            running[side] = work_of(case, made)
    sent = {work: sent_by(running[OURS][work]) for work in WORK}
    running[MESSAGES] = {work: alone(sent[work]) for work in WORK}
    close = {"a token": sides, "a step": ()}
    turns = {
        work: take_turns(sides, close[work], rounds, partial(turn, running, work)) for work in WORK
    }
    leave()
    return {
        "turns": turns,
        "distance": distance,
        "sent": {work: counted(sent[work]) for work in WORK},
        "parameters": sum(p.numel() for p in one.model.parameters()),
    }


def answers(case: Case, side: Side) -> dict[str, Any]:
    """Logits, generated tokens, and gradients by the names of the whole model."""
    model, ids = side.model, trained_on(case)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    tokens = generate(case, model)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():  # gradients take the place of weights, which a side can join
        parameters = [p for p in model.parameters() if p.requires_grad]
        weights = [p.detach().clone() for p in parameters]
        for p in parameters:
            assert p.grad is not None
            p.copy_(p.grad)
        gradients = {name: p.detach().clone() for name, p in side.whole().items()}
        for p, weight in zip(parameters, weights, strict=True):
            p.copy_(weight)
    model.zero_grad()
    return {"logits": logits, "tokens": tokens, "gradients": gradients}


def distances(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Of logits and of the gradient that is furthest off, relative; and how many tokens differ."""
    gradients, wanted = found["gradients"], expected["gradients"]
    missing = wanted.keys() - gradients.keys()
    if missing:
        raise ValueError(f"no gradients of {sorted(missing)}")
    return {
        "logits": far(found["logits"], expected["logits"]),
        "gradients": max(far(gradients[name], wanted[name]) for name in wanted),
        "tokens": float((found["tokens"] != expected["tokens"]).sum()),
    }


def far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def generate(case: Case, model: Any) -> Tensor:
    """Greedy, with a cache of keys and values."""
    ids = prompt(case)
    model.eval()
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=case.num_new,
        do_sample=False,
        pad_token_id=0,
    )
    model.train()
    return tokens


def work_of(case: Case, side: Side) -> Work:
    """What a side does in a turn, each done once already."""
    model, ids = side.model, trained_on(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return {"a token": partial(generate, case, model), "a step": step}


def turn(running: dict[str, Work], work: str, side: str) -> Turn:
    """From when all ranks are there; one without a part in it waits for the next turn."""
    dist.barrier()
    begin = time.monotonic()
    if side in running:
        running[side][work]()
    return begin, time.monotonic()
