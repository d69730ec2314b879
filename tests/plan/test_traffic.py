"""Bytes of a step by axis: what the plan counts is what ranks give to their calls, call by call."""

import json
import re
from pathlib import Path

import pytest

from tests.plan.traffic_ranks import Counts, recorded_and_planned
from tests.train.preference_ranks import data_keys
from tests.train.test_lora import TARGETS
from tests.train.test_transformers import MODELS, SMALL
from tests.train.transformers_ranks import save_model
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load, loads
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.traffic import between_nodes, busiest, traffic, uncounted

RANKS_IMPORT = ("tests.plan.traffic_ranks", "peft")
RUN = [
    *("data.seq_len=12", "data.args={seq_len: 12, vocab: 65}", "data.global_batch=8"),
    *("data.target=tests.train.sources:UnevenTokens", "pipeline.microbatches=2"),
    *("train.steps=4", "optim.warmup_steps=0"),
]
GPT = ["model.layers=2", "model.dim=16", "model.heads=4", "model.vocab=65", *RUN]
MOE = ("model.moe.num_experts=4", "model.moe.top_k=2")
MIXTURES = {
    "mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "mlp_only_layers": [],
    },
}
DENSE = {
    name: {**SMALL, "model_type": name, "num_key_value_heads": 2, "pad_token_id": 0}
    for name in ("cohere", "granite", "glm4")
}
"""Without a table here, whose blocks a small copy runs in the order of their layers."""
CONFIGS = MODELS | DENSE | {name: x | {"model_type": name} for name, x in MIXTURES.items()}
SP, TP = "sequence_parallel=true", "tensor=2"
BF16 = ("precision.dtype=bf16", "precision.weights=bf16")
AUTOCAST = ("precision.dtype=bf16",)
REDUCE = "precision.reduce_dtype=bf16"
LARGE = ("model.dim=512", "model.vocab=4096")  # so that there are several buckets
TELLING = [
    (4, "gpt", "data=2", TP, SP, "zero=3", *BF16, REDUCE),
    (4, "gpt", "data=2", "expert=2", "pipe=2", *MOE, "train.recompute=blocks"),
    (4, "llama", "pipe=2", TP, SP, *AUTOCAST),
    (4, "gpt2", "context=2", TP, "cp_comm_type=p2p", REDUCE),
    (4, "llama+lora", "data=2", TP, SP, "zero=1", "train.recompute=blocks"),
    (4, "gpt", "data=4", "zero=3", "zero_group=2", *BF16, REDUCE),
    (4, "gpt", "data=2", "tensor=2", "zero=1", "optim.name=muon", "optim.muon_exchange=together"),
    (4, "gpt", "tensor=4", "optim.name=muon", "optim.muon_exchange=gather"),
    (4, "gpt", "data=4", "zero=2", "optim.name=muon", "train.recompute=auto", "train.memory_gb=1"),
]
"""(4 ranks, model, settings, of which those without a section are of parallel)."""
PAIRS = ["data.name=preference", "data.seq_len=24", "data.val_fraction=0.2"]


