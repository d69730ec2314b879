"""Runs that break one rule across sections each, with the key and the facts of its message.

Facts are keys, values and what to change, in their order in the message; the sentence is free.
"""

from pathlib import Path
from typing import Any

THREE_STAGES = Path(__file__).with_name("costs_of_three_stages.yaml")

BROKEN: list[tuple[dict[str, Any], str, str]] = [
    (
        {"parallel__order": ("data",), "parallel__pipe": 2, "parallel__tensor": 2},
        "parallel.order",
        "parallel.order=[data] leaves out pipe=2, tensor=2",
    ),
    (
        {"parallel__data": 2, "launch__local": {"procs": 3}},
        "launch.local.procs",
        "data=2 x pipe=1 x context=1 x tensor=1 needs 2 processes but launch.local.procs is 3; "
        "pass --procs 2 or remove procs from the file, or set parallel.data to 3",
    ),
    (
        {"parallel__data": 2048, "parallel__tensor": 256, "model__dim": 1024}
        | {"model__heads": 256, "data__global_batch": 8192},
        "parallel.data",
        "a world of 524,288 ranks is more than the 262,144 that a run may have",
    ),
    (
        {"parallel__pipe": 8, "pipeline__microbatches": 4097},
        "parallel.pipe",
        "pipeline.microbatches=4097 8 stages 32,776 32,768 pipeline.schedule=1f1b set "
        "microbatches 4096",
    ),
    (
        {"parallel__context": 3, "data__seq_len": 32},
        "data.seq_len",
        "data.seq_len=32 cannot be cut into the 6 equal chunks of parallel.context=3 ranks; "
        "set seq_len to 30 or 36, or context to 1",
    ),
    (
        {"parallel__context": 2, "parallel__tensor": 3, "parallel__sequence_parallel": True}
        | {"data__seq_len": 8, "model__heads": 6, "model__dim": 96},
        "data.seq_len",
        "data.seq_len=8 cannot be split over parallel.context=2 x parallel.tensor=3 ranks",
    ),
    (
        {"parallel__cp_comm_type": "a2a"},
        "parallel.cp_comm_type",
        "cp_comm_type=a2a parallel.context=1 set context 2 remove",
    ),
    (
        {"parallel__cp_comm_type": "a2a", "parallel__context": 4, "parallel__tensor": 2}
        | {"model__heads": 4, "model__dim": 64, "data__seq_len": 64},
        "parallel.cp_comm_type",
        "a2a gives each of parallel.context=4 ranks whole heads, but a tensor rank has 2",
    ),
    (
        {"parallel__expert": 2},
        "parallel.expert",
        "parallel.expert=2, but the model has no experts to share; set model.moe.num_experts",
    ),
    (
        {"model__moe": {"num_experts": 8}, "parallel__expert": 3, "parallel__data": 4},
        "parallel.expert",
        "parallel.expert=3 parallel.data=4 set expert",
    ),
    (
        {"parallel__zero_group": 2, "parallel__data": 4},
        "parallel.zero_group",
        "parallel.zero_group=2 parallel.zero=0 set zero 1 2 3 remove",
    ),
    (
        {"parallel__zero_group": 3, "parallel__data": 8, "parallel__zero": 1},
        "parallel.zero_group",
        "parallel.zero_group=3 parallel.data=8 set 2 4",
    ),
    (
        {"parallel__zero_group": 1, "parallel__data": 8, "parallel__zero": 2},
        "parallel.zero_group",
        "parallel.zero_group=1 8 data ranks parallel.zero=2 set 2 zero 0",
    ),
    (
        {"model__moe": {"num_experts": 8}, "parallel__expert": 4, "parallel__data": 12}
        | {"parallel__zero": 1, "parallel__zero_group": 6, "data__global_batch": 48},
        "parallel.zero_group",
        "parallel.zero_group=6 parallel.expert=4 multiple of 4 parallel.data=12",
    ),
    (
        {"precision__dtype": "bf16", "precision__weights": "bf16"},
        "precision.weights",
        "set parallel.zero 1 2 3 precision.weights",
    ),
    (
        {"precision__weights": "bf16"},
        "precision.weights",
        "precision.weights=bf16 with precision.dtype=float32; set dtype to bf16, or weights to",
    ),
    (
        {"precision__reduce_dtype": "bf16", "precision__dtype": "float64"},
        "precision.reduce_dtype",
        "precision.reduce_dtype=bf16 would round the gradients of precision.dtype=float64 to 8 "
        "bits; set reduce_dtype to float32",
    ),
    (
        {"precision__fp8": "linear"},
        "precision.fp8",
        "precision.fp8=linear precision.dtype=bf16 float32 set dtype bf16 fp8 off",
    ),
    (
        {"model__max_seq_len": 64, "model__position": "learned"},
        "data.seq_len",
        "data.seq_len=128, but model.position=learned has positions for model.max_seq_len=64 "
        "tokens; set seq_len to 64, or max_seq_len to 128",
    ),
    (
        {"parallel__tensor": 2, "parallel__tp_comm_overlap": True},
        "parallel.tp_comm_overlap",
        "sequence parallelism, which is off; set parallel.sequence_parallel to true, or "
        "tp_comm_overlap to false",
    ),
    (
        {"data__seq_len": 102, "parallel__tensor": 4, "parallel__sequence_parallel": True},
        "data.seq_len",
        "data.seq_len=102 cannot be split over parallel.tensor=4 ranks, as "
        "parallel.sequence_parallel asks; set seq_len to 100 or 104",
    ),
    (
        {"parallel__pipe": 11, "model__layers": 4},
        "parallel.pipe",
        "parallel.pipe=11 11 stages model.layers=4 10 pieces set pipe 10 set layers 5",
    ),
    (
        {
            "parallel__pipe": 3,
            "model__layers": 2,
            "pipeline__schedule": "zb-v",
            "pipeline__chunks": 5,
        },
        "parallel.pipe",
        "parallel.pipe=3 5 chunks pipeline.chunks 15 stages",
    ),
    (
        {"parallel__pipe": 4, "pipeline__schedule": "zb-v", "model__layers": 2},
        "parallel.pipe",
        "parallel.pipe=4 2 chunks pipeline.schedule=zb-v 8 stages model.layers=2 6 pieces",
    ),
    (
        {"pipeline__schedule": "1f1b", "pipeline__chunks": 2},
        "pipeline.chunks",
        "pipeline.chunks=2 pipeline.schedule=1f1b set",
    ),
    (
        {"pipeline__schedule": "custom"},
        "pipeline.file",
        "pipeline.schedule=custom pipeline.file",
    ),
    (
        {"pipeline__file": "a.csv"},
        "pipeline.file",
        "pipeline.file=a.csv pipeline.schedule=1f1b remove",
    ),
    (
        {"pipeline__partition": "time"},
        "pipeline.costs",
        "pipeline.partition=time pipeline.costs",
    ),
    (
        {"pipeline__costs": str(THREE_STAGES), "parallel__pipe": 2},
        "pipeline.costs",
        "costs_of_three_stages.yaml: forward has 3 numbers for 2 stages; give one for each stage",
    ),
    (
        {"data__global_batch": 30, "parallel__data": 2, "train__accumulate": 2},
        "data.global_batch",
        "data.global_batch=30 is not a multiple of parallel.data=2 x train.accumulate=2 = 4; "
        "set global_batch to 28 or 32",
    ),
    (
        {"pipeline__microbatches": 3, "parallel__data": 2, "train__accumulate": 2},
        "pipeline.microbatches",
        "pipeline.microbatches=3 cannot cut 8 samples into equal pieces, which is what a data "
        "rank has in one round (data.global_batch=32 / (parallel.data=2 x "
        "train.accumulate=2)); set microbatches to 2 or 4, or global_batch to 24 or 36",
    ),
    (
        {"checkpoint__export": "hf", "model__target": "a:b"},
        "checkpoint.export",
        "checkpoint.export=hf model.target=a:b set export null",
    ),
    (
        {"checkpoint__local_dir": "/dev/shm"},
        "checkpoint.local_dir",
        "checkpoint.local_dir=/dev/shm checkpoint.local_every=0 set both neither",
    ),
    (
        {"checkpoint__local_dir": str(Path("runs/run/copies").absolute())}
        | {"checkpoint__local_every": 5},
        "checkpoint.local_dir",
        "checkpoint.local_dir run folder share own disk",
    ),
    (
        {"checkpoint__keep_best": "val_loss", "train__eval_every": 0},
        "checkpoint.keep_best",
        "needs validations at saves, but train.eval_every is 0",
    ),
    (
        {
            "checkpoint__keep_best": "val_loss",
            "train__eval_every": 40,
            "checkpoint__save_every": 60,
        },
        "checkpoint.keep_best",
        "train.eval_every=40 and save_every=60 meet only every 120 steps",
    ),
    (
        {"train__profile": {"steps": "3..9"}, "train__steps": 5, "optim__warmup_steps": 0},
        "train.profile.steps",
        "train.profile.steps=3..9 train.steps=5 steps up to 5",
    ),
    (
        {"data__name": "jsonl", "data__path": "x"},
        "data.name",
        "data.name=jsonl needs data.tokenizer, a folder with tokenizer.json",
    ),
    (
        {"data__bos": "on"},
        "data.bos",
        "data.bos=on data.tokenizer",
    ),
    (
        {"data__name": "jsonl", "data__path": "datasets:a/b", "data__tokenizer": "t"},
        "data.path",
        "data.path=datasets:a/b cache name=arrow jsonl set name",
    ),
    (
        {
            "data__name": "jsonl",
            "data__path": "x",
            "data__tokenizer": "t",
            "data__field": "messages",
            "data__eos": "on",
        },
        "data.eos",
        "data.eos=on data.field=messages",
    ),
    (
        {
            "data__name": "preference",
            "data__path": "x",
            "data__tokenizer": "t",
            "data__packing": "whole",
        },
        "data.name",
        "data.name=preference data.packing=whole",
    ),
    (
        {
            "data__name": "preference",
            "data__path": "x",
            "data__tokenizer": "t",
            "train__dpo": {"loss": "ipo", "gamma": 1.0},
        },
        "train.dpo.loss",
        "train.dpo.loss=ipo train.dpo.gamma=1.0 remove",
    ),
    (
        {"train__embedding": {"scale": 5.0}},
        "data.name",
        "train.embedding data.name embedding",
    ),
    (
        {
            "data__name": "embedding",
            "data__path": "x",
            "data__tokenizer": "t",
            "data__packing": "whole",
        },
        "data.name",
        "data.name=embedding model.hf data.packing=whole",
    ),
    (
        {
            "data__name": "embedding",
            "data__path": "x",
            "data__tokenizer": "t",
            "model__name": None,
            "model__hf": "m.json",
            "train__embedding": {"matryoshka_dims": [8, 4], "matryoshka_weights": [1.0]},
        },
        "train.embedding.matryoshka_weights",
        "train.embedding.matryoshka_weights has 1 2 matryoshka_dims",
    ),
    (
        {"data__name": "classification", "data__path": "x", "data__tokenizer": "t"},
        "data.name",
        "data.name=classification model.hf",
    ),
    (
        {
            "data__name": "classification",
            "data__path": "x",
            "data__tokenizer": "t",
            "data__labels": ["a", "b", "a"],
            "data__class_weights": [1.0, 2.0],
            "model__hf": "h",
        },
        "data.name",
        "data.name=classification 'a' twice data.labels 2 data.class_weights 3 data.labels",
    ),
    (
        {"data__labels": ["a", "b"]},
        "data.name",
        "data.labels=('a', 'b') has no effect data.name=python_stdlib remove",
    ),
    (
        {"train__distill": {"beta": 0.5}},
        "train.distill.teacher",
        "train.distill.beta=0.5 train.distill.teacher set",
    ),
    (
        {"train__distill": {"teacher": "t", "teacher_tensor": 3}, "parallel__tensor": 2},
        "train.distill.teacher_tensor",
        "train.distill.teacher_tensor=3 parallel.tensor=2 set 2",
    ),
    (
        {"train__distill": {"logits": "t", "beta": 1.0}},
        "train.distill.beta",
        "train.distill.beta=1 all tokens train.distill.logits=t set beta to 0",
    ),
    (
        {"train__distill": {"teacher": "t"}, "model__loss": "pkg:fn"},
        "train.distill.teacher",
        "train.distill.teacher=t model.loss=pkg:fn",
    ),
    (
        {"data__document_masks": True},
        "data.document_masks",
        "data.tokenizer set",
    ),
    (
        {"train__recompute": "auto"},
        "train.recompute",
        "train.recompute=auto needs train.memory_gb, the memory of a rank",
    ),
    (
        {"optim__schedule": "linear", "optim__schedule_args": {"power": 2}},
        "optim.schedule",
        "optim.schedule_args optim.schedule=linear takes none remove",
    ),
    (
        {"optim__args": {"betas": 1}},
        "optim.target",
        "optim.args (betas) has no effect without optim.target; remove it",
    ),
    (
        {"optim__name": "sgd", "optim__target": "a:B"},
        "optim.target",
        "optim.name=sgd and optim.target=a:B exclude each other; remove one",
    ),
    (
        {"optim__muon_exchange": "together"},
        "optim.muon_exchange",
        "optim.muon_exchange=together has no effect optim.name=adamw muon",
    ),
    (
        {"optim__target": "a:B", "parallel__tensor": 2},
        "optim.name",
        "optim.target=a:B parallel.tensor=2 use data, pipe, context zero adamw",
    ),
    (
        {"optim__name": "adafactor", "parallel__tensor": 2},
        "optim.name",
        "optim.name=adafactor parallel.tensor=2 use data, pipe, context zero adamw",
    ),
    ({"data__name": None}, "data.name", "data.name data.target"),
    (
        {"data__sources": [{"path": "a.txt", "weight": 0}, {"path": "b.txt", "weight": 0}]},
        "data.sources",
        "weights 2 data.sources add up to 0 above 0",
    ),
    (
        {"data__sources": [{"path": "a.txt"}, {"path": "b.txt", "label": "a"}]},
        "data.sources",
        "data.sources 2 label",
    ),
    (
        {"data__sources": [{"path": "a.jsonl"}, {"path": "b.txt", "field": "x"}]},
        "data.sources",
        "data.sources[0] data.tokenizer tokenizer.json data.sources[1] field=x",
    ),
    (
        {"data__sources": [{"path": "a.txt"}], "data__path": "x"},
        "data.name",
        "data.sources and data.path=x exclude each other; remove one",
    ),
    (
        {"data__eval": {"web": "web.jsonl"}, "data__val_path": "ids.bin"},
        "data.val_path",
        "data.eval.web data.tokenizer tokenizer.json data.val_path data.tokenizer",
    ),
    (
        {"optim__groups": [{"params": ["*embed*"], "lr": 0.1}, {"params": ["a", "b"]}]},
        "optim.groups",
        "optim.groups[1] a, b neither lr nor weight_decay",
    ),
    (
        {"train__label_smoothing": 0.1, "model__loss": "a:b"},
        "train.label_smoothing",
        "label_smoothing=0.1 model.loss=a:b set it to 0",
    ),
    (
        {"train__neftune_noise_alpha": 5.0, "model__target": "a:b", "model__name": None},
        "train.neftune_noise_alpha",
        "neftune_noise_alpha=5 model.target=a:b null",
    ),
    (
        {
            "train__neftune_noise_alpha": 5.0,
            "data__name": "embedding",
            "data__path": "a.jsonl",
            "data__tokenizer": "t",
            "model__hf": "m",
            "model__name": None,
            "pipeline__microbatches": 2,
        },
        "train.neftune_noise_alpha",
        "neftune_noise_alpha=5 2 microbatches data.name=embedding null",
    ),
    (
        {"train__eval_ema": True},
        "train.eval_ema",
        "eval_ema=true optim.ema_decay is null 0.999",
    ),
    (
        {"data__name": "unpaired_preference", "data__path": "a.jsonl", "data__tokenizer": "t"},
        "train.dpo.loss",
        "loss=sigmoid data.name=unpaired_preference set loss kto name preference",
    ),
    (
        {"data__name": "unpaired_preference", "data__path": "a.jsonl", "data__tokenizer": "t"}
        | {"train__dpo": {"loss": "kto"}, "data__global_batch": 1, "pipeline__microbatches": 1},
        "data.global_batch",
        "data.global_batch=1 set it to 2",
    ),
    (
        {"data__name": "preference", "data__path": "a.jsonl", "data__tokenizer": "t"}
        | {"train__dpo": {"reference": "r.safetensors", "loss": "simpo"}},
        "train.dpo.reference",
        "dpo.reference=r.safetensors train.dpo.loss=simpo has no reference",
    ),
    (
        {"train__early_stop": {"metric": "wbe"}, "data__eval": {"web": "web.txt"}},
        "train.early_stop.metric",
        "early_stop.metric=wbe val_loss, web eval_NAME",
    ),
    (
        {"train__early_stop": {"patience": 5, "mode": "max"}},
        "train.early_stop.metric",
        "early_stop.patience and mode no effect metric: val_loss",
    ),
    (
        {"train__early_stop": {"metric": "val_loss"}, "train__eval_every": 0},
        "train.early_stop.metric",
        "early_stop.metric=val_loss train.eval_every is 0",
    ),
    (
        {"checkpoint__keep_best": "wbe", "data__eval": {"web": "web.txt"}},
        "checkpoint.keep_best",
        "keep_best=wbe val_loss, web data.eval",
    ),
    (
        {"data__streaming": True, "train__epochs": 2.0},
        "data.streaming",
        "data.streaming=true data.tokenizer data.val_path train.steps",
    ),
    (
        {"data__packing": "whole"},
        "data.packing",
        "data.packing=whole data.tokenizer remove packing",
    ),
    (
        {"train__epochs": 2.0, "data__target": "a:b"},
        "train.epochs",
        "train.epochs=2 data.target=a:b set train.steps",
    ),
    (
        {"launch__elastic": {"nodes": (1, 4)}},
        "launch.elastic.nodes",
        "launch.elastic.nodes=[1, 4] launch.slurm add launch.slurm: {ntasks-per-node: 8} "
        "remove elastic",
    ),
    (
        {"launch__spares": 1},
        "launch.spares",
        "launch.spares=1 launch.slurm add launch.slurm: {nodes: 2} remove spares",
    ),
    (
        {"launch__spares": 1, "launch__slurm": {"nodes": 2}},
        "launch.spares",
        "launch.spares=1 launch.requeue.in_job_restarts=0 set in_job_restarts to 1 or more",
    ),
    (
        {
            "launch__spares": 1,
            "launch__slurm": {"nodes": "2-4"},
            "launch__requeue": {"in_job_restarts": 1},
        },
        "launch.spares",
        "launch.spares=1 nodes=2-4 write one number, or use launch.elastic.nodes",
    ),
    ({"data__name": "text"}, "data.name", "needs data.path, the file or folder to read"),
    ({"data__name": "tokens"}, "data.name", "needs data.path, the file to read"),
    ({"data__path": "x"}, "data.name", "data.path=x data.name=py remove"),
    ({"data__dtype": "uint8"}, "data.name", "data.dtype=uint8 data.name=py remove"),
]
"""Values with `__` for a dot, the path and part of the text of the one problem."""

ON_RANKS: list[tuple[dict[str, Any], int, str, str]] = [
    (
        {"parallel__data": 2, "parallel__pipe": 2},
        6,
        "parallel.data",
        "data=2 x pipe=2 x context=1 x tensor=1 must use all 6 ranks but uses 4; 2 ranks hold",
    ),
    (
        {"pipeline__microbatches": 16, "parallel__data": "auto"},
        4,
        "pipeline.microbatches",
        "cannot cut 8 samples into equal pieces",
    ),
]
"""The same, on so many ranks."""
