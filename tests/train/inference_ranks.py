"""The ranks of `tdp generate` and `tdp eval` in tests: those of the pool, which have joined."""

import sys
from collections.abc import Callable, Sequence
from contextlib import chdir, nullcontext
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.transformers_ranks import everywhere_float64
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_model
from torchdistpackage.train.generate import generate, generate_batch
from torchdistpackage.train.inference import Answer, load_weights, perform
from torchdistpackage.train.inference_request import (
    Request,
    Sampling,
    TrainedWeights,
)
from torchdistpackage.train.row_scores import RowScore, ScoredRow, score_rows

CPU = torch.device("cpu")


def answer(
    folder: str, wide: bool, config: RunConfig, weights: TrainedWeights, request: Request
) -> tuple[Answer, str]:
    """What a rank answers, and what it writes. folder: where it is called, as paths may say. wide:
    transformers' modules compute in float64 throughout."""
    written: list[str] = []
    with chdir(folder), everywhere_float64() if wide else nullcontext():
        plan = make_plan(config, dist.get_world_size())
        found = perform(plan, dist.get_rank(), CPU, weights, request, written.append)
    return found, "".join(written)


def run_in(ranks, wide: bool = False) -> Callable[..., list[Answer]]:
    """`run_local` with the ranks of the pool; rank 0 writes here. wide: see `answer`."""

    def run_local(_: str, args: Sequence[object], *, num_procs: int, preload: object):
        found = ranks(num_procs).run(answer, str(Path.cwd()), wide, *args)
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


def row_scores(
    config: RunConfig, weights: TrainedWeights, rows: Sequence[ScoredRow], batch: int
) -> list[RowScore]:
    """The scores of rows on this rank."""
    model = build_model(make_plan(config, dist.get_world_size()), dist.get_rank(), CPU)
    load_weights(model, weights)
    return score_rows(model, rows, batch, None)


def batch_tokens(
    config: RunConfig,
    weights: TrainedWeights,
    prompts: Sequence[Sequence[int]],
    number: int,
    use_cache: bool,
) -> tuple[list[list[int]], list[int]]:
    """What follows each prompt on this rank, and the columns of each forward of a stage here."""
    model = build_model(make_plan(config, dist.get_world_size()), dist.get_rank(), CPU)
    load_weights(model, weights)
    columns: list[int] = []
    forward = model.forward

    def counted(stage: int, x: torch.Tensor) -> torch.Tensor:
        # activations of our GPT are (S, B, D)
        is_turned = x.is_floating_point() and config.model.hf is None
        columns.append(x.shape[0 if is_turned else 1])
        return forward(stage, x)

    model.forward = counted
    window = model.plan.shape.num_positions
    found = generate_batch(model, prompts, Sampling(), window, None, use_cache=use_cache)
    told = list(islice(found, number))
    return [list(row) for row in zip(*told, strict=True)], columns