def rest():
    """The product of models with what they can be asked for."""
    both = (4, "data=2", "tensor=2")
    for name in ("gpt", "llama", "gpt2", "qwen3", "gpt_neox", "opt", "mistral", "qwen2"):
        for more in ((), (SP,), (SP, *AUTOCAST), (SP, *BF16, "zero=3"), (*AUTOCAST, "zero=1")):
            yield (both[0], name, *both[1:], *more)
        for zero in range(4):
            yield 2, name, "data=2", f"zero={zero}"
            yield 2, name, "data=2", f"zero={zero}", *AUTOCAST, REDUCE
        yield 2, name, "data=2", "zero=3", "train.accumulate=2"
        yield 4, name, "pipe=2", TP, SP
        yield 2, name, "pipe=2", "pipeline.schedule=zb-h1", *AUTOCAST
        if name != "mistral":  # whose window is not counted
            for way in ("p2p", "all_gather", "a2a"):
                yield 2, name, "context=2", f"cp_comm_type={way}", *AUTOCAST
        yield 2, name, TP, "train.recompute=blocks"
        yield 2, name, TP, SP, "train.recompute=blocks"
    for name in ("gemma2", "falcon", "bloom"):
        yield 2, name, TP
        yield 2, name, TP, "train.recompute=blocks"
        yield 2, name, "data=2", "zero=3"
    for name in DENSE:
        yield 2, name, TP, "train.recompute=blocks"
        yield 2, f"{name}+lora", TP
        yield 2, f"{name}+lora", TP, "train.recompute=blocks"
    for name in MIXTURES:
        for more in ((TP,), (TP, *AUTOCAST), ("data=2", "expert=2"), ("context=2",)):
            yield (2, name, *more)
        yield 4, name, "data=2", "expert=2", TP, "zero=2", *AUTOCAST
        yield 2, name, TP, "train.recompute=blocks"
    yield 2, "gpt", "data=2", *LARGE
    yield 2, "gpt", "data=2", *LARGE, "zero=2"
    yield 2, "gpt", "data=2", *LARGE, "zero=3", *BF16
    yield 2, "gpt", "data=2", *LARGE, REDUCE
    yield 2, "gpt", "data=2", *LARGE, "zero=2", REDUCE, "train.accumulate=2"
    yield 4, "gpt", "pipe=2", "data=2", "zero=3"
    for zero in (1, 2, 3):
        group = (f"zero={zero}", "zero_group=2")
        yield 4, "gpt", "data=4", *group, "train.accumulate=2", "data.global_batch=16"
        yield 8, "gpt", "data=4", TP, SP, *group
        yield 8, "gpt", "data=4", "pipe=2", *group
        yield 4, "gpt", "data=4", "expert=2", *MOE, *group
        yield 4, "gpt", "data=4", "expert=4", *MOE, *group
        yield 4, "gpt", "data=4", "optim.name=muon", *group
    yield 4, "gpt", "data=2", "tensor=2", "zero=1", "optim.name=muon"
    yield 2, "gpt", TP, "optim.name=muon", "optim.muon_exchange=gather"
    experts = "data=2", "expert=2", TP, *MOE, "optim.name=muon"
    yield 4, "gpt", *experts, "optim.muon_exchange=together"
    yield 4, "gpt", "pipe=2", TP, "pipeline.schedule=zb-v"
    yield 4, "gpt", "pipe=2", "data=2", "pipeline.schedule=interleaved"
    yield 3, "gpt", "context=3", "cp_comm_type=p2p"
    yield 4, "gpt", "context=4", "cp_comm_type=a2a+p2p", *_longer(16)
    yield 4, "gpt", "context=2", TP, SP, "model.kv_heads=2"
    yield 2, "gpt", TP, "train.recompute=blocks", "model.dropout=0.1"
    yield 4, "llama", TP, "pipe=2", "train.label_smoothing=0.1"
    yield 2, "gpt", TP, SP, *MOE, "model.moe.shared_hidden=8", *AUTOCAST
    yield 2, "gpt", TP, SP, *MOE, "train.recompute=blocks"
    yield 2, "gpt", "data=2", *MOE, "model.moe.balance=bias"
    yield 2, "gpt", "data=2", *MOE, "model.moe.balance=global_aux_loss", "zero=2"
    yield 4, "gpt", "data=2", "expert=2", TP, SP, *MOE
    padded = "model.moe.capacity_factor=0.7", "model.moe.pad_to_capacity=true"
    yield 4, "gpt", "data=2", "expert=2", TP, SP, *MOE, *padded, "train.recompute=blocks"
    yield 2, "gpt", TP, "model.position=learned", "model.mlp=swiglu", "model.norm=rms", SP


def adapted():
    """Adapters on other layers each: where gradients begin decides what goes back."""
    for name in TARGETS:
        for more in ((TP,), (TP, SP), (TP, SP, "train.recompute=blocks"), (TP, *AUTOCAST)):
            yield (2, f"{name}+lora", *more)
        if name != "llama, last block":
            yield 4, f"{name}+lora", TP, "pipe=2"
    name, dora = "llama, rslora+lora", "model.lora.use_dora=true"
    for more in ((TP,), (TP, SP, "train.recompute=blocks"), (TP, *AUTOCAST)):
        yield (2, name, *more, dora)
    for saved in ("[lm_head]", "[norm]", "[embed_tokens]"):
        yield 2, "llama, last block+lora", TP, f"model.lora.modules_to_save={saved}"
    yield 4, "llama, last block+lora", TP, "pipe=2", "model.lora.modules_to_save=[embed_tokens]"


