"""Read a family from transformers' modules: what plans, layouts and builds need of a table.

The model itself is made on the meta device. What names and shapes do not show, whether its loss is
that of its tokens and which parts they reach, is tried on a small copy of the same classes.
"""

import json
import logging
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.config.head_tasks import ModelHead, is_head
from torchdistpackage.config.mtp import without_mtp
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.found import (
    BESIDE,
    TRAINED,
    active_share,
    chosen_experts,
    family,
    split_as,
    without_shared_experts,
)
from torchdistpackage.families.table import (
    Documents,
    Family,
    FoundModel,
    Sizes,
    StageSides,
    Weight,
)
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.partition import share_heads_evenly
from torchdistpackage.models.tables import table_parameters
from torchdistpackage.models.transformers_cuts import CHOICES, find_cuts
from torchdistpackage.models.transformers_experts import (
    experts_of,
    is_gated_mlp,
    router_load,
    switch_loss,
)
from torchdistpackage.models.transformers_meta import (
    ALONE,
    known_settings,
    on_meta,
    other_tasks,
    scores_positions,
)
from torchdistpackage.models.transformers_small import (
    Sample,
    module_of,
    moved_away,
    sample_ids,
    small_models,
)
from torchdistpackage.models.transformers_staged import try_stages
from torchdistpackage.models.transformers_trial import order_of, try_tensor
from torchdistpackage.tools.undisturbed import keep_random_states

MOST_TRIED = 8
"""Largest number of tensor ranks for a small copy."""
_TOLERANCE = 1e-4
_SWITCHES: tuple[tuple[str, object], ...] = (
    ("is_decoder", True),
    ("causal", True),
    ("attn_type", "uni"),
    ("use_bidirectional_attention", False),
    ("use_bidirectional_attention", None),
    ("is_causal", True),
)
"""Settings that make some classes attend only to earlier tokens."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
_NUM_PADDING = 3
"""Number of tokens of padding behind a sample of a class with a head."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_LEARNED = re.compile(r"position|\bwpe\b")


def found_family(
    config_dict: Mapping[str, Any], tensor: int = 1, head: ModelHead | None = None
) -> Family:
    """Return the family of one config.json that transformers can build, split for `tensor` ranks.

    head: in place of the one for the next token.

    Raises:
        NotAvailableError: transformers is not there.
        ConfigError: it has no such causal language model, or none with this head, or refuses the
            settings.
    """
    return family(found_model(config_dict, tensor, head))


def found_model(
    config_dict: Mapping[str, Any], tensor: int = 1, head: ModelHead | None = None
) -> FoundModel:
    """Return the model from which `found_family` makes its table."""
    return _read(json.dumps(dict(config_dict), sort_keys=True, default=str), tensor, head)


def is_causal(config_dict: Mapping[str, Any]) -> bool:
    """Return whether transformers makes a causal language model from a config.json that tokens can
    train.
    """
    try:
        return found_model(config_dict).refused is None
    except ConfigError:
        return False


@lru_cache(maxsize=8)
def _read(text: str, tensor: int, head: ModelHead | None = None) -> FoundModel:
    config_dict = json.loads(text)
    if tensor > 1:
        uncut = _read(text, 1, head)
        return uncut if uncut.refused else _cut(config_dict, uncut, tensor, head)
    with ALONE:
        config = known_settings(config_dict, head)
        model = on_meta(config_dict, torch.float32, head=head)
        return _found(model, config, _tried(without_mtp(config_dict), head), head)


