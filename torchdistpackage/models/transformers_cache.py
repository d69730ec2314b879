"""transformers' own key-value cache, for a stage with some of a model's blocks.

Classes without a table of their own are tried on a small copy first: their logits token by token
must equal those of the whole sequence.
"""

import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.equivalence.compare import ParityFinding, first_difference
from torchdistpackage.equivalence.match import elementwise_within
from torchdistpackage.equivalence.record import (
    ModuleCalls,
    ParityRecord,
    parts_of,
    record_results,
)
from torchdistpackage.families.table import StageSides
from torchdistpackage.models.transformers_small import module_of, sample_ids, small_models
from torchdistpackage.models.transformers_staged import neighbours
from torchdistpackage.parallel.pipeline.partition.hf_decoder import (
    DecoderStage,
    decoder_stage,
    stage_modules,
)
from torchdistpackage.tools.undisturbed import keep_random_states

_PREFILL = 5
"""Number of tokens that the small copy gets at once."""
_WITHIN = elementwise_within(1e-4)
"""Tolerance of a float32 comparison, for sums over keys in other blocks."""
log = logging.getLogger(__name__)


class TransformersCache:
    """transformers' cache for the blocks of one stage, which begin at block `first`.

    decoder: a DecoderStage, or a whole model of transformers.
    """

    def __init__(self, decoder: Any, first: int = 0):
        part = decoder
        if isinstance(decoder, DecoderStage):
            part = getattr(decoder, decoder._prefix)
            full_model = decoder.__dict__.get("_whole")
        else:
            full_model, part = decoder, getattr(decoder, decoder.base_model_prefix, decoder)
        # a base counts its blocks, and not those of other stages
        self._past, self.length = _stage_cache(part.config, first), 0
        takes = inspect.signature(
            type(part if full_model is None else full_model).forward
        ).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        # the later name, which some classes have already, warns about the earlier
        self._name = "cache" if "cache" in takes else "past_key_values"
        # transformers' eager softmax is in float32, where the mask of float64 is minus infinity: a
        # column of padding, which sees nothing, would be no number
        is_eager = getattr(part.config, "_attn_implementation", None) == "eager"
        is_wide = any(p.dtype == torch.float64 for p in part.parameters())
        self.takes_padding = not (is_eager and is_wide)
        self._has_positions = "position_ids" in inspect.signature(type(part).forward).parameters

    @contextmanager
    def call(self, num: int, padding: Tensor | None) -> Iterator[dict[str, Any]]:
        """Yield the decoder's keyword arguments for `num` more tokens of each row; see
        `GPTCache.call`.
        """
        end = self.length + num
        kwargs: dict[str, Any] = {self._name: self._past, "use_cache": True, **self._last}
        if padding is not None:
            columns = torch.arange(end, device=padding.device)
            kwargs["attention_mask"] = (columns >= padding[:, None]).long()
            if self._has_positions:
                places = columns[self.length :] - padding[:, None]
                kwargs["position_ids"] = places.clamp(min=0)
        yield kwargs
        self.length = end


def _stage_cache(config: Any, first: int) -> Any:
    from transformers import DynamicCache

    class StageCache(DynamicCache):
        """A cache in which blocks write under their number in the model; all other uses count this
        stage's blocks.
        """

        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            return super().update(key_states, value_states, layer_idx - first, *args, **kwargs)

    return (StageCache if first else DynamicCache)(config=config.get_text_config(decoder=True))


def serves(config_dict: Mapping[str, Any], around: StageSides | None) -> tuple[bool, bool]:
    """Answer for a family whose cache tests cover; `tried_cache` tries the others."""
    return True, True


def tried_cache(config_dict: Mapping[str, Any], around: StageSides | None) -> tuple[bool, bool]:
    """Return whether a class without a table writes the same with a cache as without one, and
    whether it also does with padding.

    around: what stands around its blocks, if it is cut into two stages, behind each of its blocks.
    Tried on a small copy; any difference or error is a no.
    """
    text = json.dumps(dict(config_dict), sort_keys=True, default=str)
    problem = _problem(text, around, 0)
    if problem is not None:
        log.info("%s writes without a cache: %s", config_dict.get("model_type"), problem)
        return False, False
    return True, _problem(text, around, 2) is None


@lru_cache(maxsize=16)
def _problem(text: str, around: StageSides | None, padding: int) -> str | None:
    """Return why no cache works, by the first module that differs, or None."""
    problem = "transformers makes no small copy to try it on"
    with keep_random_states(), torch.no_grad():
        for model in small_models(json.loads(text)):
            model.eval()
            try:
                findings = (_difference(stages, padding) for stages in _cuts(model, around))
                finding = next((x for x in findings if x is not None), None)
            except Exception as error:
                # of a class that nobody has seen, whatever its forward raises
                problem = f"a small copy stops in {module_of(error, model)}"
                continue
            return None if finding is None else finding.brief
    return problem


def _cuts(model: Any, around: StageSides | None) -> Iterator[list[tuple[nn.Module, int]]]:
    """Yield, for each cut, the stages in a row, each with the number of its first block."""
    if around is None:
        yield [(model, 0)]
        return
    beside = neighbours(model, around)
    num = len(list(model.get_submodule(around.blocks).children()))
    for cut in range(1, num):
        stages = [(decoder_stage(model, range(cut), beside), 0)]
        stages.append((decoder_stage(model, range(cut, num), beside), cut))
        for stage, _ in stages:
            stage.eval()
        yield stages


def _difference(stages: list[tuple[nn.Module, int]], second: int) -> ParityFinding | None:
    """Return the first difference between a token's activations with a cache and without one.

    second: columns of padding before the second row.
    """
    num, padding = _PREFILL + 3, torch.tensor([0, second])
    ids = sample_ids(stages[0][0].config, num)
    caches = [TransformersCache(stage, first) for stage, first in stages]
    decoders = [stage for stage, _ in stages if isinstance(stage, DecoderStage)]
    modules = stage_modules(decoders) if decoders else parts_of(stages[0][0])

    def run(x: Tensor, more: list[dict[str, Any]]) -> list[Tensor]:
        for (stage, _), kwargs in zip(stages, more, strict=True):
            is_stage = isinstance(stage, DecoderStage)
            output: Any = stage(x, **kwargs) if is_stage else stage(input_ids=x, **kwargs)
            x = output if is_stage else output.logits
        return [x[:, -1:]]

    plain = [{} for _ in stages]
    for begin, end in ((0, _PREFILL), *((at, at + 1) for at in range(_PREFILL, num))):
        calls = [cache.call(end - begin, padding if second else None) for cache in caches]
        stage_kwargs = [call.__enter__() for call in calls]
        record = record_results(modules, partial(run, ids[:, begin:end], stage_kwargs))
        for call in calls:
            call.__exit__(None, None, None)
        for row in range(2):
            tokens = ids[row : row + 1, int(padding[row]) : end]
            alone = record_results(modules, partial(run, tokens, plain))
            expected, cached = _last_token(alone, 0), _last_token(record, row)
            if (finding := first_difference(expected, [cached], {}, _WITHIN)) is not None:
                return finding
    return None


def _last_token(record: ParityRecord, row: int) -> ParityRecord:
    """Return the record of the last token of one row."""

    def last(tensors: list[Tensor]) -> list[Tensor]:
        return [x[row : row + 1, -1:] for x in tensors if x.dim() > 2]

    modules = {
        name: ModuleCalls(last(calls.inputs), last(calls.outputs))
        for name, calls in record.modules.items()
    }
    return ParityRecord({}, modules=modules, results=last(record.results))
