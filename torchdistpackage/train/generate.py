"""Generate tokens of a language model one after another, on any layout.

Prompts of a batch are padded on the left, so that all end in one column. Every stage caches keys
and values. If a model cannot, or a text has outgrown its window, each token takes one forward of
the full sequence. A token is chosen on the rank with the logits, from random numbers that are
independent of the layout, and sent to all ranks, so every layout writes what one process writes.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.random import seed_from
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import NonFiniteError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.generators import evaluation
from torchdistpackage.train.inference_request import Sampling
from torchdistpackage.train.staged_model import StagedModel

_NO_NUMBER = -1
"""Value sent instead of a token if a logit is not a number, so that all ranks stop together."""


def generate(
    model: StagedModel,
    prompt: Sequence[int],
    sampling: Sampling,
    window: int,
    timeout_s: float | None,
) -> Iterator[int]:
    """Generate the tokens that follow `prompt`, without end: `generate_batch` with one row."""
    for token in generate_batch(model, [prompt], sampling, window, timeout_s):
        yield token[0]


def generate_batch(
    model: StagedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    window: int,
    timeout_s: float | None,
    *,
    stops: Collection[int] = (),
    use_cache: bool = True,
) -> Iterator[list[int]]:
    """Yield the next token of each prompt until all have ended: the same tokens that each prompt
    gets alone.

    All ranks of one model call it alike and get the same result. The model is left in evaluation
    mode.

    window: tokens that it sees; of a longer sequence the last ones. timeout_s: of a message between
    stages. stops: ids after which a row has ended; what it is given from then on means nothing.

    Raises:
        NonFiniteError: on all ranks, where logits are NaN or infinite.
    """
    executor = Executor(
        evaluation(model.plan.schedule, 1),
        tpc.get_group("pipe"),
        device=model.device,
        timeout_s=timeout_s,
        dynamic_shapes=True,
    )
    rows = [list(prompt) for prompt in prompts]
    ended = [False] * len(rows)
    seed = seed_from(sampling.seed, "generate")
    draws = [torch.Generator().manual_seed(seed) for _ in rows]
    model.stage.eval()
    batches = _CachedRows.of(model, executor, rows) if use_cache else None
    while not all(ended):
        row_tokens = [0] * len(rows)
        if batches is not None and all(batch.width <= window for batch in batches):
            for batch in batches:
                if not all(ended[row] for row in batch.rows):
                    these = [draws[row] for row in batch.rows]
                    next_tokens = _agreed(model, batch.logits(), sampling, these, _owner(model, 0))
                    batch.add(next_tokens)
                    for row, token in zip(batch.rows, next_tokens, strict=True):
                        row_tokens[row] = token
        else:
            # keys turned for their places in the text are of no use where a window begins later
            batches = None
            for row, tokens in enumerate(rows):
                if not ended[row]:
                    logits, source = _logits_of_all(model, executor, tokens[-window:])
                    row_tokens[row] = _agreed(model, logits, sampling, [draws[row]], source)[0]
        if _NO_NUMBER in row_tokens:
            row = row_tokens.index(_NO_NUMBER)
            raise NonFiniteError(
                f"the logits of token {len(rows[row])} are NaN or infinite; the weights, or sums "
                "of this precision, are not finite: use an earlier checkpoint, or a wider "
                "precision.dtype"
            )
        for row, token in enumerate(row_tokens):
            rows[row].append(token)
            ended[row] |= token in stops
        yield row_tokens


def _owner(model: StagedModel, index: int) -> int:
    """Return the rank that chooses the tokens: the first rank of the last stage with the logits.

    index: position along context of the ranks that hold the last token.
    """
    mesh, last = model.plan.topology.dense, model.plan.schedule.placement[-1]
    return mesh.rank({**mesh.coord(model.rank), "pipe": last, "tensor": 0, "context": index})


def _agreed(
    model: StagedModel,
    logits: Tensor | None,
    sampling: Sampling,
    draws: Sequence[torch.Generator],
    source: int,
) -> list[int]:
    """Return a token for each row of logits (B, V), as chosen by rank `source`."""
    choice = torch.zeros(len(draws), dtype=torch.int64, device=model.device)
    if logits is not None:
        tokens = [next_token(x, sampling, draw) for x, draw in zip(logits, draws, strict=True)]
        choice.copy_(torch.tensor(tokens))
    primitives.broadcast(choice, tpc.get_group("model"), source)
    return choice.tolist()


class _CachedRows:
    """Rows whose next tokens are in one column, with caches of all stages of this rank."""

    def __init__(
        self,
        model: StagedModel,
        executor: Executor,
        caches: dict[int, Any],
        rows: dict[int, Sequence[int]],
    ):
        self._model, self._executor, self._caches = model, executor, caches
        self.rows, self.width = tuple(rows), max(map(len, rows.values()))
        padding = [self.width - len(row) for row in rows.values()]
        ids = [[0] * num + list(row) for num, row in zip(padding, rows.values(), strict=True)]
        self._next = torch.tensor(ids, device=model.device)
        self._padding = torch.tensor(padding, device=model.device) if any(padding) else None

    @classmethod
    def of(
        cls, model: StagedModel, executor: Executor, rows: Sequence[Sequence[int]]
    ) -> "list[_CachedRows] | None":
        """Return one batch of cached rows, or one per length if the model takes no padding.

        None: the model, or its configuration, needs all tokens each time.
        """
        can_cache = model.sequence.multiple == 1 and not model.stage.compiled
        if not can_cache or model.plan.has_float8:
            return None
        modules: dict[int, Any] = {s: model.stage[str(s)] for s in executor.stages}
        caches = {s: module.make_cache() for s, module in modules.items()}
        if None in caches.values():
            return None
        takes_padding = all(cache.takes_padding for cache in caches.values())
        together: dict[int, dict[int, Sequence[int]]] = {}
        for row, tokens in enumerate(rows):
            together.setdefault(0 if takes_padding else len(tokens), {})[row] = tokens
        batches = list[_CachedRows]()
        for same_length in together.values():
            batches.append(cls(model, executor, caches, same_length))
            caches = {s: module.make_cache() for s, module in modules.items()}
        return batches

    def logits(self) -> Tensor | None:
        """Return the logits (B, V) of the last column, on the ranks of the last stage."""
        model, executor, last_logits = self._model, self._executor, list[Tensor]()

        def forward(stage: int, m: int, received: Message) -> Message:
            x = self._next if executor.is_first_stage(stage) else received
            with self._caches[stage].call(self._next.shape[1], self._padding):
                output = model.forward(stage, x)
            if executor.is_last_stage(stage):
                module: Any = model.stage[str(stage)]
                last_logits.append(module.whole_logits(output)[:, -1])
            return output

        executor.run(forward)
        return last_logits[0] if last_logits else None

    def add(self, tokens: Sequence[int]) -> None:
        """Append one token to each row."""
        self._next = torch.tensor(tokens, device=self._model.device)[:, None]
        self.width += 1


def _logits_of_all(
    model: StagedModel, executor: Executor, context: Sequence[int]
) -> tuple[Tensor | None, int]:
    """Return the logits (1, V) after the last token, from a forward of the full sequence, and the
    rank that chooses.

    Only some ranks have the logits.
    """
    plan, logits = model.plan, list[Tensor]()
    # a sequence that is split over ranks needs a multiple of them; no token sees what comes later
    is_split = plan.shape is not None and plan.shape.sequence_parallel
    num_parts = plan.topology.dense.axis_size("tensor") if is_split else 1
    multiple = num_parts * model.sequence.multiple
    ids = torch.tensor([[*context, *[0] * (-len(context) % multiple)]], device=model.device)
    owner, position = model.sequence.place(len(context) - 1, ids.shape[1])
    part = model.sequence.part(ids)

    def forward(stage: int, m: int, received: Message) -> Message:
        output = model.forward(stage, part if executor.is_first_stage(stage) else received)
        if executor.is_last_stage(stage):
            module: Any = model.stage[str(stage)]
            logits.append(module.logits_at(output, position)[None])
        return output

    executor.run(forward)
    return logits[0] if logits else None, _owner(model, owner)


def next_token(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> int:
    """Return a token id drawn from logits (V,); -1 if one of them is not a number.

    top_k keeps that many of the likeliest, then top_p keeps the fewest whose probabilities add up
    to it (nucleus sampling, arXiv:1904.09751). One number is drawn for each token, whatever is
    kept.
    """
    logits = logits.detach().to("cpu", torch.float64)
    if logits.isnan().any() or logits.isposinf().any():
        return _NO_NUMBER
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits_left, ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    chances = logits_left[: sampling.top_k].softmax(0)
    if sampling.top_p is not None:
        mass_before = chances.cumsum(0) - chances
        chances = chances[mass_before < sampling.top_p]
    sums = chances.cumsum(0)
    at = torch.rand((), dtype=torch.float64, generator=draw) * sums[-1]
    index = int(torch.searchsorted(sums, at, right=True).clamp(max=len(sums) - 1))
    return int(ids[index])
