"""The ranks of an evaluation by lm-eval: rank 0 runs the harness, and all ranks compute its
requests.

Rank 0 sends each request to all ranks as a call, and they answer together. So tasks are read once,
and no rank depends on another's order of a set or a dictionary. Only rank 0 imports the harness.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.data.tokens.prompts import ByteCodec, TokenCodec, TokenizerCodec
from torchdistpackage.errors import DataError
from torchdistpackage.lazy import resolve
from torchdistpackage.train.generate import generate_batch
from torchdistpackage.train.inference_request import HarnessRequest, HarnessResult, Sampling
from torchdistpackage.train.row_scores import RowScore, ScoredRow, score_rows
from torchdistpackage.train.staged_model import StagedModel

HARNESS = "torchdistpackage.train.lm_eval_model:evaluate_tasks"
_TIMEOUT_S = 4 * 3600.0
"""Longest time in seconds without a call: rank 0 reads tasks, and computes metrics of all
samples.
"""


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """A call to score these rows."""

    rows: tuple[ScoredRow, ...]


@dataclass(frozen=True, slots=True)
class TextCall:
    """A call to continue these prompts, each until one of the texts `until` or an end of text."""

    prompts: tuple[tuple[int, ...], ...]
    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class EndCall:
    """The final call. error: why rank 0 gave up; "" if it did not."""

    error: str = ""


class HarnessRanks:
    """Computes calls, on all ranks together."""

    def __init__(self, model: StagedModel, request: HarnessRequest, timeout_s: float):
        self.request = request
        self.codec: TokenCodec = ByteCodec()
        self.plain_codec: TokenCodec = self.codec
        if request.tokenizer is not None:
            self.codec = TokenizerCodec(request.tokenizer, bos=request.bos)
            self.plain_codec = TokenizerCodec(request.tokenizer)
        self._model = model
        self.in_call = False
        """True on rank 0 while all ranks compute; an error then is an error of all ranks."""
        self._timeout_s = timeout_s

    def scores(self, rows: Sequence[ScoredRow]) -> list[RowScore]:
        """Return the score of each row; called on rank 0."""
        self.in_call = True
        primitives.broadcast_object(ScoreCall(tuple(rows)))
        scores = self._scores(rows)
        self.in_call = False
        return scores

    def texts(self, call: TextCall) -> list[str]:
        """Return the continuation of each prompt, without the prompt; called on rank 0."""
        self.in_call = True
        primitives.broadcast_object(call)
        texts = self._texts(call)
        self.in_call = False
        return texts

    def serve(self) -> EndCall:
        """Compute rank 0's requests until its final call; called on other ranks."""
        while True:
            call = primitives.broadcast_object(None)
            if isinstance(call, EndCall):
                return call
            if isinstance(call, ScoreCall):
                self._scores(call.rows)
            elif isinstance(call, TextCall):
                self._texts(call)

    def _scores(self, rows: Sequence[ScoredRow]) -> list[RowScore]:
        return score_rows(self._model, rows, self.request.batch, self._timeout_s)

    def _texts(self, call: TextCall) -> list[str]:
        size = self.request.batch
        firsts = range(0, len(call.prompts), size)
        return [text for x in firsts for text in self._batch(call, call.prompts[x : x + size])]

    def _batch(self, call: TextCall, prompts: Sequence[Sequence[int]]) -> list[str]:
        stops = self.request.stops
        rows = [list[int]() for _ in prompts]
        ended = [False] * len(prompts)
        tokens = generate_batch(
            self._model,
            prompts,
            call.sampling,
            self.request.window,
            self._timeout_s,
            stops=stops,
        )
        for new_tokens in islice(tokens, call.max_new_tokens):
            for row, token in enumerate(new_tokens):
                if ended[row]:
                    continue
                rows[row].append(token)
                text = self.plain_codec.decode(rows[row])
                ended[row] = token in stops or any(end in text for end in call.until)
            # all ranks get the same tokens, so all stop here together
            if all(ended):
                break
        return [self.plain_codec.decode(row) for row in rows]


def run_harness(
    model: StagedModel, request: HarnessRequest, step: int | None, timeout_s: float
) -> HarnessResult:
    """Return the result of the tasks on rank 0; other ranks return one without values.

    timeout_s: of a message between stages.

    Raises:
        DataError: on all ranks, where the harness refuses a task or cannot read its data.
        NonFiniteError: on all ranks, where logits are NaN or infinite.
    """
    ranks = HarnessRanks(model, request, timeout_s)
    tpc.groups.set_timeout(max(_TIMEOUT_S, timeout_s))
    if model.rank != 0:
        if error := ranks.serve().error:
            raise DataError(error)
        return HarnessResult({}, "", step)
    try:
        values, table = resolve(HARNESS)(ranks)
    except Exception as error:  # tasks and metrics are code of others
        if ranks.in_call:
            raise
        kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
        text = f"lm-eval: {kind}{error}"
        primitives.broadcast_object(EndCall(text))
        raise DataError(text) from error
    primitives.broadcast_object(EndCall())
    return HarnessResult(values, table, step)
