"""The predicted peak of a rank, by kind, beside what ranks hold in a step."""

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.plan.memory_ranks import MeasuredMemory, measured_and_predicted, note_of_exhaustion
from tests.plan.test_traffic import CONFIGS
from tests.train import embedding_ranks, head_ranks, parity, preference_ranks, test_unpaired
from tests.train.transformers_ranks import save_model
from torchdistpackage.config.load import loads
from torchdistpackage.plan.memory import least_save_bytes
from torchdistpackage.plan.memory_fit import (
    fit_text,
    largest_micro_batch,
    largest_peak,
    longest_seq_len,
    memory_limit,
)
from torchdistpackage.plan.peak import PeakMemory
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.text import size_text
from torchdistpackage.train.stage_trace import traced

RANKS_IMPORT = ("tests.plan.memory_ranks", "peft")
GPT = [
    *("model.layers=2", "model.dim=64", "model.heads=4", "model.vocab=256", "data.seq_len=64"),
    *("data.args={seq_len: 64, vocab: 256}", "data.target=tests.train.sources:UnevenTokens"),
    *("data.global_batch=8", "pipeline.microbatches=2", "train.steps=4", "optim.warmup_steps=0"),
]
TP, SP, BLOCKS = "tensor=2", "sequence_parallel=true", "train.recompute=blocks"
OFFLOAD = ("train.recompute=offload", "data.seq_len=128", "data.args={seq_len: 128, vocab: 256}")
"""Sequences so long that no storage of a block is too small to be copied."""
LLAMA = ("model.norm=rms", "model.mlp=swiglu", "model.kv_heads=2")
MOE = ("model.moe.num_experts=4", "model.moe.top_k=2")
AUTOCAST, BF16 = ("precision.dtype=bf16",), ("precision.dtype=bf16", "precision.weights=bf16")
GPIPE, INTERLEAVED = "pipeline.schedule=gpipe", "pipeline.schedule=interleaved"
PIPE = ("pipe=2", "pipeline.microbatches=4")
TELLING = [
    (TP, SP, *LLAMA, *AUTOCAST),
    ("data=2", "zero=3", BLOCKS),
    (*PIPE, "pipeline.schedule=zb-h1"),
    ("data=2", "zero=2", "expert=2", *MOE, *BF16),
]
"""Settings, of which those without a section are of parallel, on two ranks."""
MORE = [
    ("data=2",),
    ("data=2", *AUTOCAST),
    ("data=2", "model.vocab=64", "data.args={seq_len: 64, vocab: 64}"),
    ("data=2", "model.position=learned"),
    ("data=2", "model.tied=false"),
    ("data=2", "model.dropout=0.1"),
    ("data=2", "train.accumulate=2"),
    ("data=2", "precision.dtype=float64"),
    ("data=2", "model.layers=4", "data.seq_len=128", "data.args={seq_len: 128, vocab: 256}"),
    ("data=2", *LLAMA),
    ("data=2", *MOE),
    ("data=2", "zero=1"),
    ("data=2", "zero=1", *BF16),
    ("data=2", "zero=2"),
    ("data=2", "zero=2", "pipeline.microbatches=1"),
    ("data=2", "zero=3", *LLAMA, *AUTOCAST),
    ("data=2", "zero=1", "optim.name=sgd"),
    ("data=2", BLOCKS),
    ("data=2", BLOCKS, *LLAMA, *AUTOCAST),
    ("data=2", *OFFLOAD, "model.layers=4"),
    (TP, SP, *OFFLOAD, *LLAMA, *AUTOCAST),
    ("data=2", "expert=2", *MOE, *OFFLOAD, "model.layers=4"),
    ("data=2", "zero=3", *OFFLOAD, "model.layers=4"),
    (*PIPE, *OFFLOAD, "model.layers=8"),
    (*PIPE, *OFFLOAD, GPIPE, "model.layers=8"),
    (*PIPE, *OFFLOAD, INTERLEAVED, "model.layers=8"),
    ("data=2", "expert=2", *MOE),
    ("data=2", "expert=2", *MOE, "model.moe.shared_hidden=32"),
    (TP,),
    (TP, SP),
    (TP, SP, BLOCKS),
    (TP, *MOE),
    (TP, "optim.name=muon"),
    (TP, SP, *AUTOCAST),
    PIPE,
    (*PIPE, *LLAMA, *AUTOCAST),
    (*PIPE, BLOCKS, "model.layers=8"),
    (*PIPE, "pipeline.schedule=interleaved", "model.layers=4"),
    (*PIPE, GPIPE),
    (*PIPE, "pipeline.schedule=zb-v", "model.layers=4"),
    ("context=2", "cp_comm_type=p2p"),
    ("context=2", "cp_comm_type=all_gather", *LLAMA),
    ("context=2", "cp_comm_type=a2a"),
]


