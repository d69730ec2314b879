"""What ranks do to show that one class of transformers trains on a layout as it does alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.train import parity
from tests.train.lora_ranks import peft_model, plain
from tests.train.sources import PackedTokens, UnevenTokens
from tests.train.transformers_ranks import everywhere_float64, whole
from torchdistpackage.checkpoint.parts import TopologyRank
from torchdistpackage.comm import primitives
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import ConfigError
from torchdistpackage.models import transformers_meta
from torchdistpackage.models.find_split import find_split, shape_of
from torchdistpackage.models.model_spec import ModelUse
from torchdistpackage.models.shrunk_config import VOCAB
from torchdistpackage.models.transformers_layout import layouts, shape_of_section
from torchdistpackage.models.transformers_lora import exact_targets
from torchdistpackage.models.transformers_meta import build_options, known_settings
from torchdistpackage.models.transformers_refusals import refusals
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.tools.undisturbed import keep_random_states
from torchdistpackage.train.build import build
from torchdistpackage.train.decay import decaying
from torchdistpackage.train.export import export_checkpoint
from torchdistpackage.train.learning_rate import warmup_cosine
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.train_state import TrainState, save_state

STEPS, SEQ_LEN, BATCH = 3, 12, 4
MODES = ("everywhere", "float64", "float32")
"""In what a class computes: float64 also where its code says float32; float64 as far as it does,
where some of its own parameters are float32; float32, where its code knows no other."""
RUN = [
    *(f"data.seq_len={SEQ_LEN}", f"data.args={{seq_len: {SEQ_LEN}, vocab: {VOCAB}}}"),
    *(f"data.global_batch={BATCH}", "pipeline.microbatches=1", "precision.dtype=float64"),
    *("optim.clip=0.0", "optim.lr=0.01"),
    *("train.steps=5", "optim.warmup_steps=0", "data.target=tests.train.sources:UnevenTokens"),
]
_PLAIN, _WIDE = list[Any](), list[bool]()
_FLOAT32, _TO_FLOAT32 = torch.float32, torch.Tensor.float
COMPUTING = dict[int, str]()
"""By thread, the mode in which it computes."""
Answer = tuple[parity.Held, list[parity.Held], list[float]]
"""Weights after the last step; gradients and losses of each."""


def refused_settings(settings: dict[str, Any]) -> str | None:
    """Why no class is made of a config.json; None: one may be."""
    try:
        known_settings(settings)
    except ConfigError as error:
        return str(error)
    return None


def refusal(overrides: list[str], size: int) -> str | None:
    """Why a run on so many ranks is refused before its class runs; None: it is not."""
    try:
        make_plan(parity.config([*RUN, *overrides]), size)
    except ConfigErrors as error:
        return "; ".join(problem.text for problem in error.problems)
    except ConfigError as error:
        return str(error)
    return None


def counts_routers(folder: str) -> bool:
    """Whether the loss of a class has one of its routers."""
    try:
        return bool(shape_of_section({"hf": folder}, SEQ_LEN, False).kind.auxiliary)
    except ConfigError:  # refused by name in each column
        return False


def refused_documents(folder: str) -> str | None:
    """Why documents of a packed sample are refused; None: they are not."""
    try:
        shape = shape_of_section({"hf": folder}, SEQ_LEN, False)
    except ConfigError as error:
        return str(error)
    found = refusals(shape, ModelUse(SEQ_LEN, document_masks=True))
    return "; ".join(text for _, text in found) or None


def bits_that_leak(folder: str, mode: str = MODES[0]) -> list[str]:
    """Parameters whose gradient of one document changes with the one before it, by a bit or, beside
    experts, by more than rounding."""
    dtype = "float32" if mode == "float32" else "float64"
    run = parity.trainer([*RUN, f"precision.dtype={dtype}", f"model.hf={folder}"])
    model: Any = run.stage["0"]
    assert not model.shape.documents_way.problem  # tried before all is float64
    ids = torch.arange(SEQ_LEN)[None] % (VOCAB - 4) + 2
    positions = torch.cat((torch.arange(5), torch.arange(SEQ_LEN - 5)))[None]
    targets = torch.where(torch.arange(SEQ_LEN)[None] < 5, -100, ids.flip(1))
    both: list[dict[str, Tensor]] = []
    for other in (ids, torch.cat((ids[:, :5].flip(1) + 1, ids[:, 5:]), 1)):
        model.zero_grad()
        with computing(mode), run.reducer.no_sync():
            total, _ = model.loss(model(other, positions), targets)
            total.backward()
        named = model.named_parameters()
        both.append({n: p.grad.clone() for n, p in named if p.grad is not None})
    run.close()
    one, two = both
    # experts multiply the rows of all documents at once: with other numbers of rows the same row
    # is rounded in another way, while a leak changes the first digits
    room = 1e-13 if any(".experts." in name for name in one) else 0.0

    def leaks(name: str) -> bool:
        x, other = one[name], two[name]
        return not bool((x - other).abs().max() <= room * x.abs().max())

    # of an embedding, rows of tokens that changed have no gradient in either
    return sorted(name for name in one if leaks(name))


def lora_truth(
    folder: str, initial: list[parity.Held], options: dict[str, Any], parts: int, mode: str
) -> Answer:
    """Steps of transformers and peft in one process, from these adapters."""
    begins = {n: x for n, x in parity.whole(initial).items() if ".lora_" in n}
    return alone(folder, parts, mode=mode, adapters=(begins, options))


def exported_difference(folder: str, exported: str) -> float | str:
    """How far what transformers reads of an exported folder is off what it reads of `folder`."""
    from transformers import AutoModelForCausalLM

    both = []
    for where in (folder, exported):
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64)
        both.append(model.state_dict())
    if both[0].keys() != both[1].keys():
        return f"names differ: {sorted(both[0].keys() ^ both[1].keys())[:3]}"
    return max(float((x - both[1][name]).abs().max()) for name, x in both[0].items())


def make_folder(settings: dict[str, Any], folder: str) -> str:
    """A folder of transformers with all weights away from where they begin; the class's name."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    # what save_pretrained leaves out of a config.json, as it is the default of the class
    (Path(folder) / "config.json").write_text(json.dumps({**made.to_dict(), **settings}))
    return type(model).__name__