def _found(model: Any, config: Any, tried: "_Tried", head: ModelHead | None = None) -> FoundModel:
    parameters, aliases = _names(model)
    blocks, num = _blocks(model, tried.unreached)
    text = config.get_text_config()
    settings = text.to_dict()
    embedding = model.get_input_embeddings()
    heads = _number(text, "num_attention_heads", 1)
    dim = embedding.weight.shape[-1] if isinstance(embedding, nn.Embedding) else 1
    if model.get_output_embeddings() is None:  # behind an embedding that may be narrower
        dim = _number(text, "hidden_size", dim)
    positions = next((p for x in _POSITIONS if type(p := settings.get(x)) is int), None)
    learned = [name for name in parameters if _LEARNED.search(name)]
    tables = [model.get_submodule(name.rpartition(".")[0]) for name in learned]
    for table in (x for x in tables if isinstance(x, nn.Embedding) and x.padding_idx is not None):
        # RoBERTa counts from behind the row of padding on
        rows = table.num_embeddings - table.padding_idx - 1
        positions = rows if positions is None else min(positions, rows)
    sizes = Sizes(
        vocab=_number(text, "vocab_size", 1),
        dim=dim,
        layers=num,
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads", heads),
        head_dim=_number(text, "head_dim", max(dim // heads, 1)),
        hidden=_number(text, "intermediate_size", dim),
        tied=False,
        std=0.02,
        positions=positions if learned else None,
    )
    top_k, stacks = chosen_experts(settings), experts_of(model)
    numbers = {module.num_experts for module in stacks.values()}
    is_shared = len(numbers) == 1 and top_k > 0
    paths = {id(module): path for path, module in model.named_modules()}
    shared = stacks if is_shared else {}
    by_name = dict(_parameters(model, parameters, active_share(settings), shared))
    if head is not None:  # trained whole, so that no adapter is on it
        of_head = {name: x for name, x in by_name.items() if is_head(name)}
        by_name |= {name: replace(x, inputs=None) for name, x in of_head.items()}
    return FoundModel(
        class_name=type(model).__name__,
        sizes=sizes,
        blocks=blocks,
        output=paths.get(id(model.get_output_embeddings()), ""),
        parameters=by_name,
        buffers=tuple(_buffers(model)),
        aliases=aliases,
        unreached=tried.unreached,
        refused=tried.refused,
        unstaged=tried.unstaged,
        around=tried.around,
        auxiliary=tried.auxiliary,
        positions=positions,
        shared_experts=numbers.pop() if is_shared else 0,
        top_k=top_k,
        experts_alone=not all(map(is_gated_mlp, stacks.values())),
        counts_routers=tried.counts_routers,
        documents=tried.documents,
        embedding=paths.get(id(embedding), ""),
    )


def found_on(model: Any) -> FoundModel:
    """Return the facts read from an existing model, without a trial."""
    return _found(model, model.config, _Tried())


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if type(value) is int and value > 0 else default


def _names(model: Any) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Return the parameters by the names that transformers saves, and a map from their other names
    to these.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    first_names: dict[int, str] = {}
    everything = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(everything, key=lambda name: name in tied):
        first_names.setdefault(id(everything[name]), name)
    distinct = {name: p for name, p in everything.items() if first_names[id(p)] == name}
    aliases = {
        name: first_names[id(p)] for name, p in everything.items() if first_names[id(p)] != name
    }
    return distinct, aliases


def _parameters(
    model: nn.Module,
    distinct: Mapping[str, nn.Parameter],
    active: float,
    shared: Container[str],
) -> Iterator[tuple[str, Weight]]:
    """Yield every parameter by its name, whole but for experts that ranks share.

    active: the share of the experts that works on a token. shared: modules of stacked experts that
    ranks share.
    """
    tables = {id(p) for p in table_parameters(model)}
    for name, parameter in distinct.items():
        path, _, last = name.rpartition(".")
        module, inputs = model.get_submodule(path), None
        if last == "weight" and parameter.dim() == 2:
            # a router that returns scores beside, or a matrix of groups, is more than its product
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
                inputs = 1
            elif type(module).__name__ == "Conv1D":  # transformers', stored transposed
                inputs = 0
        shape = tuple(parameter.shape)
        layout = Layout(name, shape, is_table=id(parameter) in tables)
        if path in shared:
            split = (("expert",), *layout.split[1:])
            layout = replace(layout, split=split, view="expert", uneven=True)
        is_expert = len(shape) == 3 or _EXPERT.search(name) is not None
        share, stacked = active if is_expert else 1.0, None
        if len(shape) == 3 and hasattr(module, "is_transposed"):  # of transformers' interface
            stacked = 1 if module.is_transposed else 2
        yield name, Weight(layout, "made", inputs=inputs, share=share, stacked=stacked)


def _buffers(model: nn.Module) -> Iterator[Layout]:
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            yield Layout(name, tuple(buffer.shape))


def _blocks(model: Any, unreached: tuple[str, ...]) -> tuple[str, int]:
    """Return the path and the length of the longest outermost list of modules that token ids reach;
    ("", 1) if there is none.
    """
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        if f"{name}.".startswith(tuple(f"{path}." for path in unreached)):
            continue
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{n}.") for n in lists):
            lists[name] = len(module)
    if not any(lists.values()):
        return "", 1
    path = max(lists, key=lambda name: lists[name])
    return path, lists[path]


# -- what tensor ranks share ---------------------------------------------------------------------


def _cut(
    config_dict: Mapping[str, Any], uncut: FoundModel, tensor: int, head: ModelHead | None
) -> FoundModel:
    """Return `uncut` with the first split under which a small copy computes the same."""
    by_heads = share_heads_evenly(uncut.sizes.heads, uncut.sizes.kv_heads, tensor)
    num_ranks = min(tensor, MOST_TRIED)
    problem = f"transformers makes no small copy of {uncut.class_name} to try it on"
    uncut = without_shared_experts(uncut) if uncut.experts_alone else uncut
    with ALONE:
        model = on_meta(config_dict, torch.float32, head=head)
        for small in _copies_for(without_mtp(config_dict), num_ranks, head):
            sample = _sample_of(small, head, uncut.documents)
            small_facts = _found(small, small.config, _Tried(unreached=uncut.unreached), head)
            if uncut.experts_alone:
                small_facts = without_shared_experts(small_facts)
            for choices in CHOICES:
                chosen = replace(choices, by_heads=choices.by_heads and by_heads)
                cut = split_as(small_facts, find_cuts(small, small_facts, chosen))
                failure = try_tensor(small, cut, sample, num_ranks)
                if failure is None:
                    order = order_of(small, sample, small_facts.blocks, cut.table)
                    return replace(split_as(uncut, find_cuts(model, uncut, chosen)), order=order)
                problem = failure
    return replace(uncut, uncut=problem)


def _sample_of(small: Any, head: ModelHead | None, documents: Documents) -> Sample:
    """Return the tokens that a small copy is tried on, with padding behind them if it masks it."""
    sample = Sample(sample_ids(small.config))
    return sample if head is None else _padded(small, sample, documents == "padding")


def _copies_for(
    config_dict: Mapping[str, Any], num_ranks: int, head: ModelHead | None
) -> Iterator[nn.Module]:
    """Yield small copies whose heads, and half as many key-value heads, these ranks can share.

    A class that refuses the width that goes with such heads gets at least a head for each rank.
    """
    even = max(num_ranks * (1 + num_ranks % 2), 4)
    for heads in dict.fromkeys((even, max(num_ranks, 4))):
        yield from small_models(config_dict, heads, head)


# -- what is tried on a small copy ---------------------------------------------------------------


@dataclass(frozen=True)
class _Tried:
    """Results of a trial on a small copy; see `FoundModel`."""

    refused: str | None = None
    unreached: tuple[str, ...] = ()
    auxiliary: float = 0.0
    unstaged: str | None = None
    around: StageSides = field(default_factory=StageSides)
    documents: Documents = "not"
    counts_routers: bool = False


def _tried(config_dict: Mapping[str, Any], head: ModelHead | None = None) -> _Tried:
    if (reads := BESIDE.get(str(config_dict.get("model_type")))) is not None:
        return _Tried(f"{config_dict['model_type']} does not run on token ids alone: its {reads}")
    problem = f"transformers makes no small copy of {config_dict.get('model_type')} to try it on"
    for model in small_models(config_dict, head=head):
        try:
            with keep_random_states():
                return _try(model, config_dict) if head is None else _try_head(model, head)
        except Exception as error:  # as above
            at, name = module_of(error, model), type(model).__name__
            problem = f"a small copy of {name} does not run on token ids alone: it stops in {at}"
    return _Tried(problem)


def _try(model: Any, config_dict: Mapping[str, Any]) -> _Tried:
    ids, name = sample_ids(model.config), type(model).__name__
    model.eval()
    both_ways = _causality_problem(config_dict, model, ids)
    model.train(model.config.model_type in TRAINED)
    logits = model(input_ids=ids, return_dict=True).logits
    try:
        output = model(input_ids=ids, labels=ids.clone(), return_dict=True)
    except Exception:  # of a loss that leaves out tokens of an image, and so all of them
        return _Tried(f"{name} makes logits of token ids alone, and its forward no loss of them")
    loss, logits = output.loss, output.logits
    factor, counts_routers = 0.0, False
    if getattr(output, "aux_loss", None) is not None:
        counts_routers = _is_switch_loss(
            output, chosen_experts(model.config.get_text_config().to_dict())
        )
        factor = float(getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0))
        loss = loss - factor * output.aux_loss
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
        return _Tried(f"{name} makes no logits of each token")
    # transformers computes its losses in float32
    shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    as_given = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    near = (torch.isclose(loss, x, rtol=_TOLERANCE, atol=1e-6) for x in (shifted, as_given))
    if not any(near):
        text = (
            f"the loss of {name} is not the cross entropy of its logits: on a small copy it is "
            f"{loss.item():.5f}, and that of the tokens {shifted.item():.5f}"
        )
        return _Tried(text)
    if both_ways is not None:
        return _Tried(both_ways)
    output.loss.backward()
    unreached = tuple(_unreached(model))
    staged = try_stages(model, Sample(ids), _blocks(model, unreached)[0], unreached)
    return _Tried(None, unreached, factor, *staged, counts_routers=counts_routers)


def _is_switch_loss(output: Any, top_k: int) -> bool:
    """Return whether the loss of the routers is Switch's over the tokens of all blocks together."""
    logits = getattr(output, "router_logits", None) or ()
    if not top_k or not all(isinstance(x, Tensor) and x.dim() == 2 for x in logits):
        return False
    if len({x.shape for x in logits}) != 1:
        return False
    counted = switch_loss(router_load(logits, top_k), top_k)
    return torch.isclose(counted, output.aux_loss.to(counted), rtol=_TOLERANCE, atol=1e-6).item()


def _try_head(model: Any, head: ModelHead) -> _Tried:
    """Try a class with this head, or a base class: whether padding behind a text changes what it
    makes of it, with a mask if not without one.
    """
    model.eval()
    moved, name, sample = moved_away(model), type(model).__name__, Sample(sample_ids(model.config))
    documents: Documents = "not"
    for documents in ("not", "padding"):
        padded = _padded(model, sample, documents == "padding")
        with torch.no_grad(), _without_advice():
            alone = replace(padded, ids=padded.ids[:, :-_NUM_PADDING], mask=None).outputs(moved)
            outputs = padded.outputs(moved)
            is_padded = outputs.dim() == 3
            off = (outputs[:, :-_NUM_PADDING] if is_padded else outputs) - alone
        if (most := float(off.abs().max() / alone.abs().max().clamp(min=1e-6))) <= _TOLERANCE:
            break
    else:
        return _Tried(
            f"{name} mixes padding into a text: on a small copy its outputs change by {most:.0%} "
            f"of the largest one with {_NUM_PADDING} tokens of padding behind the text, which its "
            f"attention_mask does not leave out; use a model that does"
        )
    if scores_positions(model, head) and (text := _pools_elsewhere(moved, padded.ids, outputs)):
        return _Tried(text)
    sample = padded
    sample.loss(sample.outputs(model)).backward()
    unreached = tuple(_unreached(model))
    staged = try_stages(model, sample, _blocks(model, unreached)[0], unreached)
    return _Tried(None, unreached, 0.0, *staged, documents)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep transformers from warning of padding without a mask, which is what is tried."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _padded(model: Any, sample: Sample, is_masked: bool) -> Sample:
    """Return a sample of a class with a head, whose last tokens are padding."""
    padding = _padding_id(model)
    other = 1 + max(padding, int(sample.ids.min()))
    ids = sample.ids.masked_fill(sample.ids == padding, other)
    ids[:, -_NUM_PADDING:] = padding
    mask = torch.ones_like(ids)
    mask[:, -_NUM_PADDING:] = 0
    return Sample(ids, mask if is_masked else None, is_causal=False)


def _padding_id(model: Any) -> int:
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    return padding if type(padding) is int and padding >= 0 else 0


@torch.no_grad()
def _pools_elsewhere(model: Any, ids: Tensor, outputs: Tensor) -> str | None:
    """Return where a class takes other logits than those of the last token that is not padding;
    None: it takes these.

    model: whose forward returns those of all positions, `outputs` (B, S, K) for ids (B, S).
    """
    model.config.get_text_config().pad_token_id = _padding_id(model)
    logits = type(model).__mro__[1].forward(model, input_ids=ids, return_dict=True).logits
    last = outputs[:, -_NUM_PADDING - 1]
    if logits.shape == last.shape and torch.allclose(logits, last, rtol=_TOLERANCE, atol=1e-5):
        return None
    name = type(model).__name__
    return f"{name} does not score a text at its last token that is not padding, as decoders do"


def _unreached(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the outermost modules in which no parameter has a gradient, except blocks
    and experts in a list.
    """
    unreached: list[str] = []
    for path, module in model.named_modules():
        is_numbered = any(part.isdigit() for part in path.split("."))
        if not path or is_numbered or any(path.startswith(f"{x}.") for x in unreached):
            continue
        parameters = list(module.parameters())
        if parameters and all(p.grad is None for p in parameters):
            unreached.append(path)
    yield from unreached


# -- whether a token sees those behind it --------------------------------------------------------
#
# Encoders with a language model's head (BERT and its relatives) attend in both directions unless
# their settings say otherwise. Their loss of the next token means nothing: they see it.


@torch.no_grad()
def _looks_ahead(model: nn.Module, ids: Tensor) -> float:
    """Return how much the logits of a position change, at most, when a later token changes.

    Relative to the largest logit. model: a small copy in float32. ids (B, S): its first row is
    used.
    """
    moved = moved_away(model).eval()
    row, num = ids[:1], ids.shape[1]
    rows = row.repeat(num, 1)
    at = torch.arange(1, num)
    others = row[0, at - 1]  # tokens of the vocabulary
    rows[at, at] = torch.where(others == row[0, at], ids.min() + ids.max() - others, others)
    output: Any = moved(input_ids=rows, return_dict=True)
    logits = output.logits
    is_earlier = torch.arange(num)[None, :] < torch.arange(num)[:, None]
    off = (logits - logits[:1]).abs().amax(-1)[is_earlier].max()
    return float(off / logits.abs().max().clamp(min=1e-6))


def _causality_problem(config_dict: Mapping[str, Any], model: Any, ids: Tensor) -> str | None:
    """Return why `model`, a small copy of the model of `config_dict`, is not a causal language
    model, with the setting that makes it one if there is such; None: it is one.
    """
    if (off := _looks_ahead(model, ids)) <= _TOLERANCE:
        return None
    text = (
        f"{type(model).__name__} attends in both directions: on a small copy the logits of a token "
        f"change by {off:.0%} of the largest one with tokens behind it, so that it sees what it is "
        f"to predict"
    )
    for name, changed in _switched(config_dict, model):
        if _looks_back(changed, ids):
            return (
                f"{text}; set {name} in config.json to train it from token to token"
                f"{other_tasks(model.config)}"
            )
    return f"{text}; use a causal language model, or model.target with a loss of your own"


def _looks_back(config_dict: Mapping[str, Any], ids: Tensor) -> bool:
    try:
        return any(_looks_ahead(copy, ids) <= _TOLERANCE for copy in small_models(config_dict))
    except ConfigError:  # no value that the class has for this setting
        return False


def _switched(
    config_dict: Mapping[str, Any], model: Any
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each switch that stands the other way: what to set in config.json, as text, and
    `config_dict` with it set.
    """
    all_settings: dict[str, Any] = model.config.to_dict()
    for key, value in _SWITCHES:
        to = f"to {json.dumps(value)}"
        if all_settings.get(key, value) != value:
            yield f"{key} {to}", {**config_dict, key: value}
        for part, inner in all_settings.items():
            if isinstance(inner, dict) and cast(dict[str, Any], inner).get(key, value) != value:
                settings = cast(dict[str, Any], config_dict.get(part) or {})
                yield f"{part}.{key} {to}", {**config_dict, part: {**settings, key: value}}