def overrides(case: tuple[str, ...]) -> list[str]:
    return [*GPT, *(x if "." in x.partition("=")[0] else f"parallel.{x}" for x in case)]


def expect_predicted(case: tuple[str, ...], measured: MeasuredMemory, peak: PeakMemory) -> None:
    where = " ".join(case)
    assert measured.weights == peak.weights, f"{where}: weights"
    assert measured.gradients in (None, peak.gradients), f"{where}: gradients"
    assert measured.optimizer == peak.optimizer, f"{where}: optimizer state"
    state = peak.weights + peak.gradients + peak.optimizer + peak.buckets
    if GPIPE in case or INTERLEAVED in case:  # worst before some stage has its first gradients
        assert measured.state <= 1.0001 * state, f"{where}: with buffers"
    else:
        assert measured.state == pytest.approx(state, rel=1e-4), f"{where}: with buffers"
    # the router decides which tokens come to a rank's experts, a peer which messages have left
    rel = 0.1 if "expert=2" in case else 0.05
    kept, off = peak.kept + peak.messages, measured.kept - peak.kept - peak.messages
    assert abs(off) <= rel * kept + peak.messages, f"{where}: kept {measured.kept}, not {kept}"
    assert measured.peak == pytest.approx(peak.total, rel=0.1), f"{where}: peak"


def test_the_peak_of_each_rank_is_what_it_holds(ranks):
    found = ranks(2).run(measured_and_predicted, [overrides(case) for case in TELLING])
    for rank in found:
        for case, both in zip(TELLING, rank, strict=True):
            expect_predicted(case, *both)


def test_a_rank_without_memory_says_what_it_holds(ranks):
    case = ("data=2", "zero=1", *BF16)
    for note, actual, peak in ranks(2).run(note_of_exhaustion, overrides(case)):
        rows = {re.split("  +", line.strip())[0]: line for line in note.splitlines()}
        for kind in ("weights", "gradients", "optimizer state"):
            assert size_text(getattr(peak, kind.split()[0])) in rows[kind], "predicted"
            assert size_text(actual[kind]) in rows[kind], "actual"
        # adam's steps are numbers of 4 bytes, and buffers are rounded up
        state = peak.weights + peak.gradients + peak.optimizer + peak.buckets
        assert sum(actual.values()) == pytest.approx(state, rel=1e-3)
        assert "train.recompute: blocks" in note


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=" ".join)
def test_so_it_is_in_every_layout(ranks, case):
    for (both,) in ranks(2).run(measured_and_predicted, [overrides(case)]):
        expect_predicted(case, *both)


@pytest.mark.full
def test_recompute_auto_holds_no_more_than_its_bound(ranks):
    case = ("data=2", "model.layers=4")
    both = [overrides(case), overrides((*case, BLOCKS))]
    (_, whole), (_, least) = ranks(2).run(measured_and_predicted, both)[0]
    state = whole.weights + whole.gradients + whole.optimizer
    between = (whole.activations + least.activations) / 2 + whole.loss
    within = f"train.memory_gb={(state + between) / 1e9}"
    run = overrides((*case, "train.recompute=auto", within))
    for ((measured, peak),) in ranks(2).run(measured_and_predicted, [run]):
        assert least.activations < peak.activations < whole.activations
        assert measured.kept <= peak.activations + peak.loss
        assert measured.peak <= 1.1 * peak.total


