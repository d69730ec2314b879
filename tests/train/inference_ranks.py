"""The ranks of `tdp generate` and `tdp eval` in tests: those of the pool, which have joined."""

import sys
from collections.abc import Callable, Sequence
from contextlib import chdir
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from torchdistpackage.config.schema import RunConfig
from torchdistpackage.train.build import build_model
from torchdistpackage.train.generate import generate
from torchdistpackage.train.inference import Answer, load_weights, perform
from torchdistpackage.train.inference_request import (
    EvalRequest,
    GenerateRequest,
    Sampling,
    TrainedWeights,
)
from torchdistpackage.train.plan import make_plan

CPU = torch.device("cpu")


def answer(
    folder: str, config: RunConfig, weights: TrainedWeights, request: GenerateRequest | EvalRequest
) -> tuple[Answer, str]:
    """What a rank answers, and what it writes. folder: where it is called, as paths may say."""
    written: list[str] = []
    with chdir(folder):
        plan = make_plan(config, dist.get_world_size())
        found = perform(plan, dist.get_rank(), CPU, weights, request, written.append)
    return found, "".join(written)


def run_in(ranks) -> Callable[..., list[Answer]]:
    """`run_local` with the ranks of the pool; rank 0 writes here."""

    def run_local(_: str, args: Sequence[object], *, num_procs: int, preload: object):
        found = ranks(num_procs).run(answer, str(Path.cwd()), *args)
        assert all(not text for _, text in found[1:])
        sys.stdout.write(found[0][1])
        return [told for told, _ in found]

    return run_local


def tokens(
    config: RunConfig,
    weights: TrainedWeights,
    prompt: Sequence[int],
    how: Sampling,
    window: int,
    number: int,
) -> list[int]:
    """What follows `prompt` on this rank."""
    model = build_model(make_plan(config, dist.get_world_size()), dist.get_rank(), CPU)
    load_weights(model, weights)
    return list(islice(generate(model, prompt, how, window, None), number))
