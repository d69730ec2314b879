"""A model of this package behind the interface of EleutherAI's lm-eval, on rank 0.

Texts become tokens as in lm-eval's own `HFLM`: a context and its continuation are tokenized as one
text, and the tokens after the context's are scored.
"""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
    make_table,
)

from torchdistpackage.data.tokens.chat import ChatTemplate
from torchdistpackage.data.tokens.chat_turns import Message
from torchdistpackage.errors import DataError
from torchdistpackage.train.harness_calls import HarnessRanks, TextCall
from torchdistpackage.train.inference_request import Sampling
from torchdistpackage.train.log import print_line
from torchdistpackage.train.row_scores import ScoredRow

_MAX_NEW_TOKENS = 256
"""Default of `HFLM`."""
_DRAWS = 1000
"""Draws for a bootstrapped standard error; that of a mean has a formula."""
_SAMPLING_KEYS = {"temperature", "top_k", "top_p", "do_sample"}


class HarnessModel(TemplateLM):
    """Implements lm-eval's `LM`: it scores and continues texts on all ranks."""

    def __init__(self, ranks: HarnessRanks):
        super().__init__()
        self._ranks = ranks
        self._request = ranks.request
        chat = self._request.chat
        self._template = chat and ChatTemplate(Path(chat.template), date.fromisoformat(chat.date))
        self._leaves_out_system = False

    @property
    def eot_token_id(self) -> int:
        return self._request.stops[0] if self._request.stops else self._request.prefix

    @property
    def prefix_token_id(self) -> int:
        return self._request.prefix

    @property
    def tokenizer_name(self) -> str:
        return self._request.tokenizer or "bytes"

    def apply_chat_template(
        self, chat_history: list[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat; like `HFLM`, without the system message if the template takes
        none.
        """
        assert self._template is not None
        continues = not add_generation_prompt
        try:
            return self._template.before_reply(chat_history, "a prompt", continues_last=continues)
        except DataError:
            messages = [message for message in chat_history if message["role"] != "system"]
            if len(messages) == len(chat_history):
                raise
            text = self._template.before_reply(messages, "a prompt", continues_last=continues)
        if not self._leaves_out_system:
            print_line("note: the chat template takes no message of the system; it is left out")
        self._leaves_out_system = True
        return text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        is_plain = add_special_tokens is False
        codec = self._ranks.plain_codec if is_plain else self._ranks.codec
        return codec.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, tokens) for _, context, tokens in requests]
        scores = self._ranks.scores(rows)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.log_prob, score.is_greedy) for score in scores]

    def _row(self, context: list[int], continuation: list[int]) -> ScoredRow:
        """Return the row of a request, cut to its last tokens if it is too long."""
        window = self._request.window
        if not continuation or len(continuation) > window:
            raise DataError(
                f"a continuation of {len(continuation)} tokens; the model takes 1 to "
                f"{window} at once"
            )
        return ScoredRow(tuple((context + continuation)[-(window + 1) :]), len(continuation))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[int, ScoredRow]] = []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._request.window,
                context_len=1,
            )
            windows += [(number, self._row(*x)) for x in map(make_disjoint_window, rolling)]
        sums = [0.0] * len(requests)
        scores = self._ranks.scores([row for _, row in windows])
        for (number, _), score in zip(windows, scores, strict=True):
            sums[number] += score.log_prob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        numbers_of: dict[str, list[int]] = {}
        for number, request in enumerate(requests):  # those with the same options together
            options = json.dumps(request.args[1], sort_keys=True, default=str)
            numbers_of.setdefault(options, []).append(number)
        for numbers in numbers_of.values():
            call = self._call(requests[numbers[0]].args[1], (requests[i].args[0] for i in numbers))
            for number, text in zip(numbers, self._ranks.texts(call), strict=True):
                texts[number] = postprocess_generated_text(text, list(call.until), None)
                self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
        return texts

    def _call(self, options: dict[str, Any], contexts: Iterable[str]) -> TextCall:
        options = normalize_gen_kwargs(options, _MAX_NEW_TOKENS)
        number = int(options.pop("max_gen_toks"))
        window = self._request.window
        if not 0 < number < window:
            raise DataError(
                f"a task asks for {number} new tokens (max_gen_toks), but the model takes "
                f"{window} at once; ask for fewer in the task's generation_kwargs"
            )
        eos = self._ranks.plain_codec.decode([self.eot_token_id], special=True)
        until = handle_stop_sequences(options.pop("until", None), eos=eos)
        if unknown := {*options} - _SAMPLING_KEYS:
            raise DataError(
                f"a task's generation_kwargs have {', '.join(sorted(unknown))}; use until, "
                f"max_gen_toks, {', '.join(sorted(_SAMPLING_KEYS))}"
            )
        temperature = float(options.get("temperature") or 0.0) if options["do_sample"] else 0.0
        filters = {key: options.get(key) for key in ("top_k", "top_p") if temperature}
        # as HFLM does it: the last tokens that leave room for the new ones
        prompts = [tuple(self.tok_encode(text)[-(window - number) :]) for text in contexts]
        if not all(prompts):
            raise DataError(
                "a prompt has no token, as the tokenizer gives none for its text; leave this "
                "prompt out, or add text to it"
            )
        ends = tuple(end for end in until if end)
        return TextCall(tuple(prompts), ends, number, Sampling(temperature, **filters))


def evaluate_tasks(ranks: HarnessRanks) -> tuple[dict[str, Any], str]:
    """Return (results, table) of the tasks of a request; called on rank 0."""
    request = ranks.request
    # a pool of processes that this rank forks would inherit its sockets
    os.environ["DISABLE_MULTIPROC"] = "1"
    with redirect_stdout(sys.stderr):  # the answer alone goes to the output
        manager = TaskManager(
            include_path=request.include_path, include_defaults=request.with_defaults
        )
        results = simple_evaluate(
            HarnessModel(ranks),
            tasks=list(request.tasks),
            num_fewshot=request.num_fewshot,
            limit=request.limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=_DRAWS,
            system_instruction=request.system,
            apply_chat_template=request.chat is not None,
            fewshot_as_multiturn=request.chat is not None and request.chat.multiturn,
        )
    values = json.loads(json.dumps(results, default=handle_non_serializable))
    tables = [make_table(results)]
    if values.get("groups"):
        tables.append(make_table(results, "groups"))
    return values, "\n".join(tables)


def unknown_tasks(names: Iterable[str], include_path: str | None) -> tuple[list[str], bool]:
    """Return the names that match no task, and whether lm-eval's own tasks are needed.

    The index of lm-eval's own tasks takes seconds to read.
    """
    unmatched = list(names)
    for with_defaults in (False, True):
        if not unmatched or (include_path is None and not with_defaults):
            continue
        manager = TaskManager(include_path=include_path, include_defaults=with_defaults)
        unmatched = [name for name in unmatched if not manager.match_tasks([name])]
        if not unmatched:
            return [], with_defaults
    return unmatched, True