UNEVEN = [
    (4, "data=4", "zero=3", "expert=2", *MOE),
    (3, "data=3", "zero=1", "data.global_batch=12"),
    (3, "data=3", "zero=3", "data.global_batch=12", *LLAMA),
    (3, "data=3", "zero=3", "data.global_batch=12", *BF16),
    (3, "data=3", "zero=2", "data.global_batch=12", "optim.name=muon"),
    (4, "data=4", "zero=2", "expert=2", *MOE, *BF16),
]
"""(number of ranks, settings): shards of experts, and shards of unequal length."""


@pytest.mark.full
@pytest.mark.parametrize("case", UNEVEN, ids=lambda case: " ".join(map(str, case)))
def test_so_it_is_of_shards_that_are_not_equal(ranks, case):
    number, *settings = case
    for (both,) in ranks(number).run(measured_and_predicted, [overrides(tuple(settings))]):
        expect_predicted(tuple(settings), *both)


SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 128),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    "vocab_size": 300,
    "n_positions": 64,
}
ADAPTERS = "r: 4, alpha: 8, target: [q_proj, v_proj, down_proj]"
PAIRS = ("data.name=preference", "data.val_fraction=0.2")
ANSWERS = ("data.name=unpaired_preference", "data.val_fraction=0.2", "train.dpo.loss=kto")
OWN = ("model.target=tests.plan.memory_ranks:own_chain", "model.args={dim: 64, vocab: 300}")
TRACED = [
    ("llama", TP, SP),
    ("own", *PIPE),
]
"""A model of transformers, ours or a user's own, and settings, for which stages run without
numbers."""
MORE_TRACED = [
    ("llama+lora", "data=2", *PAIRS),
    ("llama", "data=2"),
    ("llama", "data=2", *AUTOCAST),
    ("llama", "data=2", BLOCKS),
    ("llama", "data=2", "zero=3"),
    ("llama", TP, SP, BLOCKS),
    ("llama", TP, SP, *AUTOCAST),
    ("llama", *PIPE),
    *(("llama", "context=2", f"cp_comm_type={way}") for way in ("p2p", "all_gather", "a2a")),
    ("qwen3", "data=2"),
    ("qwen3", TP),
    ("gpt2", TP),
    ("mixtral", "data=2"),
    ("mixtral", "data=2", "expert=2"),
    ("mixtral", TP),
    ("llama+lora", "data=2"),
    ("llama+lora", TP, SP),
    ("llama+qlora", "data=2"),
    ("gpt", "data=2", *PAIRS),
    ("gpt", TP, *PAIRS),
    ("gpt", "context=2", *PAIRS),
    ("llama", "data=2", *PAIRS),
    ("llama", "data=2", "zero=3", *PAIRS),
    ("gpt", "data=2", *ANSWERS),
    ("llama+lora", "data=2", *ANSWERS),
    ("llama", *PIPE, INTERLEAVED),
    ("llama", TP, "data.name=reward"),
    ("llama", "data=2", "data.name=regression"),
    ("llama", "data=2", "data.name=classification"),
    ("llama", TP, "data.name=token_classification"),
    ("llama", *PIPE, "data.name=classification"),
    ("llama+lora", "data=2", "data.name=reward"),
    ("llama", "data=2", "data.name=embedding"),
    ("llama", "data=2", "zero=1", "data.name=embedding"),
    ("llama", TP, "data.name=embedding"),
    ("own", "data=2"),
    ("own", "data=2", "zero=2", *AUTOCAST),
    ("own", "data=2", BLOCKS),
]


