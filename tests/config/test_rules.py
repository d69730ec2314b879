"""Each rule across sections: it speaks when broken, and offers what works."""

from pathlib import Path
from typing import Any

import pytest

from torchdistpackage.config.check import RULES, failed_rules, violations
from torchdistpackage.config.schema import RunConfig

THREE_STAGES = Path(__file__).with_name("costs_of_three_stages.yaml")


def run(**values: Any) -> RunConfig:
    """A run from dotted names with `__` for the dot, not checked across sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("values", "world_size", "path", "text"),
    [
        (
            {"parallel__order": ("data",), "parallel__pipe": 2, "parallel__tensor": 2},
            None,
            "parallel.order",
            "parallel.order=[data] leaves out pipe=2, tensor=2",
        ),
        (
            {"parallel__data": 2, "parallel__pipe": 2},
            6,
            "parallel.data",
            "data=2 x pipe=2 x context=1 x tensor=1 must use all 6 ranks but uses 4; 2 ranks hold",
        ),
        (
            {"parallel__data": 2, "launch__local": {"procs": 3}},
            None,
            "launch.local.procs",
            "launch.local.procs=3 does not fit parallel: data=2 x pipe=1 x context=1 x tensor=1 "
            "must use all 3 ranks but uses 2",
        ),
        (
            {"parallel__data": 2048, "parallel__tensor": 256, "model__dim": 1024}
            | {"model__heads": 256, "data__global_batch": 8192},
            None,
            "parallel.data",
            "a world of 524,288 ranks is more than the 262,144 that a run may have",
        ),
        (
            {"parallel__pipe": 8, "pipeline__microbatches": 4097},
            None,
            "parallel.pipe",
            "pipeline.microbatches=4097 on 8 stages makes 32,776 passes, more than the 32,768 that "
            "pipeline.schedule=1f1b is made for; set microbatches to 4096 or less",
        ),
        (
            {"parallel__context": 3, "data__seq_len": 32},
            None,
            "data.seq_len",
            "data.seq_len=32 cannot be cut into the 6 equal chunks of parallel.context=3 ranks; "
            "set seq_len to 30 or 36, or context to 1",
        ),
        (
            {"parallel__context": 2, "parallel__tensor": 3, "parallel__sequence_parallel": True}
            | {"data__seq_len": 8, "model__heads": 6, "model__dim": 96},
            None,
            "data.seq_len",
            "data.seq_len=8 cannot be split over parallel.context=2 x parallel.tensor=3 ranks",
        ),
        (
            {"parallel__cp_comm_type": "a2a"},
            None,
            "parallel.cp_comm_type",
            "cp_comm_type=a2a would not be used with parallel.context=1; set context to 2 or more",
        ),
        (
            {"parallel__cp_comm_type": "a2a", "parallel__context": 4, "parallel__tensor": 2}
            | {"model__heads": 4, "model__dim": 64, "data__seq_len": 64},
            None,
            "parallel.cp_comm_type",
            "a2a gives each of parallel.context=4 ranks whole heads, but a tensor rank has 2",
        ),
        (
            {"parallel__expert": 2},
            None,
            "parallel.expert",
            "parallel.expert=2, but the model has no experts to share; set model.moe.num_experts",
        ),
        (
            {"model__moe": {"num_experts": 8}, "parallel__expert": 3, "parallel__data": 4},
            None,
            "parallel.expert",
            "parallel.expert=3 does not divide parallel.data=4, whose ranks share the experts; set",
        ),
        (
            {"model__moe": {"top_k": 3}},
            None,
            "model.moe.top_k",
            "model.moe.top_k would not be read without model.moe.num_experts",
        ),
        (
            {"model__moe": {"num_experts": 2, "top_k": 3}},
            None,
            "model.moe.num_experts",
            "model.moe: top_k=3 experts for each token, of num_experts=2; set top_k to 2 or less",
        ),
        (
            {"model__moe": {"num_experts": 8, "first": 9}},
            None,
            "model.moe.first",
            "model.moe.first=9 leaves none of model.layers=4 blocks experts; set first to 3",
        ),
        (
            {"model__moe": {"num_experts": 8, "capacity_factor": 1.0}, "parallel__context": 2},
            None,
            "model.moe.capacity_factor",
            "model.moe.capacity_factor=1 counts places in whole sequences",
        ),
        (
            {"precision__dtype": "bf16", "precision__weights": "bf16"},
            None,
            "precision.weights",
            "which only ZeRO keeps; set parallel.zero to 1, 2 or 3, or precision.weights to",
        ),
        (
            {"precision__weights": "bf16"},
            None,
            "precision.weights",
            "precision.weights=bf16 with precision.dtype=float32; set dtype to bf16, or weights to",
        ),
        (
            {"precision__fp8": "linear"},
            None,
            "precision.fp8",
            "precision.fp8=linear rounds bf16 further, but precision.dtype is float32; set dtype",
        ),
        (
            {"model__heads": 4, "parallel__tensor": 8},
            None,
            "model.heads",
            "model.heads=4 cannot be shared by parallel.tensor=8 ranks, as each needs one; set "
            "tensor to 4, or heads to 8",
        ),
        (
            {"model__heads": 6, "model__kv_heads": 3, "model__dim": 24, "parallel__tensor": 4},
            None,
            "model.heads",
            "model.heads=6 of model.kv_heads=3 groups cannot be shared by parallel.tensor=4 ranks, "
            "as each needs one, and each group as many ranks; set tensor to 3",
        ),
        (
            {"model__kv_heads": 3},
            None,
            "model.kv_heads",
            "model.heads=4 cannot share model.kv_heads=3 evenly; set kv_heads to 2 or 4, or heads "
            "to 3 or 6",
        ),
        (
            {"model__head_dim": 7},
            None,
            "model.head_dim",
            "model.head_dim=7 is odd, but model.position=rotary turns pairs; set head_dim to 6 or",
        ),
        (
            {"model__dim": 130},
            None,
            "model.dim",
            "model.dim=130 is not a multiple of model.heads=4; set dim to 128 or 136, or heads to "
            "1 or 5",
        ),
        (
            {"model__dim": 12},
            None,
            "model.dim",
            "model.dim=12 / model.heads=4 gives heads of 3, an odd width, but "
            "model.position=rotary turns pairs; set dim to 8 or 16, or heads to 3 or 6",
        ),
        (
            {"model__mlp_ratio": 0.6, "model__dim": 8, "parallel__tensor": 4},
            None,
            "model.mlp_ratio",
            "model.dim=8 x model.mlp_ratio=0.6 = 5 wide, which parallel.tensor=4 ranks cannot "
            "share so that each has some; set mlp_ratio to 0.5, which gives 4",
        ),
        (
            {"model__mlp_hidden": 5, "parallel__tensor": 4},
            None,
            "model.mlp_hidden",
            "model.mlp_hidden=5 cannot be shared by parallel.tensor=4 ranks so that each has some; "
            "set mlp_hidden to 4 or 7",
        ),
        (
            {"model__mlp_hidden": 32, "model__mlp_ratio": 3},
            None,
            "model.mlp_hidden",
            "model.mlp_ratio=3 would not be read with model.mlp_hidden=32; remove one of them",
        ),
        (
            {"model__rope": {"type": "llama3", "factor": 0.5, "beta_fast": 3}},
            None,
            "model.rope.theta",
            "model.rope: type=llama3 needs low_freq_factor, high_freq_factor, "
            "original_max_position_embeddings; beta_fast would not be read with type=llama3; "
            "remove it; factor=0.5; set it to 1 or more",
        ),
        (
            {"model__rope": {"theta": 5e5}, "model__position": "learned"},
            None,
            "model.rope.theta",
            "model.rope.theta would not be read with model.position=learned; remove it",
        ),
        (
            {"model__max_seq_len": 64, "model__position": "learned"},
            None,
            "data.seq_len",
            "data.seq_len=128, but model.position=learned has positions for model.max_seq_len=64 "
            "tokens; set seq_len to 64, or max_seq_len to 128",
        ),
        (
            {"parallel__tensor": 2, "parallel__tp_comm_overlap": True},
            None,
            "parallel.tp_comm_overlap",
            "sequence parallelism, which is off; set parallel.sequence_parallel to true, or "
            "tp_comm_overlap to false",
        ),
        (
            {"data__seq_len": 102, "parallel__tensor": 4, "parallel__sequence_parallel": True},
            None,
            "data.seq_len",
            "data.seq_len=102 cannot be split over parallel.tensor=4 ranks, as "
            "parallel.sequence_parallel asks; set seq_len to 100 or 104",
        ),
        (
            {"model__vocab": 100},
            None,
            "model.vocab",
            "model.vocab=100 is too small for data.name=python_stdlib",
        ),
        (
            {"parallel__pipe": 11, "model__layers": 4},
            None,
            "parallel.pipe",
            "parallel.pipe=11 makes 11 stages, but model.layers=4 gives 10 pieces: the embedding, "
            "attention and MLP of each layer, the head; set pipe to 10 or less, or set layers to 5",
        ),
        (
            {
                "parallel__pipe": 3,
                "model__layers": 2,
                "pipeline__schedule": "zb-v",
                "pipeline__chunks": 5,
            },
            None,
            "parallel.pipe",
            "parallel.pipe=3 x 5 chunks, as pipeline.chunks has them, makes 15 stages, but",
        ),
        (
            {"parallel__pipe": 4, "pipeline__schedule": "zb-v", "model__layers": 2},
            None,
            "parallel.pipe",
            "parallel.pipe=4 x 2 chunks, as pipeline.schedule=zb-v has them, makes 8 stages, but "
            "model.layers=2 gives 6 pieces",
        ),
        (
            {"pipeline__schedule": "1f1b", "pipeline__chunks": 2},
            None,
            "pipeline.chunks",
            "pipeline.chunks=2 with pipeline.schedule=1f1b, which has one stage on a rank; leave "
            "chunks out, or set schedule to interleaved, looped-bfs,",
        ),
        (
            {"pipeline__schedule": "custom"},
            None,
            "pipeline.file",
            "pipeline.schedule=custom needs pipeline.file, a CSV with a row a pipe rank",
        ),
        (
            {"pipeline__file": "a.csv"},
            None,
            "pipeline.file",
            "pipeline.file=a.csv would not be read with pipeline.schedule=1f1b; remove it",
        ),
        (
            {"pipeline__partition": "time"},
            None,
            "pipeline.costs",
            "pipeline.partition=time needs pipeline.costs",
        ),
        (
            {"pipeline__costs": str(THREE_STAGES), "parallel__pipe": 2},
            None,
            "pipeline.costs",
            "costs_of_three_stages.yaml: forward has 3 numbers for 2 stages; give one a stage",
        ),
        (
            {"data__global_batch": 30, "parallel__data": 2, "train__accumulate": 2},
            None,
            "data.global_batch",
            "data.global_batch=30 is not a multiple of parallel.data=2 x train.accumulate=2 = 4; "
            "set global_batch to 28 or 32",
        ),
        (
            {"pipeline__microbatches": 3, "parallel__data": 2, "train__accumulate": 2},
            None,
            "pipeline.microbatches",
            "pipeline.microbatches=3 cannot cut 8 samples into equal pieces, which is what a data "
            "rank has in one round (data.global_batch=32 / (parallel.data=2 x "
            "train.accumulate=2)); set microbatches to 2 or 4, or global_batch to 24 or 36",
        ),
        (
            {"pipeline__microbatches": 16, "parallel__data": "auto"},
            4,
            "pipeline.microbatches",
            "cannot cut 8 samples into equal pieces",
        ),
        (
            {"checkpoint__save_every": 0, "checkpoint__export": "hf"},
            None,
            "checkpoint.export",
            "checkpoint.export=hf needs a checkpoint, but save_every and save_every_min are off",
        ),
        (
            {"checkpoint__local_dir": "/dev/shm"},
            None,
            "checkpoint.local_dir",
            "checkpoint.local_dir=/dev/shm and checkpoint.local_every=0 go together: a folder of "
            "each node, and the steps between two copies in it; set both, or neither",
        ),
        (
            {"checkpoint__local_dir": str(Path("runs/run/copies").absolute())}
            | {"checkpoint__local_every": 5},
            None,
            "checkpoint.local_dir",
            "which all nodes share; name one that each node has for itself",
        ),
        (
            {"checkpoint__keep_best": "val_loss", "train__eval_every": 0},
            None,
            "checkpoint.keep_best",
            "needs validations at saves, but train.eval_every is 0",
        ),
        (
            {
                "checkpoint__keep_best": "val_loss",
                "train__eval_every": 40,
                "checkpoint__save_every": 60,
            },
            None,
            "checkpoint.keep_best",
            "train.eval_every=40 and save_every=60 meet only every 120 steps",
        ),
        (
            {"train__profile": {"steps": "3..9"}, "train__steps": 5, "optim__warmup_steps": 0},
            None,
            "train.profile.steps",
            "train.profile.steps=3..9 ends after train.steps=5; name steps up to 5",
        ),
        (
            {"data__name": "jsonl", "data__path": "x"},
            None,
            "data.name",
            "data.name=jsonl needs data.tokenizer, a folder with tokenizer.json",
        ),
        (
            {"data__bos": "on"},
            None,
            "data.bos",
            "data.bos=on, but without data.tokenizer there is no such token; leave it out",
        ),
        (
            {
                "data__name": "jsonl",
                "data__path": "x",
                "data__tokenizer": "t",
                "data__field": "messages",
                "data__eos": "on",
            },
            None,
            "data.eos",
            "data.eos=on, but with data.field=messages the chat template writes all special tokens",
        ),
        (
            {"data__document_masks": True},
            None,
            "data.document_masks",
            "without data.tokenizer it is not known where documents end; set it to false",
        ),
        (
            {"train__recompute": "auto"},
            None,
            "train.recompute",
            "train.recompute=auto needs train.memory_gb, the memory of a rank",
        ),
        (
            {"optim__warmup_steps": 20, "train__steps": 10},
            None,
            "optim.warmup_steps",
            "optim.warmup_steps=20 is more than train.steps=10; set warmup_steps to 10 or less",
        ),
        (
            {"optim__schedule": "linear", "optim__schedule_args": {"power": 2}},
            None,
            "optim.schedule",
            "optim.schedule_args has power, but optim.schedule=linear takes none; leave out what "
            "it does not take",
        ),
        (
            {"optim__name": "muon", "parallel__tensor": 2},
            None,
            "optim.name",
            "optim.name=muon makes the update of a whole matrix orthogonal, and parallel.tensor=2 "
            "leaves parts of it to each rank; use data, pipe and context without ZeRO, or adamw",
        ),
        (
            {"model__name": "gpt", "model__target": "a:b"},
            None,
            "model.name",
            "model.name=gpt and model.target=a:b exclude each other",
        ),
        ({"data__name": None}, None, "data.name", "neither data.name nor data.target is given"),
        (
            {"model__args": {"depth": 3}},
            None,
            "model.name",
            "model.args (depth) would not be read, only model.target takes them",
        ),
        (
            {"model__target": "a:b", "model__layers": 9, "model__tied": False},
            None,
            "model.layers",
            "model.layers, model.tied would not be read, because model.target=a:b builds",
        ),
        (
            {"model__lora": {"target": ("q_proj", "v_proj")}},
            None,
            "model.lora.target",
            "model.lora.target=[q_proj, v_proj] adapts transformers' own modules; name their",
        ),
        (
            {"model__hf": "m/config.json", "model__lora": {"target": ("q_proj",)}},
            None,
            "model.lora.target",
            "model.hf=m/config.json names no weights that they could adapt; name the folder",
        ),
        (
            {"model__lora": {"r": 4, "alpha": 2}},
            None,
            "model.lora.r",
            "model.lora.r, model.lora.alpha would not be read without model.lora.target",
        ),
        (
            {"data__sources": [{"path": "a.txt", "weight": 0}, {"path": "b.txt", "weight": 0}]},
            None,
            "data.sources",
            "the weights of the 2 data.sources add up to 0, so no sample could be drawn; give one",
        ),
        (
            {"data__sources": [{"path": "a.txt"}, {"path": "b.txt", "label": "a"}]},
            None,
            "data.sources",
            "data.sources: 2 of them have the label a, under which the log has their part; give",
        ),
        (
            {"data__sources": [{"path": "a.jsonl"}, {"path": "b.txt", "field": "x"}]},
            None,
            "data.sources",
            "data.sources[0] (jsonl) needs data.tokenizer, a folder with tokenizer.json; "
            "data.sources[1]: field=x would not be read with text",
        ),
        (
            {"data__sources": [{"path": "a.txt"}], "data__path": "x"},
            None,
            "data.name",
            "data.sources and data.path=x exclude each other; remove one",
        ),
        ({"data__name": "text"}, None, "data.name", "needs data.path, the file or folder to read"),
        ({"data__name": "tokens"}, None, "data.name", "needs data.path, the file to read"),
        ({"data__path": "x"}, None, "data.name", "data.path=x would not be read with data.name=py"),
        ({"data__dtype": "uint8"}, None, "data.name", "data.dtype=uint8 would not be read"),
    ],
)
def test_each_rule_names_values_and_what_to_change(
    values: dict[str, Any], world_size: int | None, path: str, text: str
) -> None:
    (problem,) = violations(run(**values), world_size)
    assert problem.path == path
    assert text in problem.text
    assert str(problem).startswith(f"{path}: ")


def test_the_table_above_breaks_every_rule() -> None:
    """A rule without a row would never have been seen to speak."""
    (marker,) = test_each_rule_names_values_and_what_to_change.pytestmark
    spoken = {
        keys
        for values, world, *_ in marker.args[1]
        for keys, _ in failed_rules(run(**values), world)
    }
    assert spoken == {rule.fields for rule in RULES} and len(spoken) == len(RULES)


@pytest.mark.parametrize(
    "values",
    [
        {"parallel__sequence_parallel": True},
        {"parallel__tensor": 4, "model__vocab": 257},
        {"parallel__pipe": 10},
        {"parallel__pipe": 2, "pipeline__schedule": "interleaved", "pipeline__chunks": 5},
        {"pipeline__schedule": "auto", "pipeline__chunks": 3, "parallel__pipe": 3},
        {"parallel__order": (), "parallel__data": 1},
        {"model__dim": 12, "model__position": "learned"},
        {"model__vocab": 7, "data__name": "tokens", "data__path": "ids", "data__dtype": "uint8"},
        {"model__vocab": 7, "model__target": "a:b"},
        {"model__target": "a:b", "parallel__tensor": 3, "parallel__pipe": 9},
        {"data__target": "a:b", "data__args": {"x": 1}},
        {"model__loss": "a:b"},
    ],
)
def test_what_is_harmless_is_allowed(values: dict[str, Any]) -> None:
    assert violations(run(**values)) == ()
