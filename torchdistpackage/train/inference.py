"""The ranks of `tdp generate` and `tdp eval`, from joining to their answer."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from torchdistpackage.checkpoint.load import latest_together, load
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.checkpoint.save import fail_together
from torchdistpackage.comm.creation import end_processes
from torchdistpackage.comm.runtime import join, leave
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.source import DataBatch
from torchdistpackage.data.tokens.prompts import ByteCodec, GrowingText, TokenizerCodec
from torchdistpackage.environment.failure import only_returns
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import CheckpointError, DataError, NonFiniteError
from torchdistpackage.plan.reference_file import identity
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.user_code import add_user_code
from torchdistpackage.run_files import CHECKPOINTS
from torchdistpackage.train.build import build_model, build_task, start_timeout_s
from torchdistpackage.train.data_build import agreed_date, build_data, read_windows
from torchdistpackage.train.evaluation import (
    Evaluated,
    JoinedWindows,
    Windows,
    batches_of,
    evaluate,
)
from torchdistpackage.train.generate import generate_batch
from torchdistpackage.train.harness_calls import run_harness
from torchdistpackage.train.inference_request import (
    EvalRequest,
    EvalResult,
    GenerateRequest,
    HarnessRequest,
    HarnessResult,
    LogitsRequest,
    RankRefusal,
    ReferenceRequest,
    Request,
    TrainedWeights,
)
from torchdistpackage.train.logits_file import write_logits
from torchdistpackage.train.reference_cache import write_reference
from torchdistpackage.train.staged_model import StagedModel
from torchdistpackage.train.weight_averages import average_name

Answer = EvalResult | HarnessResult | dict[str, int] | RankRefusal | None
"""Answer to a request; None for texts, which have already been written."""
Write = Callable[[str], object]


def rank_main(config: RunConfig, weights: TrainedWeights, request: Request) -> Answer:
    """Join the other ranks, answer the request, and leave; rank 0 writes texts as they come."""
    with only_returns():
        return _joined_answer(config, weights, request)


def _joined_answer(config: RunConfig, weights: TrainedWeights, request: Request) -> Answer:
    rendezvous = detect(os.environ)
    if "OMP_NUM_THREADS" not in os.environ and rendezvous.world_size > 1:
        torch.set_num_threads(1)  # the ranks of a node would otherwise each take all its cores
    add_user_code(os.environ)
    end_processes()
    joined = join(
        rendezvous,
        init_timeout_s=config.launch.init_timeout_s,
        same_versions=config.launch.same_versions,
        share_gpus=config.launch.share_gpus,
    )
    plan = make_plan(agreed_date(config), rendezvous.world_size)
    answer = perform(plan, rendezvous.rank, joined.device, weights, request, _write)
    leave()
    return answer


def perform(
    plan: Plan,
    rank: int,
    device: torch.device,
    weights: TrainedWeights,
    request: Request,
    write: Write,
) -> Answer:
    """Answer the request on ranks that have joined. write: called on rank 0."""
    try:
        model = build_model(plan, rank, device)
        step = load_weights(model, weights)
        tpc.groups.set_timeout(plan.config.train.step_timeout_s)
        if isinstance(request, EvalRequest):
            return _evaluated(model, request, step)
        if isinstance(request, ReferenceRequest):
            source, timeout_s = build_data(plan), start_timeout_s(plan.config)
            path, header = Path(request.path), identity(plan.config)
            return write_reference(model, source, path, header, timeout_s)
        if isinstance(request, LogitsRequest):
            path, timeout_s = Path(request.path), start_timeout_s(plan.config)
            seed, batch = plan.config.run.seed, plan.config.data.global_batch
            return write_logits(
                model, build_data(plan), path, request.header, request.size, timeout_s,
                seed=seed, global_batch=batch,
            )  # fmt: skip
        if isinstance(request, HarnessRequest):
            return run_harness(model, request, step, start_timeout_s(plan.config))
        write_texts(model, request, write if rank == 0 else _ignore)
    except (CheckpointError, DataError, NonFiniteError) as error:  # each on all ranks
        return RankRefusal(str(error))
    return None


def write_texts(model: StagedModel, request: GenerateRequest, write: Write) -> None:
    """Write each prompt and its continuation, in order; the first of a batch token by token."""
    for first in range(0, len(request.prompts), request.batch):
        _write_batch(model, request, first, write)


def _write_batch(model: StagedModel, request: GenerateRequest, first: int, write: Write) -> None:
    path, total = request.tokenizer, len(request.texts)
    codec = ByteCodec() if path is None else TokenizerCodec(path)
    chosen = slice(first, first + request.batch)
    prompts = request.prompts[chosen]
    heads = [f"[{first + row}/{total}] " if total > 1 else "" for row in range(1, len(prompts) + 1)]
    pending = [head + text for head, text in zip(heads, request.texts[chosen], strict=True)]
    growing = [GrowingText(codec, prompt) for prompt in prompts]
    ended, shown = [False] * len(prompts), 0
    tokens = generate_batch(
        model,
        prompts,
        request.sampling,
        request.window,
        start_timeout_s(model.plan.config),
        stops=request.stops,
    )
    write(pending[0])
    pending[0] = ""
    for new_tokens in islice(tokens, request.max_new_tokens):
        for row, token in enumerate(new_tokens):
            if not ended[row] and not (ended_now := token in request.stops):
                pending[row] += growing[row].add(token)
            elif not ended[row]:
                ended[row] = ended_now
                pending[row] += f"{growing[row].end()}\n"
        while shown < len(prompts):  # what was shown in part, and all that has ended behind it
            write(pending[shown])
            pending[shown] = ""
            if not ended[shown]:
                break
            shown += 1
    for row in range(shown, len(prompts)):
        write(pending[row] + ("" if ended[row] else f"{growing[row].end()}\n"))


def load_weights(model: StagedModel, weights: TrainedWeights) -> int | None:
    """Load weights and return the step of their checkpoint, or None if the model keeps its initial
    ones.
    """
    path = None if weights.checkpoint is None else Path(weights.checkpoint)
    if path is None and weights.run is not None:
        path = latest_together(Path(weights.run) / CHECKPOINTS, rank=model.rank)
        if path is None:
            raise CheckpointError(
                f"{weights.run} has no complete checkpoint; let it save one first"
            )
    if path is None:
        return None
    params = model.saved()
    if weights.averages:
        manifest = read_manifest(path)
        for name, (tensor, layout) in params.items():
            params[name] = tensor, layout.named(average_name(manifest, layout.name, path))
    loaded = load(
        path,
        params=params,
        topology=tpc.topology,
        rank=model.rank,
        with_extras=False,
        checksums=weights.checkpoint is not None,  # latest_together has read them
    )
    return loaded.step


def _evaluated(model: StagedModel, request: EvalRequest, step: int | None) -> EvalResult:
    config, topology = model.plan.config, model.plan.topology
    index, num_data = tpc.get_dp_rank(), topology.dense.axis_size("data")
    per_batch = config.data.global_batch * config.data.rows_per_sample
    per_rank = per_batch // num_data
    timeout_s = start_timeout_s(config)

    sequence = model.sequence
    # the reference of pairs is the model that the run began with, which is not here
    has_other = config.data.is_preference or model.plan.teacher is not None
    task = None if has_other else build_task(model)

    def result(evaluated: Evaluated, num_windows: int) -> EvalResult:
        loss = evaluated.total / evaluated.weight
        return EvalResult(
            loss, evaluated.num_counted, num_windows, step, values=dict(evaluated.values)
        )

    def of(windows: Windows) -> EvalResult:
        windows = windows.part(sequence.ranges(windows.seq_len))
        batch = batches_of(windows, index, num_data, per_rank)
        number = -(-windows.number // per_batch)
        return result(evaluate(model, batch, number, timeout_s, task), windows.number)

    sets: dict[str, Windows] = {}
    with fail_together(tpc.get_group("global"), "reading the data"):
        if config.data.target is not None:
            source, windows = build_data(model.plan), None
        else:
            source, windows = None, _windows(config, request)
            parts = {} if request.all_data else config.data.eval_parts
            sets = {name: read_windows(config, x, True) for name, x in parts.items()}
    if windows is not None:
        return replace(of(windows), sets={name: of(x) for name, x in sets.items()})
    assert source is not None

    def batch(b: int):
        rows = DataBatch(*source.batch("val", config.run.seed, b, index, num_data, per_rank))
        inputs, targets = map(sequence.part, rows[:2])
        return rows._replace(inputs=inputs, targets=targets)

    return result(evaluate(model, batch, config.train.eval_batches, timeout_s), 0)


def _windows(config: RunConfig, request: EvalRequest) -> Windows:
    data = config.data
    if data.val_part is not None and not request.all_data:
        return read_windows(config, data.val_part, True)
    parts = data.parts.values()
    return JoinedWindows([read_windows(config, part, request.all_data) for part in parts])


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough; the other ranks go on with this one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ignore(text: str) -> None: ...