def compared():
    """Pairs of answers, whose reference is a copy, or the model without its adapters."""
    for name in ("gpt", "llama", "llama+lora"):
        yield 2, name, *PAIRS, "data=2", "zero=1"
        yield 2, name, *PAIRS, "pipe=2"
        yield 4, name, *PAIRS, TP, "pipe=2"
        yield 4, name, *PAIRS, TP, SP, "data=2", "train.recompute=blocks", "train.accumulate=2"
    yield 2, "llama", *PAIRS, "data=2", "zero=3"
    yield 2, "gpt", *PAIRS, "pipe=2", "pipeline.schedule=zb-v"
    yield 4, "llama", *PAIRS, "context=2", "pipe=2", "train.recompute=blocks"
    yield 2, "llama+lora", *PAIRS, "context=2", *AUTOCAST
    for loss in ("ipo", "orpo"):
        yield 4, "llama", *PAIRS, f"train.dpo.loss={loss}", "context=2", TP
        yield 2, "llama", *PAIRS, f"train.dpo.loss={loss}", "pipe=2"
    yield 2, "llama", *PAIRS, "train.dpo.loss=simpo", "data=2", "zero=3"


def owned():
    """Optimizers of whole parameters."""
    for name in ("muon", "adafactor", "adamw8bit"):
        for zero in (1, 2, 3):
            yield 2, "gpt", "data=2", f"zero={zero}", f"optim.name={name}"
            yield 2, "llama", "data=2", f"zero={zero}", f"optim.name={name}", *BF16, REDUCE
        yield 4, "gpt", "data=4", "zero=2", f"optim.name={name}"
        yield 4, "gpt", "data=2", "pipe=2", "zero=1", f"optim.name={name}"


def _longer(num: int) -> tuple[str, str]:
    return f"data.seq_len={num}", f"data.args={{seq_len: {num}, vocab: 65}}"


def overrides(case: tuple, folder) -> list[str]:
    _, name, *settings = case
    name, _, is_adapted = name.partition("+")
    base = GPT
    if is_adapted:
        target = ", ".join(TARGETS.get(name, ["k_proj", "o_proj", "down_proj"]))
        adapters = f"model.lora={{r: 3, alpha: 6, target: [{target}]}}"
        base = [*RUN, f"model.hf={folder / name}", adapters]
    elif name != "gpt":
        path = folder / f"{name}.json"
        path.write_text(json.dumps(_settings(name, PAIRS[0] in settings)))
        base = [*RUN, f"model.hf={path}"]
    if PAIRS[0] in settings:
        base = [x for x in base if not x.startswith(("data.args", "data.target"))]
        base += data_keys(folder)
    return [*base, *map(_full, settings)]


def _settings(name: str, compares: bool) -> dict:
    found = CONFIGS.get(name, CONFIGS["llama"])
    return found | {"vocab_size": 300} if compares else found


def save_models(ranks, cases, folder) -> None:
    """The folders that adapters need."""
    for _, name, *settings in cases:
        of, _, is_adapted = name.partition("+")
        if is_adapted:
            ranks(1).run(save_model, _settings(of, PAIRS[0] in settings), str(folder / of))


def expect_equal(results: list[tuple[Counts, Counts]], *, owned: bool = False) -> None:
    """On every rank; of what goes to experts, which routers decide, over all ranks of the group.

    owned: of gathers of whole parameters too, of which the record has the mean part of a rank.
    """
    totals = Counts(), Counts()
    for rank, pair in enumerate(results):
        mine = tuple(Counts() for _ in pair)
        for kept, total, counts in zip(mine, totals, pair, strict=True):
            for key, number in counts.items():
                is_shared = _is_routed(key) or (owned and key[1] == "all_gather")
                (total if is_shared else kept)[key] += number
        assert mine[0] == mine[1], f"rank {rank}: recorded - planned {_difference(*mine)}"
    assert totals[0] == totals[1], f"experts: recorded - planned {_difference(*totals)}"


def _is_routed(key) -> bool:
    return key[1] == "all_to_all"


def _difference(recorded: Counts, planned: Counts) -> dict:
    keys = recorded.keys() | planned.keys()
    return {key: d for key in keys if (d := recorded[key] - planned[key])}


def test_a_step_sends_what_its_plan_counts(ranks, tmp_path):
    """Layouts that have every axis, and each kind of model: all in one call of the ranks."""
    save_models(ranks, TELLING, tmp_path)
    results = ranks(4).run(recorded_and_planned, [overrides(x, tmp_path) for x in TELLING])
    for case, found in zip(TELLING, zip(*results, strict=True), strict=True):
        print(case)  # of which pytest shows the last where one fails
        expect_equal(list(found), owned="optim.name=muon" in case)
        if "zero_group=2" in case:
            for rank, (recorded, _) in enumerate(found):
                expect_between_nodes(planned(tmp_path, case), rank, recorded)


