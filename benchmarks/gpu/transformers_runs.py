"""What the parts train of transformers: decoders of a config.json, random weights, drawn tokens."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.models import ONE_RANK, steady
from tests.ddp.allocated import Meter
from torchdistpackage.config.load import loads
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.train.build import build
from torchdistpackage.train.compiled import run_eagerly, warm_up
from torchdistpackage.train.step import Trainer

QWEN3_06B: Mapping[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LLAMA_1B: Mapping[str, object] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
LLAMA_8B: Mapping[str, object] = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}
STAND_IN: Mapping[str, object] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
"""Sizes of what a CPU trains instead."""
SHORT = 32
"""Tokens of its samples."""


@dataclass(frozen=True)
class DecoderRun:
    """A run of one rank. model: config.json. samples: of a step; each round has one."""

    model: Mapping[str, object]
    seq_len: int
    samples: int

    def on(self, here: Here) -> "DecoderRun":
        """The same, small on a CPU."""
        if not here.small:
            return self
        return DecoderRun({**self.model, **STAND_IN}, SHORT, self.samples)

    @property
    def tokens(self) -> int:
        return self.seq_len * self.samples

    def plan(self, folder: Path, changes: Sequence[str]) -> Plan:
        (folder / "config.json").write_text(json.dumps(self.model))
        fixed = [
            f"model.hf={folder / 'config.json'}",
            "data.name=python_stdlib",
            f"data.seq_len={self.seq_len}",
            f"data.global_batch={self.samples}",
            "optim.warmup_steps=1",
            "precision.dtype=bf16",
            *ONE_RANK,
            f"train.accumulate={self.samples}",
        ]
        last = {item.partition("=")[0]: item for item in (*fixed, *changes)}
        return make_plan(loads("launch: {local: {procs: null}}", overrides=[*last.values()]), 1)

    def trainer(self, here: Here, folder: Path, changes: Sequence[str]) -> Trainer:
        """What `tdp train` would train with; its blocks are compiled here if it compiles."""
        train = build(self.plan(folder, changes), 0, here.device)
        if train.stage.compiled:
            torch._dynamo.reset()
            warm_up(train, 1)
        return train


def compiled(here: Here) -> list[str]:
    return ["train.compile=blocks", f"train.compile_backend={backend(here)}"]


def backend(here: Here) -> str:
    return "aot_eager" if here.small else "inductor"


@dataclass(frozen=True)
class Measured:
    """step_s: median. peak_bytes: of a step, with weights and optimizer state on a GPU; on a CPU
    without them."""

    step_s: float
    peak_bytes: int


def measured(here: Here, train: Trainer, rounds: int = 5) -> Measured:
    step = steady(train)
    for _ in range(1 if here.small else 3):
        step()
    step_s = here.median_s(step, 2 if here.small else rounds)
    # dynamo refuses the mode that counts on a CPU
    with run_eagerly(train.stage.compiled if here.small else ()):  # type: ignore[arg-type]
        return Measured(step_s, peak_bytes(here, step))


def peak_bytes(here: Here, step: Callable[[], object]) -> int:
    """The most that a call holds."""
    if here.small:
        meter = Meter()
        meter.run(step)
        return meter.peak
    torch.cuda.reset_peak_memory_stats()
    step()
    here.sync()
    return torch.cuda.max_memory_allocated()
