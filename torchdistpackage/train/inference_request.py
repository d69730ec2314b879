"""The requests of `tdp generate` and `tdp eval` to the ranks, and the answers. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchdistpackage.plan.logits_file import LogitsSize


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """The source of weights. run: its newest good checkpoint; checkpoint: this one instead;
    averages: the averages in it.

    Without run and checkpoint the configuration's initial weights are used.
    """

    run: str | None = None
    checkpoint: str | None = None
    averages: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options for the choice of the next token. temperature: 0 takes the likeliest; for the others
    None is off.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request to continue texts. texts, prompts: the same as letters and as ids. stops: ids that
    end a text.

    tokenizer: a folder with tokenizer.json; None: tokens are bytes. window: tokens that the model
    sees at once. batch: prompts that are continued together.
    """

    texts: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    tokenizer: str | None
    max_new_tokens: int
    window: int
    stops: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    batch: int = 1


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """A request to evaluate. all_data: read everything, not only the part held out for
    validation.
    """

    all_data: bool


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """Write the log-probabilities of pairs to the file `path`."""

    path: str


@dataclass(frozen=True, slots=True)
class LogitsRequest:
    """Write the teacher's most likely tokens to the file `path`, whose header has `header`."""

    path: str
    header: Mapping[str, str]
    size: LogitsSize


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation. loss: mean over the counted tokens, in nats. num_windows: 0 if
    samples are a user's.

    step: of the checkpoint; None: the weights belong to no run. sets: results of data.eval, by
    name. values: of a task, such as the accuracy of a head.
    """

    loss: float
    num_tokens: int
    num_windows: int
    step: int | None
    sets: "Mapping[str, EvalResult]" = field(default_factory=dict["str", "EvalResult"])
    values: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class HarnessRequest:
    """An evaluation by the tasks of lm-eval.

    include_path: folder with task files; with_defaults: lm-eval's own tasks are needed too.
    num_fewshot, limit: examples in a prompt, and of a task; None: as the task says. batch: rows of
    one forward. window: tokens that the model sees at once. tokenizer: a folder with
    tokenizer.json; None: tokens are bytes. bos: ids before each text. prefix: the id that stands
    before a text without context. stops: ids that end a text. chat: how prompts become chats; None:
    they do not. system: text before all others, the system's message of a chat.
    """

    tasks: tuple[str, ...]
    include_path: str | None
    with_defaults: bool
    num_fewshot: int | None
    limit: int | None
    batch: int
    window: int
    tokenizer: str | None
    bos: tuple[int, ...]
    prefix: int
    stops: tuple[int, ...]
    chat: "HarnessChat | None" = None
    system: str | None = None


@dataclass(frozen=True, slots=True)
class HarnessChat:
    """The prompts of lm-eval as chats.

    template: a folder with a chat template. date: value for today's date. multiturn: examples are
    separate messages instead of one.
    """

    template: str
    date: str
    multiturn: bool


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """The result of lm-eval. values: as JSON, without samples. table: the same as text.

    step: of the checkpoint; None: the weights belong to no run.
    """

    values: Mapping[str, Any]
    table: str
    step: int | None


Request = GenerateRequest | EvalRequest | HarnessRequest | ReferenceRequest | LogitsRequest


@dataclass(frozen=True, slots=True)
class RankRefusal:
    """The reason why all ranks refused the request."""

    text: str
