"""Which causal language models of transformers train on which layouts: tried one by one.

    scripts/coverage                      all of them; writes docs/model_classes.md and the line
                                          of docs/hugging_face.md that counts them
    scripts/coverage --state FILE         the same in pieces: cells that the page or FILE has are
                                          not tried again
    scripts/coverage --again              but those that are not right are
    scripts/coverage --again olmo2        and all cells of a class that is named
    scripts/coverage --seconds 240        ends after so many, and writes what there is
    scripts/coverage --columns context    a few columns, by the beginnings of their names
    scripts/coverage olmo2 mixtral        a few, printed alone
    scripts/coverage --layouts            the layouts of all of them alone: minutes, and no step

Each class is made small, trained for three AdamW steps in float64 on two ranks, which are threads
of one process, and compared with transformers: losses, gradients and weights. The layouts of
`tensor_parallel(model)` are compared with those of the run.
"""

import argparse
import importlib
import json
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tests.models import coverage_ranks
from tests.models.found_cases import SHARED
from tests.models.thread_pool import ThreadPool
from torchdistpackage.models.shrunk_config import shrunk, without_dropout

DOCS = Path(__file__).parents[2] / "docs"
PAGE, SUMMARY = DOCS / "model_classes.md", DOCS / "hugging_face.md"
BEGIN = "Of the "
"""Of the line that says it on both pages."""
PIPE, TENSOR = ["parallel.pipe=2", "pipeline.microbatches=2"], ["parallel.tensor=2"]
DATA = ["parallel.data=2"]
AXES = {
    "data 2": DATA,
    "ZeRO 3": [*DATA, "parallel.zero=3"],
    "pipe 2": PIPE,
    "tensor 2": TENSOR,
    "pipe 2 x tensor 2": [*PIPE, *TENSOR],
    "sequence parallel": [*TENSOR, "parallel.sequence_parallel=true"],
    "context 2": ["parallel.context=2"],
    "expert 2": [*DATA, "parallel.expert=2"],
    "packed documents": ["data.target=tests.train.sources:PackedTokens"],
    "LoRA": DATA,
    "compile": ["train.compile=blocks", "train.compile_backend=aot_eager"],
    "export": [*DATA, "parallel.zero=3"],
}
TEN = tuple(x for x in AXES if x not in ("data 2", "pipe 2 x tensor 2"))
"""The columns whose share the page prints."""
TWELVE = {
    "Llama 4": ("llama4", "llama4_text"),
    "Qwen 3, 3-Next, 3.5": ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text"),
    "DeepSeek V3, V4": ("deepseek_v3", "deepseek_v4"),
    "GLM 4 MoE": ("glm4_moe",),
    "Kimi": ("kimi_linear",),
    "Gemma 3, 4": ("gemma3", "gemma3_text", "gemma4", "gemma4_text"),
    "GPT-OSS": ("gpt_oss",),
    "Mamba 2": ("mamba2",),
    "OLMo 3": ("olmo3",),
    "Nemotron-H": ("nemotron_h",),
    "Mixtral": ("mixtral",),
    "Phi": ("phi", "phi3", "phimoe"),
}
"""Families that come first, and whose share the page prints apart."""
NOT_THERE = "does not apply: "
"""Before why a column does not apply to a class."""
_NO_LAYER_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_LAYER_INPUT}},
}
"""What a class needs where its own default settings are refused."""
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
_INDEXER |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
LACKING: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": [3, 4]},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}
"""What a class needs that its own default settings leave out."""
SAMPLED = ("phimoe",)
"""Classes whose routers sample experts, which no two runs do alike: here without the noise."""
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
    *("roformer", "xlm-roberta", "xlm-roberta-xl"),
)
LACKING |= {name: {"is_decoder": True} for name in ENCODERS}
"""Without it they see the tokens that they are to predict, and are refused."""
EXACT, ROUNDED = 1e-9, 1e-5
"""Differences, relative to the largest element: of classes that compute in float64 throughout, and
of those that round to float32 within, as for routers and rotary tables."""
STOPPED = "**stopped**: "
"""Before what a run raised that was not refused before it began, which no class is to do."""
SPREAD, SCALE = 4.0, 7.0
"""A class whose own parameters are float32 differs from itself when its loss is multiplied by SCALE
and its gradients are divided by it: AdamW makes whole steps of rounded zeros. By at most SPREAD
times as much it may differ on a layout."""
LIMIT_S = 400.0
"""For all columns of one class."""
PRELOAD = ("torch._dynamo", "transformers", "peft", "torchdistpackage.train.worker")
"""What a class needs, so that its fork does not import it."""
OK, OK_ROUNDED = "ok", "ok, float32 within"
"""Cells of the page that are right."""


