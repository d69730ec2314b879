"""Runs that break one rule across sections each, and what is said of it."""

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
        "pipeline.microbatches=4097 on 8 stages makes 32,776 passes, more than the 32,768 that "
        "pipeline.schedule=1f1b is made for; set microbatches to 4096 or less",
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
        "cp_comm_type=a2a would not be used with parallel.context=1; set context to 2 or more",
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
        "parallel.expert=3 does not divide parallel.data=4, whose ranks share the experts; set",
    ),
    (
        {"precision__dtype": "bf16", "precision__weights": "bf16"},
        "precision.weights",
        "which only ZeRO keeps; set parallel.zero to 1, 2 or 3, or precision.weights to",
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
        "precision.fp8=linear rounds bf16 further, but precision.dtype is float32; set dtype",
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
        "parallel.pipe",
        "parallel.pipe=3 x 5 chunks, as pipeline.chunks has them, makes 15 stages, but",
    ),
    (
        {"parallel__pipe": 4, "pipeline__schedule": "zb-v", "model__layers": 2},
        "parallel.pipe",
        "parallel.pipe=4 x 2 chunks, as pipeline.schedule=zb-v has them, makes 8 stages, but "
        "model.layers=2 gives 6 pieces",
    ),
    (
        {"pipeline__schedule": "1f1b", "pipeline__chunks": 2},
        "pipeline.chunks",
        "pipeline.chunks=2 with pipeline.schedule=1f1b, which has one stage on a rank; leave "
        "chunks out, or set schedule to interleaved, looped-bfs,",
    ),
    (
        {"pipeline__schedule": "custom"},
        "pipeline.file",
        "pipeline.schedule=custom needs pipeline.file, a CSV with a row a pipe rank",
    ),
    (
        {"pipeline__file": "a.csv"},
        "pipeline.file",
        "pipeline.file=a.csv would not be read with pipeline.schedule=1f1b; remove it",
    ),
    (
        {"pipeline__partition": "time"},
        "pipeline.costs",
        "pipeline.partition=time needs pipeline.costs",
    ),
    (
        {"pipeline__costs": str(THREE_STAGES), "parallel__pipe": 2},
        "pipeline.costs",
        "costs_of_three_stages.yaml: forward has 3 numbers for 2 stages; give one a stage",
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
        "checkpoint.export=hf cannot name the weights of model.target=a:b; set export to null",
    ),
    (
        {"checkpoint__local_dir": "/dev/shm"},
        "checkpoint.local_dir",
        "checkpoint.local_dir=/dev/shm and checkpoint.local_every=0 go together: a folder of "
        "each node, and the steps between two copies in it; set both, or neither",
    ),
    (
        {"checkpoint__local_dir": str(Path("runs/run/copies").absolute())}
        | {"checkpoint__local_every": 5},
        "checkpoint.local_dir",
        "which all nodes share; name one that each node has for itself",
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
        "train.profile.steps=3..9 ends after train.steps=5; name steps up to 5",
    ),
    (
        {"data__name": "jsonl", "data__path": "x"},
        "data.name",
        "data.name=jsonl needs data.tokenizer, a folder with tokenizer.json",
    ),
    (
        {"data__bos": "on"},
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
        "data.eos",
        "data.eos=on, but with data.field=messages the chat template writes all special tokens",
    ),
    (
        {
            "data__name": "preference",
            "data__path": "x",
            "data__tokenizer": "t",
            "data__packing": "whole",
        },
        "data.name",
        "data.name=preference does not go with data.packing=whole, where each answer has a row",
    ),
    (
        {"data__document_masks": True},
        "data.document_masks",
        "without data.tokenizer it is not known where documents end; set it to false",
    ),
    (
        {"train__recompute": "auto"},
        "train.recompute",
        "train.recompute=auto needs train.memory_gb, the memory of a rank",
    ),
    (
        {"optim__schedule": "linear", "optim__schedule_args": {"power": 2}},
        "optim.schedule",
        "optim.schedule_args has power, but optim.schedule=linear takes none; leave out what "
        "it does not take",
    ),
    (
        {"optim__name": "muon", "parallel__tensor": 2},
        "optim.name",
        "optim.name=muon makes the update of a whole matrix orthogonal, and parallel.tensor=2 "
        "leaves parts of it to each rank; use data, pipe, context and zero, or adamw",
    ),
    ({"data__name": None}, "data.name", "neither data.name nor data.target is given"),
    (
        {"data__sources": [{"path": "a.txt", "weight": 0}, {"path": "b.txt", "weight": 0}]},
        "data.sources",
        "the weights of the 2 data.sources add up to 0, so no sample could be drawn; give one",
    ),
    (
        {"data__sources": [{"path": "a.txt"}, {"path": "b.txt", "label": "a"}]},
        "data.sources",
        "data.sources: 2 of them have the label a, under which the log has their part; give",
    ),
    (
        {"data__sources": [{"path": "a.jsonl"}, {"path": "b.txt", "field": "x"}]},
        "data.sources",
        "data.sources[0] (jsonl) needs data.tokenizer, a folder with tokenizer.json; "
        "data.sources[1]: field=x would not be read with text",
    ),
    (
        {"data__sources": [{"path": "a.txt"}], "data__path": "x"},
        "data.name",
        "data.sources and data.path=x exclude each other; remove one",
    ),
    (
        {"data__eval": {"web": "web.jsonl"}, "data__val_path": "ids.bin"},
        "data.val_path",
        "data.eval.web (jsonl) needs data.tokenizer, a folder with tokenizer.json; "
        "data.val_path has token ids, where training has bytes; give data.tokenizer",
    ),
    (
        {"checkpoint__keep_best": "wbe", "data__eval": {"web": "web.txt"}},
        "checkpoint.keep_best",
        "keep_best=wbe, but the losses that are measured are val_loss, web (data.eval); name",
    ),
    (
        {"data__packing": "whole"},
        "data.packing",
        "data.packing=whole, but without data.tokenizer it is not known where documents end",
    ),
    (
        {"train__epochs": 2.0, "data__target": "a:b"},
        "train.epochs",
        "train.epochs=2, but how many samples data.target=a:b has is not known; set train.steps",
    ),
    (
        {"launch__elastic": {"nodes": (1, 4)}},
        "launch.elastic.nodes",
        "launch.elastic.nodes=[1, 4] is of a Slurm job, and launch.slurm has no options, so it "
        "would have no effect; add one, such as launch.slurm: {ntasks-per-node: 8}, or leave",
    ),
    ({"data__name": "text"}, "data.name", "needs data.path, the file or folder to read"),
    ({"data__name": "tokens"}, "data.name", "needs data.path, the file to read"),
    ({"data__path": "x"}, "data.name", "data.path=x would not be read with data.name=py"),
    ({"data__dtype": "uint8"}, "data.name", "data.dtype=uint8 would not be read"),
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
