"""Show the samples of a training step as text, for `tdp data show`; starts no rank."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from torchdistpackage.config.head_of_run import head_of
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.sample_text import (
    COLOURED,
    PLAIN,
    SampleCounts,
    SampleRow,
    row_text,
    sample_rows,
)
from torchdistpackage.data.source import IGNORE, DataBatch, DataSource
from torchdistpackage.data.tokens.labelled_rows import label_text
from torchdistpackage.data.tokens.prompts import ByteCodec, TokenCodec, TokenizerCodec
from torchdistpackage.data.unpaired_data import without_label
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.plan.user_code import add_user_code
from torchdistpackage.text import text_table
from torchdistpackage.train.data_build import blend_of, build_data

_ROWS_AT_ONCE = 64


def show_samples(
    config: RunConfig, origin: str, step: int, number: int, *, coloured: bool
) -> Iterator[str]:
    """Yield lines: the first `number` samples of a step, and the counts of all its samples.

    Raises:
        ConfigError: the run has no plan.
        DataError: the data cannot be read.
    """
    add_user_code(os.environ)
    plan = make_plan(config, local_procs(config), origin)
    # samples are the same with masks, and then say where their documents begin
    masked = config.data.model_copy(update={"document_masks": True})
    data = build_data(replace(plan, config=config.model_copy(update={"data": masked})))
    marks = COLOURED if coloured else PLAIN
    codec = _codec(config)
    per_sample = config.data.rows_per_sample
    sides = [name and f", {name}" for name in config.data.row_names]
    head = head_of(config)
    named = str if head is None else partial(label_text, head=head)
    shares = SampleCounts()
    sources = _sources(config, data, step)
    for index, row in enumerate(_rows(config, data, step)):
        sample, side = divmod(index, per_sample)
        shares.add(sources[sample], row)
        if sample < number:
            heading = f"sample {sample} of step {step}, {sources[sample]}{sides[side]}"
            yield f"{heading}: {row.summary}".join(marks.heading)
            yield from row_text(row, codec, marks, named)
            yield ""
    yield text_table(shares.rows(per_sample), num_left=1)
    spec, has_tokenizer = config.data.spec, config.data.tokenizer is not None
    is_packed = has_tokenizer and (spec is None or not spec.task)  # else a sample has one text
    is_packed &= config.data.packing != "none"
    if is_packed and not config.data.document_masks:
        yield (
            "tokens attend to earlier documents of their sample (data.document_masks keeps them "
            "apart)"
        )


def _rows(config: RunConfig, data: DataSource, step: int) -> Iterator[SampleRow]:
    total = config.data.global_batch * config.data.rows_per_sample
    at_once = _ROWS_AT_ONCE if config.data.target is None else total
    for first in range(0, total, at_once):
        num_rows = min(at_once, total - first)
        batch = DataBatch(*data.batch("train", config.run.seed, step, 0, 1, num_rows, first=first))
        if config.data.is_unpaired:
            batch = batch._replace(targets=without_label(batch.targets)[0])
        elif config.data.is_embedding:  # their targets say which text a row is
            batch = batch._replace(targets=torch.full_like(batch.targets, IGNORE))
        if config.data.spec is not None and config.data.spec.task:
            batch = batch._replace(position_ids=None)  # a row is one document
        yield from sample_rows(batch)


def _sources(config: RunConfig, data: DataSource, step: int) -> list[str]:
    """Return the name of the source of each sample of a step."""
    blend = blend_of(data)
    if blend is not None:
        return blend.sources(config.run.seed, step)
    section = config.data
    name = section.target or (Path(section.path).name if section.path else section.name)
    return [name or ""] * section.global_batch


def _codec(config: RunConfig) -> TokenCodec | None:
    if config.data.tokenizer is not None:
        return TokenizerCodec(config.data.tokenizer)
    return ByteCodec() if config.data.has_bytes else None