def traced_run(case: tuple[str, ...], folder: Path, ranks) -> list[str]:
    """The overrides of a case, with the folders that it needs."""
    (name, _, adapters), settings = case[0].partition("+"), case[1:]
    run = overrides(settings)
    if name != "gpt":
        run = [x for x in run if not x.startswith("model.")]
    if name == "own":
        run += ["model.name=null", *OWN]
    elif name != "gpt":
        config = {k: SIZES.get(k, x) for k, x in CONFIGS[name].items()} | {"vocab_size": 300}
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        run.append(f"model.hf={path}")
        if adapters:
            ranks(1).run(save_model, config, str(folder / name))
            more = ", load_in_4bit: true" if adapters == "qlora" else ""
            run += [f"model.hf={folder / name}", f"model.lora={{{ADAPTERS}{more}}}"]
    keys = TASK_KEYS.get(next((x for x in settings if x.startswith("data.name=")), ""))
    if keys is None:
        return [
            *run,
            "data.args={seq_len: 64, vocab: 300}",
            *(("model.vocab=300",) * (name == "gpt")),
        ]
    run = [x for x in run if not x.startswith(("data.args", "data.target"))]
    data = [x for x in keys(folder) if name == "gpt" or not x.startswith("model.")]
    return [*run, *data]


def _classes_keys(kind: str, folder: Path) -> list[str]:
    return [*head_ranks.data_keys(kind, folder), f"data.labels=[{', '.join(head_ranks.NAMES)}]"]


TASK_KEYS: dict[str, Callable[[Path], list[str]]] = {
    "data.name=preference": preference_ranks.data_keys,
    "data.name=unpaired_preference": test_unpaired.data_keys,
    "data.name=embedding": embedding_ranks.data_keys,
    **{
        f"data.name={kind}": partial(head_ranks.data_keys, kind)
        for kind in ("regression", "reward")
    },
    **{
        f"data.name={kind}": partial(_classes_keys, kind)
        for kind in ("classification", "token_classification")
    },
}


@pytest.mark.parametrize(
    "case",
    [*TRACED, *(pytest.param(x, marks=pytest.mark.full) for x in MORE_TRACED)],
    ids=" ".join,
)
def test_so_it_is_of_stages_that_ran_without_numbers(ranks, case, tmp_path):
    run = traced_run(case, tmp_path, ranks)
    for (both,) in ranks(2).run(measured_and_predicted, [run]):
        expect_predicted(case, *both)


@pytest.mark.full
def test_a_rank_of_a_traced_model_without_memory_says_what_it_predicts(ranks, tmp_path):
    run = traced_run(("llama", TP), tmp_path, ranks)
    for note, actual, found in ranks(2).run(note_of_exhaustion, run):
        rows = {re.split("  +", line.strip())[0]: line for line in note.splitlines()}
        assert size_text(found.weights) in rows["weights"]
        assert size_text(actual["weights"]) in rows["weights"]
        moving = found.activations + found.loss + found.temporary + found.messages
        assert moving > 0 and size_text(moving) in rows["activations and other tensors"]


def in_one_process(*more: str, seq_len: int = 64, batch: int = 8) -> Plan | str:
    """The traced plan of a user's own chain, or why there is none."""
    run = [x for x in overrides(("data=2",)) if not x.startswith("model.")]
    data = f"data.args={{seq_len: {seq_len}, vocab: 300}}"
    run += [f"data.seq_len={seq_len}", data, f"data.global_batch={batch}"]
    return traced(make_plan(parity.config([*run, "model.name=null", *OWN, *more]), 2))


def test_a_checkpoint_of_embeddings_has_no_head(tmp_path):
    run = traced_run(("llama", "data=2", "data.name=embedding"), tmp_path, None)
    plan = make_plan(parity.config(run), 2)
    layouts = plan.layouts.values()
    head = plan.layouts["lm_head.weight"]
    least, whole = (
        least_save_bytes(plan.config, layouts, is_trained)
        for is_trained in (plan.is_trained, plan.config.model.is_trained)
    )
    three = 3 * plan.numbers.weights.num_bytes  # the weight and two means
    assert whole - least == three * math.prod(head.shape)


