"""The run of a teacher for the model that is distilled from it, and its tokenizer. No torch."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torchdistpackage.config.errors import Problem
from torchdistpackage.config.hugging_face import (
    read_config,
    stored_vocabulary,
    token_ids,
    tokenizer_file,
)
from torchdistpackage.config.model_section import ModelSection
from torchdistpackage.config.optim_section import OptimSection
from torchdistpackage.config.schema import (
    CheckpointSection,
    PipelineSection,
    RunConfig,
    TrainSection,
)
from torchdistpackage.errors import DataError
from torchdistpackage.topology.mesh import Mesh

_SHOWN = 3


def teacher_config(config: RunConfig) -> RunConfig:
    """Return the run that has the teacher as its model, on the same ranks.

    Its stages are cut by its own costs, because measured costs are those of the model. Tensor ranks
    beyond the model's are data ranks of the model.
    """
    partition = "cost" if config.pipeline.partition == "time" else config.pipeline.partition
    pipeline = config.pipeline.model_copy(update={"costs": None, "partition": partition})
    precision = config.precision.model_copy(update={"fp8": "off"})
    parallel, options = config.parallel, config.train.distill
    if options.has_own_degrees:
        data, tensor = parallel.data, options.teacher_tensor or parallel.tensor
        pipe = options.teacher_pipe or parallel.pipe
        if data != "auto":
            data = data * parallel.tensor * parallel.pipe // (tensor * pipe)
        # sums of gradients, of which a frozen model has none, are over groups of the model's data
        changes = {"tensor": tensor, "pipe": pipe, "data": data, "zero": 0, "zero_group": None}
        # axes that the model does not have are data ranks of it, so they go beside these
        new = [x for x in ("pipe", "tensor") if getattr(parallel, x) == 1]
        order = [axis for axis in parallel.order if axis not in new]
        changes["order"] = tuple(
            x for axis in order for x in ((axis, *new) if axis == "data" else (axis,))
        )
        parallel = parallel.model_copy(update=changes)
        if pipe != config.parallel.pipe:
            # the order and the placement of the model's stages need not be for so many
            plain = PipelineSection()
            names = ("schedule", "chunks", "file")
            pipeline = pipeline.model_copy(update={x: getattr(plain, x) for x in names})
    folder, vocab = config.train.distill.teacher, config.model.vocab
    stored = stored_vocabulary(read_config(folder)) if folder is not None else None
    if type(stored) is int:  # else it would grow to the model's
        vocab = stored
    return config.model_copy(
        update={
            "model": ModelSection(name=None, hf=folder, vocab=vocab),
            "train": TrainSection(accumulate=config.train.accumulate),
            "checkpoint": CheckpointSection(),
            "optim": OptimSection(),
            "pipeline": pipeline,
            "precision": precision,
            "parallel": parallel,
        }
    )


@lru_cache(maxsize=4)
def sharing_groups(student: Mesh, teacher: Mesh) -> Mapping[int, tuple[int, ...]]:
    """Return for each rank the ranks, itself included, that send it samples or logits, or get
    some from it, directly or through others.

    Where each rank has the same stage of both models, the groups are of one stage each.
    """
    num = student.size
    is_aligned = stages_agree(student, teacher)
    together: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(num):
        stage = student.index(rank, "pipe") if is_aligned else 0
        for name, mesh in (("student", student), ("teacher", teacher)):
            together.setdefault((name, stage, mesh.index(rank, "data")), []).append(rank)
    joined: dict[int, set[int]] = {}
    for ranks in together.values():
        group = set(ranks).union(*(joined.get(rank, ()) for rank in ranks))
        joined |= dict.fromkeys(group, group)
    return {rank: tuple(sorted(group)) for rank, group in joined.items()}


def stages_agree(student: Mesh, teacher: Mesh) -> bool:
    """Return whether each rank has the same stage of both models."""
    return all(student.index(x, "pipe") == teacher.index(x, "pipe") for x in range(student.size))


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
