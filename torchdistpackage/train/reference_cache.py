"""The log-probabilities of the reference as a file. ¶ `tdp reference` writes it once, on any
layout, and later runs read it and hold no reference.

The file has a number for each row, by the number of its document: train and, with data.val_path,
val. So it serves any order of the samples, any batches, and any layout.
"""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.data.preference_data import PreferenceDataset
from torchdistpackage.data.source import DataBatch, DataSource, Split
from torchdistpackage.errors import DataError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.plan.reference_file import HEADER
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.train.data_build import SeparateValidation
from torchdistpackage.train.evaluation import batches_of
from torchdistpackage.train.preference import row_log_probs
from torchdistpackage.train.staged_model import StagedModel

_TRAIN, _VAL = "train", "val"


class EveryRow:
    """All rows of pairs, in document order; see `Windows`."""

    def __init__(self, data: PreferenceDataset):
        self.number, self.seq_len, self._data = len(data.text.ends), data.seq_len, data

    def part(self, ranges: Sequence[range]) -> "EveryRow":
        return EveryRow(self._data.part(ranges))

    def read(self, first: int, number: int) -> DataBatch:
        return DataBatch(*self._data.rows(range(first, first + number)))


def datasets_of(source: DataSource) -> dict[str, PreferenceDataset]:
    """Return the pairs of a run by their names in the file."""
    train = source.train if isinstance(source, SeparateValidation) else source
    val = source.val if isinstance(source, SeparateValidation) else None
    assert isinstance(train, PreferenceDataset)
    # copies, as a thread may be asking the run's own for batches
    return {_TRAIN: copy(train)} | ({_VAL: copy(val)} if isinstance(val, PreferenceDataset) else {})


def log_probs_of(model: StagedModel, data: PreferenceDataset, timeout_s: float | None) -> Tensor:
    """Return the log-probability of each row (N,) in float64, equal on all ranks, which call it
    together.

    The model is left in evaluation mode.
    """
    plan, context = model.plan, tpc.get_group("context")
    num_data, index = plan.topology.dense.axis_size("data"), tpc.get_dp_rank()
    number = plan.schedule.num_microbatches
    size = plan.samples_per_microbatch
    executor = Executor(
        evaluation(plan.schedule, number), tpc.get_group("pipe"), device=model.device,
        timeout_s=timeout_s,
    )  # fmt: skip
    windows = EveryRow(data)
    total, per_rank = windows.number, number * size
    batch = batches_of(windows.part(model.sequence.ranges(data.seq_len)), index, num_data, per_rank)
    rows_dim = getattr(next(iter(model.stage.children())), "rows_dim", 0)
    log_probs = torch.zeros(total, dtype=torch.float64, device=model.device)
    model.stage.eval()
    for b in range(-(-total // (num_data * per_rank))):
        inputs, targets, positions = model.microbatches(batch(b))
        first = (b * num_data + index) * per_rank

        def keep(
            outputs: Tensor, targets: Tensor, m: int, first: int = first
        ) -> tuple[Tensor, Tensor]:
            sums, _ = row_log_probs(model.loss, outputs, targets, context, rows_dim)
            if model.tells_loss and context.rank() == 0:
                begin = min(first + m * size, total)
                end = min(begin + size, total)
                log_probs[begin:end] = sums[: end - begin].detach().to(log_probs)
            return sums.sum(), sums.new_zeros(())

        unused = totals_on(model.device)
        executor.run(
            model.forward_and_loss(executor, inputs, targets, unused, positions, loss=keep)
        )
    return primitives.all_reduce(log_probs, tpc.get_group("global"))


def write_reference(
    model: StagedModel,
    source: DataSource,
    path: Path,
    header: Mapping[str, str],
    timeout_s: float | None,
) -> dict[str, int]:
    """Write the file, on rank 0, with a header of `identity`; return the rows of its tensors."""
    log_probs = {n: log_probs_of(model, x, timeout_s) for n, x in datasets_of(source).items()}
    if model.rank == 0:
        metadata = {HEADER: json.dumps(dict(header))}
        temporary = path.with_name(f".{path.name}.part")
        save_file({name: x.cpu() for name, x in log_probs.items()}, temporary, metadata=metadata)
        temporary.replace(path)
    return {name: len(x) for name, x in log_probs.items()}


class CachedReference:
    """The log-probabilities in a file, for the rows of this rank at `data_index` of `num_data`.

    per_round: rows of the rank in a round. per_microbatch: rows of a microbatch.

    Raises:
        DataError: the file has another number of rows than the data.
    """

    def __init__(
        self,
        path: Path,
        source: DataSource,
        device: torch.device,
        *,
        seed: int,
        data_index: int,
        num_data: int,
        per_round: int,
        per_microbatch: int,
    ):
        self._datasets, self._device, self._seed = datasets_of(source), device, seed
        self._data_index, self._num_data = data_index, num_data
        self._per_round, self._per_microbatch = per_round, per_microbatch
        self._log_probs: Mapping[str, Tensor] = load_file(path)
        for name, data in self._datasets.items():
            number = len(self._log_probs.get(name, ()))
            if number != len(data.text.ends):
                raise DataError(
                    f"train.dpo.reference {path} has {number:,} rows of {name}, but the data has "
                    f"{len(data.text.ends):,}; write it anew with tdp reference"
                )

    def of_round(self, split: Split, step: int, index: int) -> dict[int, Tensor]:
        """Return, by micro-batch, the log-probabilities (N,) of its rows, in float64. step, index:
        as in `Batches`.
        """
        name = split if split in self._datasets else _TRAIN
        documents = self._datasets[name].documents(
            split,
            self._seed,
            step,
            self._data_index,
            self._per_round,
            first=index * self._num_data * self._per_round,
        )
        values = self._log_probs[name][torch.tensor(documents)].to(self._device)
        return dict(enumerate(values.split(self._per_microbatch)))