@pytest.mark.full
def test_the_longest_sequence_and_the_largest_micro_batch_of_a_traced_model_fit_and_no_more():
    plan = in_one_process()
    assert isinstance(plan, Plan)
    limit = 3 * largest_peak(plan).peak.total
    longest = longest_seq_len(plan, largest_peak(plan), limit)
    largest = largest_micro_batch(plan, largest_peak(plan), limit)
    assert longest is not None and largest is not None and plan.samples_per_microbatch == 2
    for key, number, more in (
        ("seq_len", longest, longest + longest // 16),
        ("batch", 4 * largest, 4 * (largest + 1)),
    ):
        at_most, beyond = (in_one_process(**{key: n}) for n in (number, more))  # type: ignore[arg-type]
        assert isinstance(at_most, Plan) and isinstance(beyond, Plan)
        assert largest_peak(at_most).peak.total <= 1.001 * limit
        assert largest_peak(beyond).peak.total > limit


def test_a_model_that_reads_numbers_is_named():
    reads = "model.target=tests.plan.memory_ranks:reads_numbers"
    found = in_one_process(reads)
    assert isinstance(found, str) and "reads_numbers" in found and ".item()" in found
    absent = in_one_process("model.target=tests.plan.no_such_file:chain")
    assert isinstance(absent, str) and "no_such_file" in absent and "PYTHONPATH" in absent


BIG = [
    *("model.layers=4", "model.dim=1024", "model.heads=16", "model.vocab=32000"),
    *("data.seq_len=2048", "data.global_batch=16", "pipeline.microbatches=2"),
    *("precision.dtype=bf16", "parallel.tensor=2"),
]


def big(*more: str) -> Plan:
    last = {item.partition("=")[0]: item for item in (*BIG, *more)}
    config = loads("launch: {local: {procs: null}}", overrides=[*last.values()])
    return make_plan(config, 8)


def test_a_plan_says_whether_it_fits_and_what_would():
    plan = big()
    found = largest_peak(plan)
    need = found.peak.total
    assert fit_text(plan, found, need) == f"fits: {size_text(need)} of {size_text(need)} on rank 0"
    text = fit_text(plan, found, need - 1)
    fewer = largest_peak(big("train.recompute=blocks")).peak
    assert text.startswith(f"does not fit: needs {size_text(need)} of")
    assert text.endswith(f"train.recompute: blocks would need {size_text(fewer.total)}")
    assert fewer.total < need and fewer.weights == found.peak.weights


def test_the_longest_sequence_and_the_largest_micro_batch_fit_and_no_more():
    plan = big()
    limit = 1.5 * largest_peak(plan).peak.total
    longest = longest_seq_len(plan, largest_peak(plan), limit)
    largest = largest_micro_batch(plan, largest_peak(plan), limit)
    assert longest is not None and largest is not None and plan.samples_per_microbatch == 2
    for key, number, more in (
        ("data.seq_len", longest, longest + longest // 32),
        ("data.global_batch", largest * 8, (largest + 1) * 8),
    ):
        assert largest_peak(big(f"{key}={number}")).peak.total <= limit
        assert largest_peak(big(f"{key}={more}")).peak.total > limit
    state = plan, largest_peak(plan), largest_peak(plan).peak.weights
    assert longest_seq_len(*state) is largest_micro_batch(*state) is None


def test_the_limit_is_the_one_asked_for_else_that_of_the_device():
    assert memory_limit(big()) is None
    assert memory_limit(big(), "h100-sxm") == 80e9
    assert memory_limit(big("train.memory_gb=20"), "h100-sxm") == 20e9
    gpus = [f"launch.slurm.{x}" for x in ("nodes=1", "ntasks-per-node=8", "gpus-per-node=a100:8")]
    assert memory_limit(big(*gpus)) == 80e9
    on_gpus = largest_peak(big(*gpus)).peak
    assert on_gpus.communicators > 0 and on_gpus.allocator > 0
