"""Which public names of `parallel`, `ddp` and `optim` no run of `tdp train` executes, and why.

    scripts/unreached            run layouts under a profile, and write docs/unreached.md
    scripts/unreached --small    two ranks at most, print only

Each rank notes every function of these folders that is called; a class counts as executed if one of
its methods was. The layouts are the small set of the parity matrix and, where that has no case,
the ones below. A name without a reason in `REASONS`, or a reason for a name that runs, is an error.
"""

import ast
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from types import FrameType

import torchdistpackage
from tests.package_files import ROOT, name_of, tree
from torchdistpackage.harness.pool import RankPool

FOLDERS = ("ddp", "optim", "parallel")
PAGE = ROOT.parent / "docs" / "unreached.md"

REASONS: dict[str, str] = {
    "parallel/auto/*": (
        "`tensor_parallel(model)`, for modules and loops of your own; a run splits by "
        "`parallelize` and the layers of `parallel/tensor`"
    ),
    "*/reference.py:*": "the plainest form, to which tests hold everything else",
    "ddp/auto.py:*": (
        "chooses by measurement; a run does as `parallel.zero` says, so that a resume does the same"
    ),
    "ddp/bucket_tuning.py:*": (
        "a run keeps one order of buckets: one that is resumed would measure others, and sum "
        "in another order"
    ),
    "ddp/comm_hooks.py:*": "hooks of loops of your own; a run has `precision.reduce_dtype`",
    "ddp/ema.py:*": "averages of loops of your own; a run keeps none",
    "ddp/join.py:*": "uneven inputs; a run gives every rank as many batches",
    "ddp/s*_*.py:*": "sparse embeddings and batch norm, which no model of the matrix has",
    "ddp/param_sync.py:*": "comparisons that a loop of your own asks for",
    "ddp/ready.py:*": "a backward that no schedule runs; all backwards of a run are an executor's",
    "ddp/output_hook.py:*": "a backward whose wrapper is gone",
    "ddp/grad_hooks.py:*": "devices with streams",
    "ddp/param_spec.py:shard_groups": (
        "groups of `parallel.zero_group`, which the matrix has no case of"
    ),
    "parallel/expert/dispatch.py:plan_dispatch": (
        "models of transformers, which the matrix has no case of"
    ),
    "ddp/w*.py:*": "copies, pickles and names of a wrapped module",
    "ddp/sharded.py:owners_of": "finds the optimizer of given parameters; a run knows its own",
    "ddp/sharded.py:ParamPartition": "what saving reads; the matrix saves nothing",
    "ddp/zero/state_*.py:*": (
        "`state_dict()` of a loop of your own; a run saves parts by `checkpoint/`"
    ),
    "ddp/zero/offload.py:*": "optimizer state in host memory, which a run does not offer",
    "ddp/zero/options.py:with_options": "called while modules are imported",
    "ddp/zero/options.py:replica_group": (
        "names replicas of shards in loops of your own; a run has `parallel.zero_group`"
    ),
    "ddp/zero/stage3.py:*": "compiled modules, and `reshard_after_forward`",
    "ddp/zero/*:whole_shard": "groups of one rank",
    "ddp/zero/*": "optimizers that need whole parameters, and bounds that `tdp plan` reads",
    "optim/clip.py:*": (
        "the norm in an all-reduce of its own; a run sums it with loss and votes, by "
        "`grad_norms`, `counts_here`, `clip_factor` and `scale_gradients` of the same file"
    ),
    "optim/scaler.py:*": "loss scaling for float16; a run trains in bf16, float32 or float64",
    "optim/torch_calls.py:*": "torch's own functions on split parameters",
    "parallel/context/hugging_face.py:*": "models of transformers, which the matrix has no case of",
    "parallel/context/visibility.py:*": "`data.document_masks`, which the matrix has no case of",
    "parallel/context/choice.py:*": "what `tdp plan` counts",
    "parallel/context/*": (
        "attention in models of your own; a model of a run is given its `ContextSequence`, "
        "which has the same `ContextPlan`"
    ),
    "parallel/expert/balance.py:*": "loads as the log shows them, and biases in loops of your own",
    "parallel/pipeline/executor.py:Recording": "a step under the profiler",
    "parallel/pipeline/links.py:LocalLink": "schedules that place neighbouring stages on one rank",
    "parallel/pipeline/partition/hf_decoder.py:*": (
        "models of transformers, which the matrix has no case of"
    ),
    "parallel/pipeline/partition/c*.py:*": (
        "cuts by cost (`pipeline.partition`), which the matrix has no case of"
    ),
    "parallel/pipeline/partition/*": "cuts of models of your own",
    "parallel/pipeline/*": (
        "`Pipeline` asks ranks to agree on inputs that it does not know, cuts them, and sends "
        "the loss to all pipe ranks; a run's plan knows its inputs, and its loss is in the "
        "step's one all-reduce. Below that both run on `Executor`, `Losses` and `reducing`"
    ),
    "parallel/tensor/float8.py:*": "products in float8, on GPUs that have it",
    "parallel/tensor/four_bit.py:*": "weights in 4 bits (QLoRA)",
    "parallel/tensor/traced_loss.py:*": "compiled blocks",
    "parallel/tensor/product_gradients.py:*": (
        "overlapped products under a schedule that splits the backward, and autocast"
    ),
    "parallel/tensor/attention.py:*": "`data.document_masks`, which the matrix has no case of",
    "parallel/tensor/full.py:*": (
        "whole tensors in loops of your own; a run saves parts by `checkpoint/`"
    ),
    "parallel/tensor/*": (
        "models of transformers, which the matrix has no case of, and modules of your own"
    ),
}
"""Pattern of `file:name` -> why no run executes it."""

