"""The teacher's most likely tokens as a file. ¶ `tdp reference` writes it once, on any layout, and
later runs read it and hold no teacher.

Sample i of a step follows from the seed, the step and i alone (data/source.py), so the file has the
samples of the run in their order, step after step: `log_probs` (samples, tokens, k), and `ids` of
the same shape, int32. It serves every layout, also with other microbatches and rounds.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchdistpackage.checkpoint.tensor_file import TensorFile
from torchdistpackage.checkpoint.writer import make_header
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.schema import DistillSection
from torchdistpackage.data.source import DataBatch, DataSource, Split
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.parallel.tensor.divergence import (
    vocab_parallel_top_k,
    vocab_parallel_top_k_divergence,
)
from torchdistpackage.plan.logits_file import IDS, LOG_PROBS, LogitsSize
from torchdistpackage.plan.reference_file import HEADER
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.train.distillation import DistillLoss, DivergenceOf, LogitsOf
from torchdistpackage.train.staged_model import Microbatches, StagedModel


def write_logits(
    model: StagedModel,
    source: DataSource,
    path: Path,
    header: Mapping[str, str],
    size: LogitsSize,
    timeout_s: float | None,
    *,
    seed: int,
    global_batch: int,
) -> dict[str, int]:
    """Write the file on rank 0, batch by batch, with a header of `logits_identity`.

    model: the teacher, left in evaluation mode. seed, global_batch: of the run. All ranks call it
    together; each returns the number of samples by split.
    """
    plan = model.plan
    num_data, index = plan.topology.dense.axis_size("data"), tpc.get_dp_rank()
    per_round = plan.schedule.num_microbatches * plan.samples_per_microbatch
    shapes = {LOG_PROBS: (size.dtype, size.shape), IDS: ("int32", size.shape)}
    head = make_header(shapes, {HEADER: json.dumps(dict(header))})
    executor = Executor(
        evaluation(plan.schedule, plan.schedule.num_microbatches),
        tpc.get_group("pipe"),
        device=model.device,
        timeout_s=timeout_s,
    )
    logits_of = LogitsOf.last_stage(model.stage)
    temporary = path.with_name(f".{path.name}.part")
    if model.rank == 0:
        temporary.write_bytes(head)
    model.stage.eval()
    begin = 0
    for step in range(1, size.num_samples // global_batch + 1):
        for first in range(0, global_batch, num_data * per_round):
            rows = source.batch("train", seed, step, index, num_data, per_round, first=first)
            batch = model.microbatches(DataBatch(*rows), model.own_part)
            top_k = _top_k_of(
                model, executor, logits_of, batch, size, (num_data * per_round, index * per_round)
            )
            tensors = [primitives.all_reduce(x, tpc.get_group("global")) for x in top_k]
            if model.rank == 0:
                _write(temporary, len(head), begin, size, [x.cpu() for x in tensors])
            begin += num_data * per_round
    if model.rank == 0:
        temporary.replace(path)
    return {"train": size.num_samples}


def _top_k_of(
    model: StagedModel,
    executor: Executor,
    logits_of: LogitsOf,
    batch: Microbatches,
    size: LogitsSize,
    rows: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, ids) of a round's samples (N, S, k), 0 except for those of this
    rank.

    rows: (N, index of this rank's first row).
    """
    number, first_row = rows
    shape = (number, *size.shape[1:])
    ids = torch.zeros(shape, dtype=torch.int32, device=model.device)
    log_probs = torch.zeros(shape, dtype=getattr(torch, size.dtype), device=model.device)
    spans = model.sequence.ranges(size.seq_len)
    own_positions = torch.cat([torch.arange(x.start, x.stop) for x in spans]).to(model.device)
    assert model.plan.shape is not None
    vocab = model.plan.shape.vocab

    def keep(outputs: Tensor, targets: Tensor, m: int) -> tuple[Tensor, Tensor]:
        logits = logits_of.own_columns(outputs)
        values, tokens = vocab_parallel_top_k(logits, logits_of.group, size.k, vocab)
        if model.tells_loss:
            begin = first_row + m * len(values)
            at = slice(begin, begin + len(values))
            log_probs[at, own_positions], ids[at, own_positions] = (
                values.to(log_probs),
                tokens.to(ids),
            )
        return torch.zeros((), device=targets.device), torch.zeros((), device=targets.device)

    inputs, targets, positions = batch
    unused = totals_on(model.device)
    executor.run(model.forward_and_loss(executor, inputs, targets, unused, positions, loss=keep))
    return log_probs, ids


def _write(path: Path, head: int, begin: int, size: LogitsSize, tensors: list[Tensor]) -> None:
    """Write samples from number `begin` on into the two tensors of the file."""
    with path.open("r+b") as file:
        for tensor, (offset, row_bytes) in zip(tensors, size.spans, strict=True):
            file.seek(head + offset + begin * row_bytes)
            file.write(tensor.contiguous().numpy().tobytes())


class LogitsFileLoss(DistillLoss):
    """The loss relative to a file of the teacher's most likely tokens.

    model: the trained model. global_batch: samples of a step. The file was checked by
    `wrong_logits`.
    """

    def __init__(self, model: StagedModel, options: DistillSection, global_batch: int):
        super().__init__(model.device, options, LogitsOf.last_stage(model.stage))
        plan = model.plan
        assert plan.shape is not None and options.logits is not None
        self._vocab, self._model = plan.shape.vocab, model
        self._per_microbatch = plan.samples_per_microbatch
        self._per_round = plan.schedule.num_microbatches * plan.samples_per_microbatch
        self._num_data = plan.topology.dense.axis_size("data")
        self._global_batch, self._begin = global_batch, 0
        file = TensorFile(Path(options.logits))
        self._tensors = file[LOG_PROBS], file[IDS]

    def begin_round(self, split: Split, number: int, index: int) -> None:
        """See `TaskLoss`."""
        num_before = (number - 1) * self._global_batch + index * self._num_data * self._per_round
        self._begin = num_before + tpc.get_dp_rank() * self._per_round

    def divergence_of(self, batch: Microbatches) -> DivergenceOf:
        """Return the divergence of the samples of the round that began; see `DistillLoss`."""
        begin, model = self._begin, self._model

        def divergence(logits: Tensor, m: int) -> Tensor:
            first = begin + m * self._per_microbatch
            rows = slice(first, first + self._per_microbatch)
            # not in the type of the weights, which may be narrow
            log_probs, ids = (model.sequence.part(x[rows]).to(model.device) for x in self._tensors)
            return vocab_parallel_top_k_divergence(
                logits,
                log_probs,
                ids,
                self._logits_of.group,
                vocab=self._vocab,
                temperature=self._options.temperature,
            )

        return divergence
