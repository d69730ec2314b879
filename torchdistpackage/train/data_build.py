"""Build the objects of the data section: the data that is read, and the source that draws
samples.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.config.data_section import DataSection
from torchdistpackage.config.head_of_run import padding_of
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data import corpus
from torchdistpackage.data.blend import BlendedDataset, BlendPart
from torchdistpackage.data.embedding_data import EmbeddingDataset, cut_texts
from torchdistpackage.data.labelled_data import LabelledDataset, RewardDataset
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.preference_data import PreferenceDataset
from torchdistpackage.data.source import (
    DataSource,
    SequenceSource,
    Split,
    TokenDataset,
    check_place,
)
from torchdistpackage.data.streaming import PackingOptions, StreamedDataset
from torchdistpackage.data.tokens.pair_rows import cut_pairs
from torchdistpackage.data.tokens.row_notes import row_notes
from torchdistpackage.data.tokens.template_date import dated
from torchdistpackage.data.tokens.texts import text_source, token_cache_folder, tokenized_part
from torchdistpackage.data.tokens.token_cache import cut_documents
from torchdistpackage.data.tokens.unpaired_rows import cut_answers
from torchdistpackage.data.unpaired_data import UnpairedDataset
from torchdistpackage.errors import DataError
from torchdistpackage.launch.entrypoint import user_object
from torchdistpackage.lazy import resolve
from torchdistpackage.models.registry import spec_of
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.train.evaluation import (
    DocumentWindows,
    TokenWindows,
    Windows,
    batches_of,
)
from torchdistpackage.train.step import EvalSet


def build_data(plan: Plan) -> DataSource:
    """Return the source of batches that the data section describes."""
    section = plan.config.data
    if section.target is not None:
        source = user_object(section.target)(**section.args)
        if not isinstance(source, DataSource):
            raise DataError(
                f"data.target {section.target} returned a {type(source).__name__} without a "
                "batch(...) method; give it one, as torchdistpackage/data/source.py says of "
                "DataSource"
            )
        return source
    train = _training(plan)
    if section.val_part is None:
        return train
    return SeparateValidation(train, _read(plan.config, section.val_part))


class SeparateValidation:
    """Two sources: one for training, and one that only validations read."""

    def __init__(self, train: SequenceSource, val: SequenceSource):
        self.train, self.val, self.seq_len = train, val, train.seq_len

    def part(self, ranges: Sequence[range]) -> "SeparateValidation":
        """See `SequenceSource`."""
        return SeparateValidation(self.train.part(ranges), self.val.part(ranges))

    def batch(
        self,
        split: Split,
        seed: int,
        step: int,
        data_index: int,
        num_data: int,
        per_rank: int,
        *,
        first: int = 0,
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """See `DataSource.batch`."""
        check_place(split, data_index, num_data)
        source = self.train if split == "train" else self.val
        return source.batch(split, seed, step, data_index, num_data, per_rank, first=first)


def agreed_date(config: RunConfig) -> RunConfig:
    """Return the run with rank 0's data.template_date, after the ranks have joined; starts around
    midnight could differ."""
    if config.data.tokenizer is None:
        return config
    local_date = config.data.template_date
    day = primitives.broadcast_object(local_date)
    return config if day == local_date else dated(config, str(day))


def with_steps(config: RunConfig) -> RunConfig:
    """Return the configuration with the number of steps that train.epochs passes over all sources
    take; the last step is full.

    Raises:
        DataError: the data cannot be read.
    """
    if config.train.epochs is None:
        return config
    sizes = (_num_samples(_read(config, x)) or 0 for x in config.data.parts.values())
    per_step = config.data.global_batch * config.data.rows_per_sample
    steps = math.ceil(config.train.epochs * sum(sizes) / per_step)
    train = config.train.model_copy(update={"steps": max(steps, 1), "epochs": None})
    return config.model_copy(update={"train": train})


def blend_of(data: DataSource) -> BlendedDataset | None:
    """Return the mixer of the sources that a run trains on, or None if it has a single source."""
    data = data.train if isinstance(data, SeparateValidation) else data
    return data if isinstance(data, BlendedDataset) else None


def build_eval_sets(
    plan: Plan, index: int, ranges: Callable[[int], Sequence[range]] | None
) -> list[EvalSet]:
    """Return the sets of data.eval for the ranks at `index` along data.

    Each window is read once, for at most as many batches as a validation has. ranges: slices of a
    sequence's positions to read; None: all.
    """
    config, num_data = plan.config, plan.topology.dense.axis_size("data")
    per_rank = plan.schedule.num_microbatches * plan.samples_per_microbatch
    eval_sets: list[EvalSet] = []
    for name, section in config.data.eval_parts.items():
        windows = read_windows(config, section, True)
        windows = windows if ranges is None else windows.part(ranges(windows.seq_len))
        number = -(-windows.number // (num_data * per_rank))
        most = config.train.eval_batches * config.train.accumulate
        batch = batches_of(windows, index, num_data, per_rank)
        eval_sets.append(EvalSet(name, min(number, most), batch))
    return eval_sets


def _training(plan: Plan) -> SequenceSource:
    section = plan.config.data
    if not section.sources:
        (part,) = section.parts.values()
        return _read(plan.config, part)
    parts: list[BlendPart] = []
    for key, (label, weight, part) in zip(section.parts, section.blend, strict=True):
        try:
            data = _read(plan.config, part)
        except DataError as error:
            raise DataError(f"{key} {part.path}: {error}") from error
        parts.append(BlendPart(label, weight, data, _num_samples(data)))
    return BlendedDataset(parts, section.global_batch, section.rows_per_sample)


def _num_samples(
    data: TokenDataset | PackedDataset | PreferenceDataset | StreamedDataset,
) -> int | None:
    """Return the samples of an epoch; None for streamed texts, where the number is unknown."""
    return None if data.num_samples is None else data.num_samples["train"]


def notes_of(data: DataSource) -> list[str]:
    """Return notes on truncated documents and on how rows were read."""
    if isinstance(data, SeparateValidation):
        return notes_of(data.train)
    if isinstance(data, BlendedDataset):
        return [f"{part.label}: {note}" for part in data.parts for note in notes_of(part.data)]
    if isinstance(data, EmbeddingDataset | LabelledDataset):
        return [*filter(None, (cut_texts(data.text, data.seq_len),)), *row_notes(data.text.tally)]
    if isinstance(data, PreferenceDataset):
        cut = cut_answers if isinstance(data, UnpairedDataset) else cut_pairs
        return [*filter(None, (cut(data.text, data.seq_len),)), *row_notes(data.text.tally)]
    if not isinstance(data, PackedDataset):
        return []
    notes = filter(None, (data.split.note, cut_documents(data.text, data.seq_len)))
    return [*notes, *row_notes(data.text.tally)]


def _rows(config: RunConfig, section: DataSection, val_fraction: float) -> PreferenceDataset:
    """Return the dataset of answers, of texts to compare, or of rows with labels."""
    model = spec_of(config) if section.head is not None or section.is_embedding else None
    masks_padding = model is not None and model.masks_padding()
    if (head := section.head) is not None:
        make = RewardDataset if head.is_pairs else LabelledDataset
        return make(
            tokenized_part(config, section),
            vocab=config.model.vocab,
            seq_len=section.seq_len,
            global_batch=section.global_batch,
            val_fraction=val_fraction,
            masks_padding=masks_padding,
            padding=padding_of(config),
            of_tokens=head.is_of_tokens,
        )
    dataset = UnpairedDataset if section.is_unpaired else PreferenceDataset
    if section.is_embedding:
        dataset = EmbeddingDataset
    return dataset(
        tokenized_part(config, section),
        vocab=config.model.vocab,
        seq_len=section.seq_len,
        global_batch=section.global_batch,
        val_fraction=val_fraction,
        masks_padding=masks_padding,
    )


def _read(
    config: RunConfig, section: DataSection
) -> TokenDataset | PackedDataset | PreferenceDataset | StreamedDataset:
    """Return the dataset of a file or folder, or the built-in one named by data.name."""
    if section.spec is not None and section.spec.task:
        return _rows(config, section, section.val_fraction)
    if section.tokenizer is not None and section.streaming:
        options = PackingOptions(
            config.model.vocab,
            section.seq_len,
            section.global_batch,
            section.document_masks,
            section.packing,
        )
        return StreamedDataset(text_source(config, section), token_cache_folder(config), options)
    if section.tokenizer is not None:
        return PackedDataset(
            tokenized_part(config, section),
            vocab=config.model.vocab,
            seq_len=section.seq_len,
            global_batch=section.global_batch,
            val_fraction=section.val_fraction,
            document_masks=section.document_masks,
            packing=section.packing,
        )
    parts = read_corpus(section, section.val_fraction % 1)
    only_val = section.val_fraction == 1
    data = TokenDataset(
        parts.train,
        parts.train if only_val else parts.val,
        config.model.vocab,
        section.seq_len,
        num_val=config.train.eval_batches * section.global_batch,
        global_batch=section.global_batch,
    )
    if section.val_fraction:
        data.check_length("val")  # now, and not in the first validation
    return data


def read_windows(config: RunConfig, section: DataSection, all_data: bool) -> Windows:
    """Return the rows that an evaluation reads of a split: all of it, or only the validation
    part.
    """
    vocab = config.model.vocab
    if section.spec is not None and section.spec.task:
        return DocumentWindows(_rows(config, section, 1.0 if all_data else section.val_fraction))
    if section.tokenizer is not None:
        packed = PackedDataset(
            tokenized_part(config, section),
            vocab=vocab,
            seq_len=section.seq_len,
            global_batch=section.global_batch,
            val_fraction=1.0 if all_data else section.val_fraction,
            document_masks=section.document_masks,
            packing=section.packing,
        )
        return DocumentWindows(packed)
    parts = read_corpus(section, 0.0 if all_data else section.val_fraction)
    return TokenWindows(parts.train if all_data else parts.val, vocab, section.seq_len)


def read_corpus(section: DataSection, val_fraction: float) -> corpus.Corpus:
    """Return the token ids of a data section without a tokenizer or target."""
    spec = section.spec
    assert spec is not None and spec.ids
    names = ("path", *spec.keys) if spec.path else spec.keys
    return resolve(spec.ids)(val_fraction=val_fraction, **{x: getattr(section, x) for x in names})