SIZES = {"data": 1, "pipe": 1, "tensor": 1, "context": 1}


def cases() -> Iterator[tuple[int, list[str]]]:
    """(ranks, overrides) of each run."""
    from tests.train.test_experts import BASE as EXPERTS
    from tests.train.test_experts import KINDS
    from tests.train.test_parity import cases as matrix
    from tests.train.test_parity import overrides

    for case in matrix():
        if case.marks:
            continue
        degrees, sequence_parallel, tied = case.values[0]
        axes = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
        split = f"parallel.sequence_parallel={str(sequence_parallel).lower()}"
        yield math.prod(degrees.values()), [*overrides(degrees, tied), *axes, split]

    def of(changes: Sequence[str], **degrees: int) -> tuple[int, list[str]]:
        axes = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
        return math.prod(degrees.values()), [
            *overrides(SIZES | degrees, tied=False), *axes, *changes
        ]  # fmt: skip

    for zero in (1, 2, 3):
        yield of([f"parallel.zero={zero}", "train.accumulate=2"], data=2)
    yield of(["precision.reduce_dtype=bf16", "precision.dtype=float32"], data=2)
    for schedule in ("gpipe", "zb-h1", "interleaved"):
        yield of([f"pipeline.schedule={schedule}", "pipeline.microbatches=4"], pipe=2)
    yield of(["parallel.sequence_parallel=true", "parallel.tp_comm_overlap=true"], tensor=2)
    for way in ("p2p", "all_gather", "a2a", "auto"):
        yield of([f"parallel.cp_comm_type={way}"], context=2)
    yield of(["model.dropout=0.1", "train.recompute=blocks"], tensor=2)
    for kind in KINDS.values():
        yield 2, [*EXPERTS, *kind, "parallel.data=2", "parallel.expert=2"]


def traced(changes: list[str]) -> set[str]:
    """`file:qualified name` of what a step and a validation of a run call, on this rank."""
    from tests.train import parity

    seen: set[str] = set()
    known: dict[object, str] = {}
    root = f"{ROOT}/"

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code not in known:
            path = code.co_filename.removeprefix(root)
            known[code] = path
            if path.startswith(FOLDERS):
                seen.add(f"{path}:{code.co_qualname}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run = parity.trainer(changes)
        for step in (1, 2):
            run.train_step(step).wait()
        run.evaluate()
        run.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def public() -> Iterator[str]:
    """`file:name` of each function, and of each class with code of its own, but protocols."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in tree(path).body:
                if _runs(node):
                    yield f"{name_of(path)}:{node.name}"  # type: ignore[attr-defined]


def _runs(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return not node.name.startswith("_")
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return False
    is_protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
    return not is_protocol and any(isinstance(x, ast.FunctionDef) for x in node.body)


def unreached(seen: set[str]) -> list[str]:
    """The public names of which nothing was called."""
    called = {f"{path}:{name.split('.')[0]}" for path, _, name in (x.partition(":") for x in seen)}
    return [name for name in public() if name not in called]


def reason_of(name: str) -> str:
    """The first pattern's that matches; "" without one."""
    return next((why for pattern, why in REASONS.items() if fnmatch(name, pattern)), "")


def problems(names: Sequence[str]) -> list[str]:
    """What is wrong with the reasons for these names, which are all that no run executes."""
    missing = [f"{name} has no reason" for name in names if not reason_of(name)]
    unused = [
        f"no run leaves out {pattern}, which has a reason"
        for pattern in REASONS
        if not any(reason_of(x) == REASONS[pattern] and fnmatch(x, pattern) for x in names)
    ]
    return missing + unused


def page(names: Sequence[str]) -> str:
    """docs/unreached.md: a row for each reason, with the names by file."""
    places = torchdistpackage.NAMES.values()
    exported = {place.replace(".", "/").replace(":", ".py:") for place in places}
    by_reason: dict[str, dict[str, list[str]]] = {}
    for name in names:
        file, _, plain = name.partition(":")
        shown = f"**{plain}**" if name in exported else plain
        by_reason.setdefault(reason_of(name), {}).setdefault(file, []).append(shown)
    rows = [
        f"| {'; '.join(_listed(file, some) for file, some in of_file.items())} | {why} |"
        for why, of_file in by_reason.items()
    ]
    return "\n".join((HEAD, *rows, ""))


def _listed(file: str, names: Sequence[str]) -> str:
    return f"{file}: {', '.join(names)}"


HEAD = """# Parts that no run uses

`tdp train` runs on parts that the package offers: executor, losses and reducers of `Pipeline`, norm
and factor of `clip_grad_norm_`, the plan of `context_attention`, `MoELayer`, `NaiveDDP` and
`ZeroOptimizer`. `scripts/unreached` runs the layouts of the parity matrix and notes each function
that is called. No run calls these public names of `ddp`, `optim` and `parallel`; those in bold are
names of `torchdistpackage`. The script fails where a name has no reason, so it shows a part that
training has stopped using.

| name | why no run calls it |
|---|---|"""


def measure(keep: Callable[[int], bool]) -> set[str]:
    """What all runs of as many ranks call."""
    from tests.train import unreached as module

    seen: set[str] = set()
    with RankPool(8, 300.0) as pool:
        for size, changes in cases():
            if keep(size):
                found = pool(size).run(module.traced, changes)
                seen.update(*found)
                print(f"{size} ranks, {len(seen)} functions", file=sys.stderr, flush=True)
    return seen


def main(arguments: Sequence[str]) -> int:
    is_small = "--small" in arguments
    names = unreached(measure(lambda size: size <= 2 or not is_small))
    wrong = problems(names)
    print("\n".join([*names, "", *wrong]))
    if not is_small and not wrong:
        PAGE.write_text(page(names), "utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