def expect_between_nodes(plan: Plan, rank: int, recorded: Counts) -> None:
    """On two nodes of two ranks: what the record has of groups of both."""
    crossing = sum(
        number
        for (group, _, _, kind), number in recorded.items()
        if kind == "bytes" and group[0] // 2 != group[-1] // 2
    )
    assert between_nodes(traffic(plan, rank), 2) == crossing > 0


MORE = [*rest(), *adapted(), *compared(), *owned()]


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=lambda case: " ".join(map(str, case)))
def test_every_model_sends_what_its_plan_counts(ranks, tmp_path, case):
    save_models(ranks, [case], tmp_path)
    results = ranks(case[0]).run(recorded_and_planned, [overrides(case, tmp_path)])
    is_owned = any(x.startswith("optim.name=") for x in case[1:])
    expect_equal([found for (found,) in results], owned=is_owned)


def planned(tmp_path, case: tuple):
    run = loads("launch: {local: {procs: null}}", overrides=overrides(case, tmp_path))
    return make_plan(run, case[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("case", TELLING[:3], ids=lambda case: case[1])
def test_the_table_has_the_bytes_of_the_busiest_rank(tmp_path, capsys, case):
    (tmp_path / "run.yaml").write_text("launch: {local: {procs: null}}\n")
    args = [str(tmp_path / "run.yaml"), *overrides(case, tmp_path), "--procs", str(case[0])]
    args.append("--bytes")
    assert main(["plan", *args]) == 0
    shown = capsys.readouterr().out
    table = shown.partition("communication per step on rank ")[2].partition("\n\n")[0]
    plan = planned(tmp_path, case)
    rank, calls = busiest(plan)
    assert table.startswith(f"{rank} (")
    rows = re.findall(r"^ *([a-z+]+) +([a-z_]+) +(\w+) +([\d,]+) +([\d,]+)$", table, re.MULTILINE)
    shown = {row[:3]: [int(x.replace(",", "")) for x in row[3:]] for row in rows}
    expected: dict[tuple[str, ...], list[int]] = {}
    for call in calls:
        sums = expected.setdefault((call.axis, call.operation, call.dtype), [0, 0])
        sums[0] += call.number
        sums[1] += int(call.num_bytes)
    assert shown == expected
    every = [sum(x.num_bytes for x in traffic(plan, r)) for r in range(plan.world_size)]
    assert sum(x.num_bytes for x in calls) == max(every)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ((TP, "train.recompute=auto", "train.memory_gb=1"), "has chosen what is computed again"),
        ((TP, "model.loss=my.losses:mean"), "once my.losses:mean runs"),
    ],
)
def test_what_is_known_in_the_run_alone_is_named(tmp_path, more, reason):
    assert reason in uncounted(planned(tmp_path, (4, "gpt", "data=2", *more)))


@pytest.mark.full
def test_stages_in_front_of_the_first_adapter_are_named(ranks, tmp_path):
    case = (4, "llama, last block+lora", TP, "pipe=2")
    save_models(ranks, [case], tmp_path)
    plan = planned(tmp_path, case)
    assert "in front of the first adapter" in uncounted(plan)


def test_a_window_over_parts_of_a_sequence_is_named(tmp_path):
    plan = planned(tmp_path, (2, "mistral", "context=2"))
    assert "a sliding window over parts of a sequence" in uncounted(plan)


@pytest.mark.full
def test_the_table_of_the_page_is_that_of_its_plans():
    root = Path(__file__).parents[2]
    page = (root / "docs/step_bytes.md").read_text().partition("## One model")[2]
    rows = [[x.strip(" `") for x in line.split("|")[1:-1]] for line in page.splitlines()]
    rows = [row for row in rows if len(row) == 5 and row[3].isdigit()]
    assert len(rows) > 20
    one = {"parallel.pipe": "1", "parallel.data": "1", "launch.local.procs": "null"}
    for settings in dict.fromkeys(row[0] for row in rows):
        asked = {
            _full(key): value for key, _, value in (x.partition("=") for x in settings.split())
        }
        config = load(
            root / "configs/gpt_tiny.yaml", [f"{k}={v}" for k, v in (one | asked).items()]
        )
        found: dict[tuple[str, str], list[int]] = {}
        for call in busiest(make_plan(config, 2))[1]:
            sums = found.setdefault((call.axis, call.operation), [0, 0])
            sums[0], sums[1] = sums[0] + call.number, sums[1] + int(call.num_bytes)
        for _, axis, operation, number, size in (row for row in rows if row[0] == settings):
            assert found[axis, operation] == [int(number), int(size.replace(",", ""))], settings


def _full(setting: str) -> str:
    return setting if "." in setting.partition("=")[0] else f"parallel.{setting}"