def other_layouts(folder: str, tensor: int = 2) -> str | None:
    """Return how layouts of `tensor_parallel(model)` and of `model.hf` differ; None: nowhere."""
    from transformers import AutoModelForCausalLM

    of_run = shape_of_section({"hf": folder}, SEQ_LEN, False, tensor)
    model = AutoModelForCausalLM.from_config(known_settings(of_run.given))
    split = find_split(shape_of(model, tensor), model)
    trained, mine = layouts(of_run), {x.name: x for x in split.layouts.values()}
    names = {n for n in {**trained, **mine} if trained.get(n) != mine.get(n)}
    where = ", ".join(sorted(names)[:3])
    return f"tensor_parallel and model.hf split {where} differently" if names else None


@contextmanager
def computing(mode: str) -> Iterator[None]:
    """Let transformers compute as one of MODES says."""
    with everywhere_float64() if mode == "everywhere" else nullcontext():
        COMPUTING[get_ident()] = mode
        try:
            yield
        finally:
            del COMPUTING[get_ident()]


def _widen(model: nn.Module) -> Any:
    """Make float64 what a class makes in float32, as weights of routers, whatever its dtype is."""
    for parameter in model.parameters():
        if parameter.dtype == _FLOAT32:
            parameter.data = parameter.data.double()
    return model


@contextmanager
def wide_parameters() -> Iterator[None]:
    """Let models of a run be made with parameters of float64 alone. Threads may overlap in it."""
    if not _PLAIN:
        _PLAIN.append(transformers_meta.on_meta)
        plain = _PLAIN[0]
        transformers_meta.on_meta = lambda *given, **more: _widen(plain(*given, **more))
    _WIDE.append(True)
    try:
        yield
    finally:
        _WIDE.pop()
        if not _WIDE:
            transformers_meta.on_meta = _PLAIN.pop()


@contextmanager
def narrow() -> Iterator[None]:
    """Let torch be as it is outside of `everywhere_float64`, within it."""
    wide = torch.get_default_dtype()
    torch.set_default_dtype(_FLOAT32)
    try:
        with (
            patch.multiple(torch, float=_FLOAT32, float32=_FLOAT32),
            patch.object(torch.Tensor, "float", _TO_FLOAT32),
        ):
            yield
    finally:
        torch.set_default_dtype(wide)


@contextmanager
def unsampled() -> Iterator[None]:
    """Let the routers of PhiMoE choose the most likely experts, as in evaluation."""
    from transformers.models.phimoe import modeling_phimoe as phimoe

    sampled = phimoe.sparsemixer

    def unsampled(scores: Tensor, jitter_eps: float, training: bool, top_k: int = 2) -> Any:
        return sampled(scores, jitter_eps, False, top_k)

    with patch.object(phimoe, "sparsemixer", unsampled):
        yield


