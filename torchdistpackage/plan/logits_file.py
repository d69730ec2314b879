"""The file of a teacher's most likely tokens: its size, its origin, and whether a run can use it.
No torch.

`tdp reference` writes it, and train.distill.logits names it.
"""

from pathlib import Path
from typing import NamedTuple

from torchdistpackage.bounded import DTYPES, read_header
from torchdistpackage.config.errors import Problem
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.data.tokens.data_fingerprint import data_fingerprint
from torchdistpackage.models.registry import spec_of
from torchdistpackage.plan.reference_file import differences, header_of

LOG_PROBS, IDS = "log_probs", "ids"
"""Names of the tensors, in file order: the wider numbers first, so that both are aligned."""
TEACHER = "train.distill.teacher"
KEY = "train.distill.logits"

_ANY = ("path", "tokenizer", "sources", "cache", "val_path", "eval", "template_date", "args")
"""Keys of the data section that do not change the samples, or that have their own entry."""


class LogitsSize(NamedTuple):
    """The size of a file: `k` tokens at each position of each sample."""

    num_samples: int
    seq_len: int
    k: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of both tensors."""
        return self.num_samples, self.seq_len, self.k

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (first byte after the header, bytes of a sample) of log-probabilities and ids."""
        wide, narrow = (DTYPES[x][1] * self.seq_len * self.k for x in (self.dtype, "int32"))
        return (0, wide), (self.num_samples * wide, narrow)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file without its header."""
        _, (begin, of_sample) = self.spans
        return begin + self.num_samples * of_sample


def size_of(config: RunConfig, k: int) -> LogitsSize:
    """Return the size of the file of a run whose train.steps are known."""
    number, wide = config.train.steps * config.data.global_batch, config.precision.dtype
    return LogitsSize(number, config.data.seq_len, k, "float64" if wide == "float64" else "float32")


def logits_identity(config: RunConfig) -> dict[str, str]:
    """Return, by key, everything that determines a run's samples and its teacher's logits."""
    data, teacher = config.data, config.train.distill.teacher
    sources = [(x.weight, x.name, x.field) for x in data.sources]
    keys = data.model_dump(mode="json", exclude=set(_ANY))
    dated = {} if data.template_date is None else {"data.template_date": str(data.template_date)}
    files = [x.path for x in data.parts.values() if x.path is not None]
    teacher_file = {} if teacher is None else {TEACHER: data_fingerprint([teacher])}
    model = spec_of(config)
    return {
        "the contents of data.path" if not sources else "the contents of data.sources": (
            data_fingerprint(files)
        ),
        "data.sources": str(sources or "none"),
        "data.tokenizer": data_fingerprint([data.tokenizer] if data.tokenizer else []),
        "data.args": str(data.args),
        **{f"data.{key}": str(value) for key, value in keys.items()},
        **dated,
        "run.seed": str(config.run.seed),
        "the size of the vocabulary": "" if model is None else str(model.shape.vocab),
        **teacher_file,
    }


def wrong_logits(config: RunConfig) -> list[Problem]:
    """Return the problem with the file of train.distill.logits, or []."""
    path = config.train.distill.logits
    if path is None:
        return []
    write = f"tdp reference CONFIG -o {path}"
    if not Path(path).is_file():
        return [config.problem(KEY, f"{path} is not a file; write it with {write}")]
    try:
        header, tensors = header_of(Path(path)), read_header(Path(path))
        number = tensors[IDS].shape[0]
    except (OSError, KeyError, ValueError) as error:
        text = str(error) if isinstance(error, ValueError) else f"{path} has no teacher's logits"
        return [config.problem(KEY, f"{text}; write it with {write}")]
    if different := differences(header, logits_identity(config)):
        text = f"{path} has a teacher's logits of another run: {different}; write it anew with"
        return [config.problem(KEY, f"{text} {write}")]
    steps, batch = config.train.steps, config.data.global_batch
    if config.train.epochs is None and number < steps * batch:
        text = f"{path} has {number:,} samples, but train.steps={steps} takes {steps * batch:,}"
        return [config.problem(KEY, f"{text}; lower train.steps, or write it anew with {write}")]
    return []
