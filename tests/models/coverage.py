"""Which causal language models of transformers train on which layouts: tried one by one.

    scripts/coverage                      all of them; writes docs/model_classes.md and the line
                                          of docs/hugging_face.md that counts them
    scripts/coverage --state FILE         the same in pieces: what FILE has is not tried again
    scripts/coverage olmo2 mixtral        a few, printed alone

Each class is made small, trained for three AdamW steps in float64 on two ranks, and compared with
transformers in one process: losses, gradients and weights.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from tests.models import coverage_ranks
from torchdistpackage.families.found import SHARED
from torchdistpackage.harness.pool import RankPool
from torchdistpackage.models.shrunk_config import shrunk

DOCS = Path(__file__).parents[2] / "docs"
PAGE, SUMMARY = DOCS / "model_classes.md", DOCS / "hugging_face.md"
BEGIN = "Of the "
"""Of the line that says it on both pages."""
PIPE, TENSOR = ["parallel.pipe=2", "pipeline.microbatches=2"], ["parallel.tensor=2"]
AXES = {
    "data 2": ["parallel.data=2"],
    "ZeRO 3": ["parallel.data=2", "parallel.zero=3"],
    "pipe 2": PIPE,
    "tensor 2": TENSOR,
    "pipe 2 x tensor 2": [*PIPE, *TENSOR],
}
LACKING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
}
"""What a class needs that its own default settings leave out."""
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
SPREAD, SCALE = 4.0, 7.0
"""A class whose own parameters are float32 differs from itself when its loss is multiplied by SCALE
and its gradients are divided by it: AdamW makes whole steps of rounded zeros. By at most SPREAD
times as much it may differ on a layout."""
PRELOAD = (
    "torch._dynamo",
    "torchdistpackage.train.worker",
    "transformers",
    "tests.models.coverage_ranks",
)
_SHOWN = 170


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

    whole = CONFIG_MAPPING[name]().to_dict()
    small = shrunk({**whole, **LACKING.get(name, {}), "model_type": name})
    return {**_calm(small), **LACKING.get(name, {}), **changes}


def _calm(small: Mapping[Any, Any]) -> dict[Any, Any]:
    """Without dropout, which ranks draw otherwise."""
    return {
        key: _calm(x) if isinstance(x, dict) else 0.0 if _drops(key, x) else x
        for key, x in small.items()
    }


def _drops(key: object, value: object) -> bool:
    return "drop" in str(key) and isinstance(value, float)


def rows(pool: RankPool, wanted: list[str], axes: Mapping[str, list[str]] = AXES) -> Iterator[dict]:
    """For each name its class, and by axis the difference or the reason of the refusal."""
    for name in wanted:
        row: dict[str, Any] = {"name": name}
        with tempfile.TemporaryDirectory() as folder:
            at = f"{folder}/model"
            try:
                row["class"] = pool(1).run(coverage_ranks.make_folder, settings(name), at)[0]
                truths = {n: pool(1).run(coverage_ranks.alone, at, n)[0] for n in (1, 2)}
            except Exception as error:  # whatever transformers raises
                row["why"] = _last_line(error)
            else:
                for axis, overrides in axes.items():
                    # ranks with data of their own count the routers' loss apart, if they have one
                    apart = "parallel.data=2" in overrides and name not in SHARED
                    run = [f"model.hf={at}", *overrides]
                    row[axis] = _tried(pool, run, truths[2 if apart else 1], _size(overrides))
                if any(isinstance(row[axis], float) and row[axis] > ROUNDED for axis in axes):
                    scaled = pool(1).run(coverage_ranks.alone, at, 1, coverage_ranks.STEPS, SCALE)
                    row["spread"] = coverage_ranks.largest_difference(scaled, truths[1])
        yield row


def _size(overrides: list[str]) -> int:
    """Ranks of a layout of two along each axis."""
    return 2 ** sum(x in ("parallel.data=2", PIPE[0], TENSOR[0]) for x in overrides)


def _tried(
    pool: RankPool, run: list[str], truth: coverage_ranks.Answer, size: int = 2
) -> float | str:
    try:
        found = pool(size).run(coverage_ranks.steps, run)
        return coverage_ranks.largest_difference(found, truth)
    except Exception as error:  # a refusal, whose reason is shown
        return _last_line(error)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else repr(error))[-600:]


def summary(found: list[dict[str, Any]]) -> str:
    """How many train along each axis, in a sentence or three."""
    import transformers

    cells = [(row, axis) for row in found for axis in AXES]
    counts = ", ".join(f"{sum(is_right(row, axis) for row in found)} on {axis}" for axis in AXES)
    wrong = sum(isinstance(row.get(axis), float) and not is_right(row, axis) for row, axis in cells)
    untried = sum(axis not in row and "why" not in row for row, axis in cells)
    return (
        f"{BEGIN}{len(found)} causal language models of transformers {transformers.__version__} "
        f"train, and equal one process: {counts}. Wrong: {wrong}. Not tried: {untried} cells."
    )


def page(found: list[dict[str, Any]]) -> str:
    """The table as a page."""
    head = [
        "# Classes of transformers, one by one",
        "",
        summary(found),
        "",
        "`scripts/coverage` writes this page: each class made small, three AdamW steps in float64 "
        "on two ranks beside transformers in one process; losses, gradients and weights. "
        f"*ok*: within {EXACT:.0e}; *ok, float32 within*: within {ROUNDED:.0e}, as the class "
        f"itself rounds to float32, or within {SPREAD:.0f} times what transformers differs from "
        f"itself when its loss is multiplied by {SCALE:.0f} and its gradients are divided by it.",
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


def is_right(row: Mapping[str, Any], axis: str) -> bool:
    """Whether a class trains along an axis, and as one process does."""
    value = row.get(axis)
    return isinstance(value, float) and value <= max(ROUNDED, SPREAD * row.get("spread", 0.0))


def _cell(row: Mapping[str, Any], axis: str) -> str:
    value = row.get(axis, row.get("why", "not tried"))
    if isinstance(value, str):
        text = value.replace("|", "/").replace("\n", " ")
        return text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"
    if value <= EXACT:
        return "ok"
    return "ok, float32 within" if is_right(row, axis) else f"**wrong**: off by {value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--state", type=Path)
    asked = parser.parse_args()
    wanted = asked.names or names()
    done: dict[str, dict[str, Any]] = {}
    if asked.state is not None and asked.state.exists():
        done = {r["name"]: r for r in map(json.loads, asked.state.read_text().splitlines())}
    with RankPool(preload=PRELOAD) as pool:
        for row in rows(pool, [name for name in wanted if name not in done]):
            done[row["name"]] = row
            print(json.dumps(row), flush=True)
            if asked.state is not None:
                with asked.state.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if not asked.names:
        found = [done[name] for name in wanted]
        PAGE.write_text(page(found), encoding="utf-8")
        old = SUMMARY.read_text(encoding="utf-8").splitlines()
        new = [summary(found) if line.startswith(BEGIN) else line for line in old]
        SUMMARY.write_text("\n".join(new) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
