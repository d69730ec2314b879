"""A Llama of 1B, and of the width of 8B with as many layers as fit: MFU, and where the time goes.

bf16 with float32 masters, blocks compiled, one sample of 8,192 tokens a microbatch. MFU counts the
operations that train (`flops_per_token`), of the data sheet's peak where the card is known; beside
it stands the ceiling of a square product that was measured here.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.here import Here
from benchmarks.gpu.kernel_classes import Kernel, times_by_class
from benchmarks.gpu.models import steady
from benchmarks.gpu.rows import Found
from benchmarks.gpu.step_time import ceiling_of
from benchmarks.gpu.transformers_runs import (
    LLAMA_1B,
    LLAMA_8B,
    DecoderRun,
    compiled,
    measured,
)
from torchdistpackage.predict.devices import named_device
from torchdistpackage.text import size_text
from torchdistpackage.train.step import Trainer

BAR = 0.47
SEQ_LEN = 8192
BYTES_PER_WEIGHT = 16
"""Master, gradient and two moments of Adam, each in float32."""
SPARE = 0.7
"""Share of the memory for these, at first; a model that does not fit has two layers less."""


def measure(here: Here, found: Found) -> None:
    here.join()
    ceiling = ceiling_of(here)
    found.show("ceiling: a bf16 product", f"{ceiling / 1e12:.2f} TFLOP/s", flops_per_s=ceiling)
    for name, model in (("1B", LLAMA_1B), ("8B's width", LLAMA_8B)):
        with found.case(name):
            _model(here, found, name, DecoderRun(model, SEQ_LEN, 2), ceiling)
    here.leave()


def _model(here: Here, found: Found, name: str, run: DecoderRun, ceiling: float) -> None:
    for layers in _layers(here, run):
        sized = DecoderRun({**run.model, "num_hidden_layers": layers}, run.seq_len, run.samples)
        sized = sized.on(here)
        title = f"{name}, {sized.model['num_hidden_layers']} layers"
        try:
            _steps(here, found, title, sized, ceiling)
        except torch.OutOfMemoryError as error:
            found.show(title, str(error).partition(".")[0])
            torch.cuda.empty_cache()
            continue
        return


def _layers(here: Here, run: DecoderRun) -> Iterator[int]:
    """From as many as may fit down."""
    n = {key: value for key, value in run.model.items() if isinstance(value, int)}
    most = n["num_hidden_layers"]
    if here.small:
        yield most
        return
    width, kv = n["hidden_size"], n["num_key_value_heads"] / n["num_attention_heads"]
    a_layer = width * (2 * width * (1 + kv) + 3 * n["intermediate_size"])
    ends = n["vocab_size"] * width * (1 if n["tie_word_embeddings"] else 2)
    memory = torch.cuda.get_device_properties(here.device).total_memory
    room = SPARE * memory / BYTES_PER_WEIGHT - ends
    yield from range(max(min(most, int(room / a_layer)), 1), 0, -2)


def _steps(here: Here, found: Found, name: str, run: DecoderRun, ceiling: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train = run.trainer(here, Path(folder), compiled(here))
        result = measured(here, train)
        assert train.plan.model is not None
        rate = run.tokens / result.step_s
        used = train.plan.model.flops_per_token() * rate
        card = None if here.small else named_device(torch.cuda.get_device_name(here.device))
        peak = None if card is None else card.peak("bfloat16")
        text = f"{1e3 * result.step_s:.1f} ms a step, {rate:,.0f} tokens/s, "
        text += f"{used / ceiling:.1%} of the ceiling, peak {size_text(result.peak_bytes)}"
        numbers = {"step_s": result.step_s, "of_ceiling": used / ceiling, "tokens_per_s": rate}
        if peak is None:
            found.show(name, text, **numbers)
        else:
            text += f", MFU {used / peak:.1%}; bar {BAR:.0%}"
            found.judge_time(name, used / peak >= BAR, text, mfu=used / peak, **numbers)
        _classes(here, found, name, train)
        train.close()


def _kernels(here: Here, seen: profile) -> Iterator[Kernel]:
    """Kernels and copies of a GPU; on a CPU operators, without the time of those inside."""
    for event in seen.events():
        start, end = event.time_range.start, event.time_range.end
        if here.small:
            yield event.name, start, start + event.self_cpu_time_total
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            yield event.name, start, end


def _classes(here: Here, found: Found, name: str, train: Trainer) -> None:
    """A row for each class of kernels."""
    step = steady(train)
    step()
    here.sync()
    kind = ProfilerActivity.CPU if here.small else ProfilerActivity.CUDA
    with profile(activities=[kind]) as seen:
        step()
        here.sync()
    times = times_by_class(_kernels(here, seen))
    total = sum(times.values())
    for of, us in times.items():
        share = us / max(total, 1e-9)
        found.show(f"{name}: {of}", f"{us / 1e3:.2f} ms, {share:.1%}", ms=us / 1e3, share=share)
