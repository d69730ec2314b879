"""The parts of the GPU benchmarks: what each decides, its time limit, its environment. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Part:
    """A process. module: has `measure(here, found)`. env: set on a GPU only. has_cases: it has so
    many that some may be chosen, and ends by itself when its time is over.
    """

    module: str
    decides: str
    limit_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    has_cases: bool = False


EXPANDABLE = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""By the name of torch 2.10 on and by that before."""
PLAIN = dict.fromkeys(EXPANDABLE, "expandable_segments:False")
"""Said, since ranks with a GPU are given the other one where nothing is."""

PARTS: dict[str, Part] = {
    "startup": Part(
        "benchmarks.gpu.startup",
        "ranks forked from a server that has imported everything use the GPU, whatever a preload "
        "touched, and so do the workers of a DataLoader",
        120,
    ),
    "sanitizer": Part(
        "benchmarks.gpu.sanitizer",
        "no race between streams in a step of each example and config; users with several streams "
        "of their own; late collectives and copies give the same bits",
        150,
        {"TORCH_CUDA_SANITIZER": "1"},
    ),
    "host_syncs": Part(
        "benchmarks.gpu.host_syncs",
        "a steady step never makes the host wait; its numbers are read while the next one runs",
        60,
    ),
    "overhead": Part(
        "benchmarks.gpu.overhead", "NaiveDDP and ZeRO at world 1 beside the bare step: 1.01", 90
    ),
    "offload": Part(
        "benchmarks.gpu.offload",
        "copies of ZeRO's offload beside a pinned copy and the processor's step",
        60,
    ),
    "checkpoint": Part(
        "benchmarks.gpu.checkpoint",
        "a save beside the steps keeps host and stream no longer than a pinned copy takes + 20 ms, "
        "and has the state before the step",
        90,
    ),
    "buckets": Part("benchmarks.gpu.buckets", "what stepping costs by the size of a bucket", 60),
    "memory": Part(
        "benchmarks.gpu.memory",
        "what the allocator was asked for beside `tdp plan`",
        120,
        PLAIN,
    ),
    "memory_expandable": Part(
        "benchmarks.gpu.memory",
        "the same, and the time of a step, with expandable segments",
        120,
        EXPANDABLE,
    ),
    "step_time": Part(
        "benchmarks.gpu.step_time",
        "a GPT of 124M and of 350M in bf16 beside a bare loop and the ceiling of a matrix product; "
        "which attention kernel runs",
        120,
    ),
    "context": Part(
        "benchmarks.gpu.context",
        "attention over parts of a sequence by each CUDA kernel is that of the whole, forward and "
        "backward; what cutting it costs",
        110,
    ),
    "experts": Part(
        "benchmarks.gpu.experts",
        "experts as one grouped product are right in bf16 and float32; a layer takes at most 1.00 "
        "of transformers' best and 0.80 of the loop over experts",
        110,
    ),
    "compile": Part(
        "benchmarks.gpu.compiled",
        "a step with `train.compile=blocks` is no slower than an eager one: time, kernels, graph "
        "breaks, seconds to compile, and again from what was kept",
        170,
    ),
    "fp8": Part(
        "benchmarks.gpu.fp8",
        "float8 products are those of the rounded numbers, and 200 steps end within 2 % of bf16's "
        "loss; a step of a wide GPT, eager and compiled",
        150,
    ),
    "host_time": Part(
        "benchmarks.gpu.host_time", "what `tdp train` adds to the host's part of a step", 60
    ),
    "hang": Part(
        "benchmarks.gpu.hang",
        "the report names a rank stuck in a hook, and a process with a stuck thread ends",
        90,
    ),
    "several": Part(
        "benchmarks.gpu.several",
        "several ranks, which share a GPU over NCCL 2.30 where there are too few: every layout of "
        "the parity matrix, saves, resumes, hangs and the order of calls; slices that are not "
        "aligned, a slow stage",
        580,
        has_cases=True,
    ),
    "fine_tune": Part(
        "benchmarks.gpu.fine_tune",
        "Qwen3-0.6B, recomputed as in a published step on one H100 and as we do best: 1.5 of its "
        "tokens a second",
        200,
        EXPANDABLE,
    ),
    "llama": Part(
        "benchmarks.gpu.llama",
        "a Llama of 1B, and of the width of 8B with as many layers as fit, bf16 and compiled: 47 % "
        "MFU, and the time of each class of kernels",
        240,
        EXPANDABLE,
    ),
    "activation_offload": Part(
        "benchmarks.gpu.activation_offload",
        "time and peak of a step with activations in host memory, beside recomputation and "
        "neither; the first loss has the same bits",
        200,
        EXPANDABLE,
    ),
    "fused_loss": Part(
        "benchmarks.gpu.fused_loss",
        "cross entropy of a vocabulary of 128k, a few tokens at a time: at most 0.35 of the peak "
        "with all logits",
        60,
    ),
}