def truth_of(folder: str) -> tuple[str, Answer] | None:
    """The first of MODES in which transformers itself takes steps, and these; None: in none."""
    for mode in MODES:
        try:
            return mode, alone(folder, 1, mode=mode)
        except Exception:  # what a class raises that knows no float64
            continue
    return None


def alone(
    folder: str,
    parts: int,
    num_steps: int = STEPS,
    scale: float = 1.0,
    mode: str = MODES[0],
    is_packed: bool = False,
    adapters: tuple[dict[str, Tensor], dict[str, Any]] | None = None,
) -> Answer:
    """Steps of transformers' model in one process, without this package. parts: see `loss_of`.

    The loss is multiplied by `scale` before its backward and gradients are divided by it after.
    is_packed: samples are documents, each run alone. adapters: those of peft alone are trained,
    from these values, with these options.
    """
    from transformers import AutoModelForCausalLM

    section = parity.config([*RUN, f"model.hf={folder}"])
    dtype = torch.float32 if mode == "float32" else torch.float64
    if adapters is None:
        model = AutoModelForCausalLM.from_pretrained(folder, **build_options(dtype)).train()
    else:
        with exact_targets():
            model = peft_model(folder, *adapters, dtype=dtype)
    if mode == MODES[0]:
        _widen(model)
    if adapters is None:
        tied, fixed = getattr(model, "all_tied_weights_keys", {}), _fixed(model)
        named = {tied.get(n, n): p for n, p in model.named_parameters() if n not in fixed}
    else:
        named = {plain(n): p for n, p in model.named_parameters() if p.requires_grad}
    optim, decay = section.optim, section.optim.weight_decay
    shrinks = {model.get_parameter(name) for name in decaying(model)}
    groups = [
        {"params": [p for p in named.values() if p in shrinks], "weight_decay": decay},
        {"params": [p for p in named.values() if p not in shrinks], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    kind = PackedTokens if is_packed else UnevenTokens
    data, gradients, losses = kind(SEQ_LEN, VOCAB), [], []
    for step in range(1, num_steps + 1):
        ids, targets, *positions = data.batch("train", section.run.seed, step, 0, 1, BATCH)
        adam.zero_grad()
        with computing(mode):
            if is_packed:
                loss = loss_of_documents(model, ids, targets, positions[0])
            else:
                loss = loss_of(model, ids, targets, parts)
            (loss * scale).backward()
        for parameter in named.values():
            if parameter.grad is not None and scale != 1.0:
                parameter.grad /= scale
        gradients.append(whole({name: p.grad for name, p in named.items()}))
        for group in adam.param_groups:
            group["lr"] = optim.lr * warmup_cosine(
                step - 1, warmup_steps=0, num_steps=5, min_ratio=optim.min_lr_ratio
            )
        adam.step()
        losses.append(loss.item())
    return whole(named), gradients, losses


def _fixed(model: Any) -> set[str]:
    """Tables that a constructor keeps from training, as sinusoidal positions: from_pretrained of
    transformers 5 forgets that."""
    with keep_random_states():
        made = type(model)(model.config)
    return {name for name, p in made.named_parameters() if not p.requires_grad}


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor, parts: int) -> Tensor:
    """The mean of the tokens' losses, with what transformers adds for the routers: of the whole
    batch, or of each of its `parts`, as of two ranks or two microbatches."""
    total = torch.zeros((), dtype=torch.float64)
    for part, wanted in zip(ids.chunk(parts), targets.chunk(parts), strict=True):
        output: Any = model(input_ids=part, use_cache=False, return_dict=True)
        logits, count = output.logits.flatten(0, 1), (wanted != -100).sum()
        total = total + F.cross_entropy(logits, wanted.flatten(), reduction="sum")
        if getattr(output, "aux_loss", None) is not None:
            total = total + model.config.router_aux_loss_coef * output.aux_loss * count
    return total / (targets != -100).sum()


def loss_of_documents(
    model: nn.Module, ids: Tensor, targets: Tensor, position_ids: Tensor
) -> Tensor:
    """The mean of the tokens' losses, each document alone."""
    total = torch.zeros((), dtype=torch.float64)
    for row, wanted, positions in zip(ids, targets, position_ids, strict=True):
        lengths = (positions == 0).nonzero().flatten().tolist()
        ends = [*lengths[1:], len(row)]
        for begin, end in zip(lengths, ends, strict=True):
            output: Any = model(input_ids=row[None, begin:end], use_cache=False, return_dict=True)
            total = total + F.cross_entropy(output.logits[0], wanted[begin:end], reduction="sum")
    return total / (targets != -100).sum()


def steps(
    overrides: list[str],
    num_steps: int = STEPS,
    mode: str = MODES[0],
    begins: list[parity.Held] | None = None,
) -> Answer:
    """The same on this rank of a layout. begins: gets the weights before the first step."""
    dtype = "float32" if mode == "float32" else "float64"
    config = parity.config([*RUN, f"precision.dtype={dtype}", *overrides])
    plan = make_plan(config, dist.get_world_size())
    if "Packed" in str(config.data.target):  # tried before all is float64
        _ = shape_of_section({"hf": config.model.hf}, SEQ_LEN, False).documents_way
    with wide_parameters() if mode == MODES[0] else nullcontext():
        run = build(plan, dist.get_rank(), primitives.device_of(dist.group.WORLD))
    if begins is not None:
        begins.append(parity.held(run, "data"))
    plain = run.accumulate

    def accumulate(*args: Any, **how: Any) -> Tensor:
        with computing(mode):
            return plain(*args, **how)

    run.accumulate = accumulate
    gradients, losses = [], []
    for step in range(1, num_steps + 1):
        losses.append(run.train_step(step).wait().loss)
        gradients.append(_gradients(run))
    return parity.held(run, "data"), gradients, losses


def _gradients(run: Trainer) -> parity.Held:
    """But for what no token reaches, which has none."""
    if not isinstance(run.optimizer, ShardedOptimizer):
        return parity.held(run, "grad")
    place = TopologyRank(run.plan.topology, run.rank)
    layouts = {p: run.layouts[name] for name, p in run.stage.named_parameters()}
    shards = [s for s in run.optimizer.shards if s.tensor.grad is not None]
    mine = [place.sliced(layouts[s.parameter], s, s.tensor.grad) for s in shards]
    return [(x.name, x.shape, where, t.clone()) for x in mine for where, t in x.parts]


def largest_difference(found: list[Answer], truth: Answer, mode: str = MODES[0]) -> float:
    """Of any weight, gradient or loss, relative to the largest element of its tensor.

    Where a class rounds to float32 itself, of the losses and of the first step's gradients:
    AdamW makes whole steps of rounded zeros.

    What has no gradient but rounding, as a bias of keys, counts by its size.
    """
    worst = 0.0
    for losses in (answer[2] for answer in found):
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(losses, truth[2], strict=True)))
    pairs = [([answer[0] for answer in found], truth[0])]
    pairs += [([x[1][i] for x in found], mine) for i, mine in enumerate(truth[1])]
    pairs = pairs if mode == MODES[0] else pairs[1:2]
    for mine, true in pairs:
        held, expected = parity.whole(mine, rtol=1e-6, atol=1e-9), parity.whole([true])
        missing = expected.keys() - held.keys()
        assert not missing, f"{sorted(missing)[:3]} are on no rank"
        for name, x in expected.items():
            scale = x.abs().max().clamp(min=1e-6)
            worst = max(worst, ((held[name] - x).abs().max() / scale).item())
    return worst


def steps_from(
    overrides: list[str], num_steps: int = STEPS, mode: str = MODES[0]
) -> tuple[parity.Held, Answer]:
    """Weights of a run before its first step, and its steps."""
    begins: list[parity.Held] = []
    answer = steps(overrides, num_steps, mode, begins)
    return begins[0], answer


def loads(overrides: list[str]) -> dict[str, tuple[int, ...]]:
    """Choices of each expert in the first step, by mixture."""
    found = parity.trainer([*RUN, *overrides]).train_step(1).wait()
    assert found.expert_imbalance is not None
    return {name: load.choices for name, load in found.experts.items()}


def export(folder: str, run: str, overrides: list[str]) -> None:
    """A checkpoint before the first step, which the first rank writes as a folder, `run`/out."""
    made = parity.trainer([*RUN, f"model.hf={folder}", *overrides])
    saved = save_state(made, TrainState(), Path(run), keep_last=1)
    assert made.plan.model is not None
    if made.rank == 0:
        export_checkpoint(saved, made.plan.model, Path(run) / "out", like=folder)