def names() -> list[str]:
    """All model types that transformers has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def third(of: list[str], day: date) -> list[str]:
    """Those that are tried on a day, another third each day."""
    return [name for index, name in enumerate(of) if (index + day.toordinal()) % 3 == 0]


def settings(name: str, **changes: object) -> dict[str, Any]:
    """A small config.json of a class, by its default settings, without dropout, and changed."""
    from transformers import CONFIG_MAPPING

    lacking = LACKING.get(name, {})
    whole = CONFIG_MAPPING[name](**WHOLE.get(name, {})).to_dict()
    small = shrunk(_merged(whole, {**lacking, "model_type": name}))
    return {**_merged(without_dropout(small), lacking), **changes}


def _merged(given: Mapping[Any, Any], more: Mapping[Any, Any]) -> dict[Any, Any]:
    """`given` with `more`, section by section."""
    both = [k for k, x in more.items() if isinstance(x, dict) and isinstance(given.get(k), dict)]
    return {**given, **more, **{key: _merged(given[key], more[key]) for key in both}}


def exempt(small: Mapping[str, Any], axis: str) -> str | None:
    """Why a column does not apply to a class with these settings; None: it does."""
    if axis == "expert 2" and not any(_counts_experts(small)):
        return "its config counts no experts"
    return None


def _counts_experts(settings: Mapping[str, Any]) -> Iterator[bool]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _counts_experts(value)
        yield "expert" in str(key) and type(value) is int and value > 1
        yield key in ("moe_k", "moe_topk") and type(value) is int and value > 1


def rows(
    pool: ThreadPool,
    wanted: list[str],
    axes: Mapping[str, list[str]] = AXES,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[dict]:
    """For each name its class, and by axis the difference or the reason of the refusal.

    known: cells that are not tried again, by name.
    """
    for name in wanted:
        row: dict[str, Any] = {"name": name}
        missing = {x: axes[x] for x in axes if x not in (known or {}).get(name, {})}
        if not missing or "why" in (known or {}).get(name, {}):
            continue
        quiet = coverage_ranks.unsampled() if name in SAMPLED else nullcontext()
        with tempfile.TemporaryDirectory() as folder, quiet:
            at = f"{folder}/model"
            small, alone = settings(name), coverage_ranks.alone
            for axis in list(missing):
                if (why := exempt(small, axis)) is not None:
                    row[axis] = NOT_THERE + why
                    del missing[axis]
            if (why := pool(1).run(coverage_ranks.refused_settings, small)[0]) is not None:
                yield {**row, "why": why}
                continue
            try:
                row["class"] = pool(1).run(coverage_ranks.make_folder, small, at)[0]
                found = pool(1).run(coverage_ranks.truth_of, at)[0]
            except Exception as error:  # whatever transformers raises
                yield {**row, "why": STOPPED + _last_line(error)}
                continue
            steps, mode, truths = coverage_ranks.STEPS, coverage_ranks.MODES[0], {}
            has_routers = pool(1).run(coverage_ranks.counts_routers, at)[0]
            if found is not None:
                mode, truths[1] = found
                row |= {} if mode == coverage_ranks.MODES[0] else {"mode": mode}
            for axis, overrides in missing.items():
                if axis in SPECIAL:
                    row[axis] = SPECIAL[axis](pool, at, truths, mode)
                    continue
                # ranks with data of their own count the routers' loss apart, if they have one
                apart = has_routers and "parallel.data=2" in overrides and name not in SHARED
                if apart and truths and 2 not in truths:
                    truths[2] = pool(1).run(alone, at, 2, steps, 1.0, mode)[0]
                run = [f"model.hf={at}", *overrides]
                row[axis] = tried(pool, run, truths.get(2 if apart else 1), _size(overrides), mode)
            if isinstance(row.get("tensor 2"), float):
                try:
                    why = pool(1).run(coverage_ranks.other_layouts, at)[0]
                except Exception as error:
                    why = _last_line(error)
                if why is not None:
                    row["tensor 2"] = STOPPED + why
            if any(isinstance(x := row.get(a), float) and x > ROUNDED for a in missing):
                scaled = pool(1).run(alone, at, 1, steps, SCALE, mode)
                row["spread"] = coverage_ranks.largest_difference(scaled, truths[1])
        yield row


Truths = dict[int, coverage_ranks.Answer]


def _packed(pool: ThreadPool, at: str, truths: Truths, mode: str) -> float | str:
    """Documents of packed samples, beside transformers on each alone."""
    if (why := pool(1).run(coverage_ranks.refused_documents, at)[0]) is not None:
        return why
    run = [f"model.hf={at}", *AXES["packed documents"]]

    def truth() -> coverage_ranks.Answer:
        given = at, 1, coverage_ranks.STEPS, 1.0, mode, True
        return pool(1).run(coverage_ranks.alone, *given)[0]

    return _compared(pool, run, truth, 1, mode)


def _adapted(pool: ThreadPool, at: str, truths: Truths, mode: str) -> float | str:
    """Adapters on all linear layers of the blocks, beside peft."""
    run = [f"model.hf={at}", *DATA, "model.lora={r: 2, alpha: 4, target: [all-linear]}"]
    if (why := pool(1).run(coverage_ranks.refusal, run, 2)[0]) is not None:
        return why
    try:
        found = pool(2).run(coverage_ranks.steps_from, run, coverage_ranks.STEPS, mode)
        initial = [begins for begins, _ in found]
        layers = (name.partition(".lora_")[0] for name, *_ in initial[0] if ".lora_" in name)
        options = {"r": 2, "lora_alpha": 4, "target_modules": sorted(set(layers))}
        truth = pool(1).run(coverage_ranks.lora_truth, at, initial, options, 1, mode)[0]
        return coverage_ranks.largest_difference([answer for _, answer in found], truth, mode)
    except Exception as error:
        return STOPPED + _last_line(error)


def _compiled(pool: ThreadPool, at: str, truths: Truths, mode: str) -> float | str:
    """Blocks of one graph each, in one process."""
    run = [f"model.hf={at}", *AXES["compile"]]
    cell = tried(pool, run, truths.get(1), 1, mode)
    for plain in coverage_ranks.MODES[1:] if mode == coverage_ranks.MODES[0] else ():
        if not (isinstance(cell, str) and _MIXED.search(cell)):
            break
        # a compiler does not see that float() is to give float64
        given = at, 1, coverage_ranks.STEPS, 1.0, plain
        cell = _compared(
            pool, run, lambda given=given: pool(1).run(coverage_ranks.alone, *given)[0], 1, plain
        )
    if isinstance(cell, str) and (said := _ONE_GRAPH.search(cell)) is not None:
        return said[0]  # the run names the block, and what to set
    return cell


_MIXED = re.compile(r"scalar type|same dtype")
_ONE_GRAPH = re.compile(r"train\.compile=blocks: .* cannot be compiled to one graph.*")


def _exported(pool: ThreadPool, at: str, truths: Truths, mode: str) -> float | str:
    """The folder that a checkpoint of two ranks becomes, as transformers reads it."""
    overrides = AXES["export"]
    if why := pool(1).run(coverage_ranks.refusal, [f"model.hf={at}", *overrides], 2)[0]:
        return why
    with tempfile.TemporaryDirectory() as folder:
        try:
            pool(2).run(coverage_ranks.export, at, folder, overrides)
            return pool(1).run(coverage_ranks.exported_difference, at, f"{folder}/out")[0]
        except Exception as error:
            return STOPPED + _last_line(error)


def _compared(
    pool: ThreadPool,
    run: list[str],
    truth: Callable[[], coverage_ranks.Answer],
    size: int,
    mode: str,
) -> float | str:
    try:
        return tried(pool, run, truth(), size, mode)
    except Exception as error:
        return STOPPED + _last_line(error)


SPECIAL: dict[str, Callable[[ThreadPool, str, Truths, str], float | str]] = {
    "packed documents": _packed,
    "LoRA": _adapted,
    "compile": _compiled,
    "export": _exported,
}
"""Columns with a truth of their own."""


def layouts_alone(pool: ThreadPool, wanted: list[str]) -> Iterator[tuple[str, str]]:
    """For each name how `tensor_parallel(model)` and `model.hf` split it over two ranks:
    `equal`, how they differ, why a run refuses it, or STOPPED and what was raised."""
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder:
            at, small = f"{folder}/model", settings(name)
            try:
                why = pool(1).run(coverage_ranks.refused_settings, small)[0]
                if why is None:
                    pool(1).run(coverage_ranks.make_folder, small, at)
                    run = [f"model.hf={at}", *TENSOR]
                    why = pool(1).run(coverage_ranks.refusal, run, 2)[0]
                if why is None:
                    why = pool(1).run(coverage_ranks.other_layouts, at)[0] or "equal"
            except Exception as error:  # whatever transformers raises
                why = STOPPED + _last_line(error)
        yield name, why


def _size(overrides: list[str]) -> int:
    """Ranks of a layout of two along each axis."""
    two = ("parallel.data=2", PIPE[0], TENSOR[0], "parallel.context=2")
    return 2 ** sum(x in two for x in overrides)


def tried(
    pool: ThreadPool,
    run: list[str],
    truth: coverage_ranks.Answer | None,
    size: int = 2,
    mode: str | None = None,
) -> float | str:
    """How far a run is off `truth`; why it is refused before it begins; or STOPPED and what it
    raised."""
    if (why := pool(1).run(coverage_ranks.refusal, run, size)[0]) is not None:
        return why
    if truth is None:
        return f"{STOPPED}transformers itself takes no step"
    try:
        found = pool(size).run(coverage_ranks.steps, run, coverage_ranks.STEPS, mode)
        return coverage_ranks.largest_difference(found, truth, mode or coverage_ranks.MODES[0])
    except Exception as error:
        return STOPPED + _last_line(error)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if (graph := next(filter(_ONE_GRAPH.search, lines), None)) is not None:
        return graph[-600:] if len(graph) < 600 else graph[graph.find("train.compile") :][:600]
    return (lines[-1] if lines else repr(error))[-600:]


def summary(found: list[dict[str, Any]]) -> str:
    """How many train along each axis, in a sentence or three."""
    import transformers

    cells = [(row, axis) for row in found for axis in AXES]
    counts = ", ".join(f"{sum(is_right(row, axis) for row in found)} on {axis}" for axis in AXES)
    wrong = sum(isinstance(row.get(axis), float) and not is_right(row, axis) for row, axis in cells)
    stopped = sum(str(row.get(axis, row.get("why"))).startswith(STOPPED) for row, axis in cells)
    untried = sum(axis not in row and "why" not in row for row, axis in cells)
    return (
        f"{BEGIN}{len(found)} causal language models of transformers {transformers.__version__} "
        f"train, and equal one process: {counts}. Wrong: {wrong}. Stopped by an exception: "
        f"{stopped}. Not tried: {untried} cells."
    )


def shares(found: list[dict[str, Any]]) -> str:
    """The share of the ten columns that is right: of all cells, of those that apply, and of the
    families that come first."""
    first = {name for names_ in TWELVE.values() for name in names_}
    texts = [
        f"{what}: {_share([row for row in found if row['name'] in some])}"
        for what, some in (("All classes", {row["name"] for row in found}), ("Twelve", first))
    ]
    return "\n\n".join(texts)


def _share(found: list[dict[str, Any]]) -> str:
    cells = [(row, axis) for row in found for axis in TEN]
    right = sum(is_right(row, axis) for row, axis in cells)
    apart = sum(str(row.get(axis, "")).startswith(NOT_THERE) for row, axis in cells)
    apply = max(len(cells) - apart, 1)
    return (
        f"{right} of {len(cells)} cells of ten columns are right ({right / max(len(cells), 1):.1%})"
        f", of the {apply} that apply {right / apply:.1%}"
    )


def page(found: list[dict[str, Any]]) -> str:
    """The table as a page."""
    head = [
        "# Classes of transformers, one by one",
        "",
        summary(found),
        "",
        shares(found),
        "",
        f"The ten are {', '.join(TEN)}. The twelve families: "
        + "; ".join(f"{family} ({', '.join(some)})" for family, some in TWELVE.items())
        + ". *does not apply* stands where the config counts no experts, and nowhere else: "
        + (", ".join(f"`{row['name']}`" for row in found if _is_exempt(row)) or "no class")
        + ".",
        "",
        "`scripts/coverage` writes this page: each class made small, three AdamW steps in float64 "
        "on two ranks, threads of one process, beside transformers; losses, gradients and weights. "
        f"*ok*: within {EXACT:.0e}; *ok, float32 within*: within {ROUNDED:.0e}, as the class "
        f"itself rounds to float32, or within {SPREAD:.0f} times what transformers differs from "
        f"itself when its loss is multiplied by {SCALE:.0f} and its gradients are divided by it; "
        "of a class that keeps parameters in float32, or that a compiler cannot take in float64, "
        "losses and the first step's gradients. "
        "Any other text is the refusal that `tdp plan` and `tdp train` give before the class runs.",
        "",
        f"| model_type | class | {' | '.join(AXES)} |",
        f"|---|---|{'---|' * len(AXES)}",
    ]
    lines = [
        f"| `{row['name']}` | {row.get('class', '')} | "
        + " | ".join(_cell(row, axis) for axis in AXES)
        + " |"
        for row in found
    ]
    return "\n".join([*head, *lines]) + "\n"


def _is_exempt(row: Mapping[str, Any]) -> bool:
    return any(str(row.get(axis, "")).startswith(NOT_THERE) for axis in TEN)


def is_right(row: Mapping[str, Any], axis: str) -> bool:
    """Whether a class trains along an axis, and as one process does."""
    value = row.get(axis)
    if isinstance(value, str):
        return value in (OK, OK_ROUNDED)
    return value is not None and value <= max(ROUNDED, SPREAD * row.get("spread", 0.0))


def _cell(row: Mapping[str, Any], axis: str) -> str:
    value = row.get(axis, row.get("why", "not tried"))
    if isinstance(value, str):
        text = re.sub(r"^model\.hf=\S+: ", "", value)
        return text.replace("|", "/").replace("\n", " ")
    if value <= EXACT:
        return OK
    return OK_ROUNDED if is_right(row, axis) else f"**wrong**: off by {value:.1e}"


def _is_settled(value: object) -> bool:
    """Whether a cell need not be tried again: it is a number, or does not apply."""
    return isinstance(value, float) or str(value).startswith((OK, NOT_THERE))


def from_page() -> dict[str, dict[str, Any]]:
    """Rows as the page has them: the text of each cell that was tried."""
    done: dict[str, dict[str, Any]] = {}
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for line in (x for x in lines if x.startswith("| `")):
        _, name, kind, *cells, _ = (cell.strip() for cell in line.split("|"))
        tried = zip(AXES, cells, strict=False)
        row: dict[str, Any] = {axis: cell for axis, cell in tried if cell != "not tried"}
        done[name.strip("`")] = {"name": name.strip("`"), "class": kind, **row}
    return done


def forked(name: str, axes: Mapping[str, list[str]], known: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one class, tried in a fork of this process, which has imported all that it needs
    and is not changed by what a class does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                torch.set_num_threads(1)
                for row in rows(ThreadPool(), [name], axes, {name: known}):
                    file.write_text(json.dumps(row))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        ends = time.monotonic() + LIMIT_S
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.1)
        if file.exists():
            return json.loads(file.read_text())
    return {"name": name, **{x: f"{STOPPED}no answer" for x in axes if x not in known}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--columns", nargs="*", default=[""])
    asked = parser.parse_args()
    wanted = asked.names or names()
    ends = None if asked.seconds is None else time.monotonic() + asked.seconds
    axes = {x: AXES[x] for x in AXES if x.startswith(tuple(asked.columns))}
    if asked.layouts:
        for name, found in layouts_alone(ThreadPool(), wanted):
            print(f"{name}: {found}", flush=True)
        return
    done = from_page()
    if asked.state is not None and asked.state.exists():
        for row in map(json.loads, asked.state.read_text().splitlines()):
            done.setdefault(row["name"], {}).update(row)
    known = done
    if asked.again:  # of classes that are named all cells, else those that are not right
        known = {
            name: {x: v for x, v in row.items() if x not in axes or _is_settled(v)}
            for name, row in done.items()
            if name not in asked.names
        }
    for module in PRELOAD:
        importlib.import_module(module)
    first = [name for names_ in TWELVE.values() for name in names_]
    for name in sorted(wanted, key=lambda name: name not in first):
        if ends is not None and time.monotonic() > ends:
            break
        if not [x for x in axes if x not in known.get(name, {})] or "why" in known.get(name, {}):
            continue
        row = forked(name, axes, known.get(name, {}))
        done.setdefault(name, {}).update(row)
        print(json.dumps(row), flush=True)
        if asked.state is not None:
            with asked.state.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if not asked.names:
        found = [done.get(name, {"name": name}) for name in wanted]
        for row in found:
            for axis in (x for x in AXES if x not in row and "why" not in row):
                if (why := exempt(settings(row["name"]), axis)) is not None:
                    row[axis] = NOT_THERE + why  # needs no trial
        PAGE.write_text(page(found), encoding="utf-8")
        old = SUMMARY.read_text(encoding="utf-8").splitlines()
        new = [summary(found) if line.startswith(BEGIN) else line for line in old]
        SUMMARY.write_text("\n".join(new) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
