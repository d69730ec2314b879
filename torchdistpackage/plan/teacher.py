"""The run of a teacher beside the model that is distilled from it, and its tokenizer. No torch."""

from pathlib import Path

from torchdistpackage.config.errors import Problem
from torchdistpackage.config.hugging_face import token_ids, tokenizer_file
from torchdistpackage.config.model_section import ModelSection
from torchdistpackage.config.optim_section import OptimSection
from torchdistpackage.config.schema import CheckpointSection, RunConfig, TrainSection
from torchdistpackage.errors import DataError

_SHOWN = 3


def teacher_config(config: RunConfig) -> RunConfig:
    """Return the run that has the teacher as its model, on the same ranks.

    Its stages are cut by its own costs, as measured costs are those of the model. More tensor ranks
    than the model has are data ranks of the model.
    """
    partition = "cost" if config.pipeline.partition == "time" else config.pipeline.partition
    pipeline = config.pipeline.model_copy(update={"costs": None, "partition": partition})
    precision = config.precision.model_copy(update={"fp8": "off"})
    parallel = config.parallel
    if (tensor := config.train.distill.teacher_tensor) is not None:
        data = parallel.data
        data = data if data == "auto" else data * parallel.tensor // tensor
        # sums of gradients, of which a frozen model has none, are over groups of the model's data
        changes = {"tensor": tensor, "data": data, "zero": 0, "zero_group": None}
        if parallel.tensor == 1:  # then tensor ranks of the teacher are data ranks alone
            order = [axis for axis in parallel.order if axis != "tensor"]
            changes["order"] = tuple(
                x for axis in order for x in ((axis, "tensor") if axis == "data" else (axis,))
            )
        parallel = parallel.model_copy(update=changes)
    return config.model_copy(
        update={
            "model": ModelSection(
                name=None, hf=config.train.distill.teacher, vocab=config.model.vocab
            ),
            "train": TrainSection(accumulate=config.train.accumulate),
            "checkpoint": CheckpointSection(),
            "optim": OptimSection(),
            "pipeline": pipeline,
            "precision": precision,
            "parallel": parallel,
        }
    )


def other_tokenizer(config: RunConfig) -> list[Problem]:
    """Return the problem with a teacher whose folder has another tokenizer than the data, or []."""
    folder, data_tokenizer = config.train.distill.teacher, config.data.tokenizer
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        return []
    try:
        text = _difference(Path(folder), data_tokenizer, has_bytes=config.data.has_bytes)
    except DataError as error:
        text = str(error)
    return [config.problem("train.distill.teacher", text)] if text else []


def _difference(folder: Path, data_tokenizer: str | None, *, has_bytes: bool) -> str:
    if data_tokenizer is None:
        text = f"{folder} has a tokenizer, but the tokens of the data are bytes"
        return f"{text}; set data.tokenizer to {folder}" if has_bytes else ""
    files = [tokenizer_file(folder), tokenizer_file(Path(data_tokenizer))]
    if files[0].read_bytes() == files[1].read_bytes():
        return ""
    teacher, student = map(token_ids, files)
    differ = sorted(x for x in {*teacher, *student} if teacher.get(x) != student.get(x))
    if not differ:
        return ""
    shown = ", ".join(
        f"{x!r}: {teacher.get(x, 'none')} and {student.get(x, 'none')}" for x in differ[:_SHOWN]
    )
    return (
        f"{folder} has another tokenizer than data.tokenizer {data_tokenizer}: {len(differ)} of "
        f"{len({*teacher, *student})} tokens have other ids ({shown}); name a teacher with the "
        f"tokenizer of the model"
    )
