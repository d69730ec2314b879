"""What ranks do with adapters over 4-bit weights, and transformers, peft and bitsandbytes alone."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from tests.train import parity
from tests.train.lora_ranks import PREFIX, peft_model, plain, quiet, save_after
from tests.train.sources import UnevenTokens
from tests.train.transformers_ranks import (
    RUN,
    SEQ_LEN,
    STEPS,
    VOCAB,
    Answer,
    adamw,
    alone,
    loss_of,
    set_rate,
    steps_of,
    third_step,
    trainer,
    whole,
)
from torchdistpackage.parallel.tensor import four_bit
from torchdistpackage.parallel.tensor.four_bit import PackedProduct
from torchdistpackage.plan.memory import memory

FLOAT32 = torch.float32


@contextmanager
def bitsandbytes_in_float32() -> Iterator[None]:
    """It asks for torch.float32 by name, which is float64 `everywhere_float64`."""
    plain_unpacked = four_bit.unpacked

    def unpacked(*args):
        with patch.multiple(torch, float=FLOAT32, float32=FLOAT32):
            return plain_unpacked(*args)

    with patch.object(four_bit, "unpacked", unpacked):
        yield


def qlora_steps(overrides: list[str]) -> tuple[Answer, dict[str, torch.Tensor]]:
    """(three steps, the buffers with weights in 4 bits)."""
    run = trainer(overrides)
    kinds = torch.uint8, torch.int8
    packed = {n: b.clone() for n, b in run.stage.named_buffers() if b.dtype in kinds}
    assert packed and not any(p.is_meta for p in run.stage.parameters() if not p.requires_grad)
    with bitsandbytes_in_float32():
        return steps_of(run, range(1, STEPS + 1)), packed


def third_step_of(overrides: list[str], folder: str) -> Answer:
    with bitsandbytes_in_float32():
        return third_step(overrides, folder)


def two_steps_of(overrides: list[str], folder: str) -> list[float]:
    with bitsandbytes_in_float32():
        return save_after(overrides, folder, 2)


def rounded(weight: torch.Tensor, quant_type: str) -> torch.Tensor:
    """By the code book: bitsandbytes' own kernel is wrong for some rows on some processors.

    quant_type: "int8", or a type of 4 bits, behind which "+" is for double quantisation.
    """
    from bitsandbytes import functional

    if quant_type == "int8":
        values, scales, _ = functional.int8_vectorwise_quant(weight.float())
        return functional.int8_vectorwise_dequant(values, scales).to(weight.dtype)
    is_double = quant_type.endswith("+")
    values, state = functional.quantize_4bit(
        weight.float(), quant_type=quant_type.removesuffix("+"), compress_statistics=is_double
    )
    if is_double:
        state.absmax = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    return by_code_book(values, state, list(range(state.absmax.numel()))).to(weight.dtype)


def by_code_book(values: torch.Tensor, state, blocks: list[int]) -> torch.Tensor:
    """Block i scaled as block `blocks[i]` is, where a right kernel has i."""
    numbers = state.code[[x for byte in values.flatten().tolist() for x in (byte >> 4, byte & 15)]]
    scales = state.absmax[torch.tensor(blocks)].repeat_interleave(64)
    size = math.prod(state.shape)
    return (numbers[:size] * scales[:size]).view(state.shape).to(state.dtype)


def of_avx512(values: torch.Tensor, state) -> torch.Tensor:
    """As `dequantize_4bit` of bitsandbytes 0.50 does on CPUs with AVX-512: the scale of an element
    is that of block (row * whole blocks of a row + whole blocks before it in its row)."""
    rows, columns = math.prod(state.shape[:-1]), state.shape[-1]
    right = by_code_book(values, state, list(range(state.absmax.numel())))
    if columns % 16:
        return right
    blocks = torch.arange(rows)[:, None] * (columns // 64) + torch.arange(columns) // 64
    ones = torch.arange(rows * columns).view(rows, columns) // 64
    right, scales = right.view(rows, columns), state.absmax
    return (right / scales[ones] * scales[blocks]).view(state.shape).to(state.dtype)


@torch.no_grad()
def round_linear(model: nn.Module, quant_type: str) -> None:
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and "lora_" not in name and "lm_head" not in name:
            layer.weight.copy_(rounded(layer.weight, quant_type))
        elif type(layer).__name__ == "Conv1D":
            layer.weight.copy_(rounded(layer.weight.t().contiguous(), quant_type).t())


def of_rounded(
    folder: str, initial: dict[str, torch.Tensor], options: dict, quant_type: str
) -> Answer:
    """The same of peft over a model of transformers whose linear layers have rounded weights."""
    section = parity.config([*RUN, f"model.hf={folder}"])
    model = peft_model(folder, initial, options)
    round_linear(model, quant_type)
    trained = {plain(n): p for n, p in model.named_parameters() if p.requires_grad}
    adam = adamw(trained.values(), section)
    gradients, losses = alone(model, trained, adam, section)
    return Answer(whole(trained), gradients, losses)


def held_bytes(overrides: list[str]) -> tuple[int, int]:
    """(bytes of this rank's weights, as the plan has them)."""
    run = parity.trainer(overrides)
    layouts = run.layouts.values()
    planned = memory(run.plan.config, run.plan.topology, layouts, run.rank, run.plan.packed)
    tensors = {id(p): p.nbytes for p in run.stage.parameters()}
    for layer in run.stage.modules():
        if isinstance(product := getattr(layer, "product", None), PackedProduct):
            tensors[id(layer)] = layer.weight.nbytes + product.state.num_bytes
    return sum(tensors.values()), planned.weights_bytes


def of_bitsandbytes(folder: str, initial: dict[str, torch.Tensor], options: dict) -> list[float]:
    """Losses of three steps of transformers' own 4-bit model under peft, in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=four_bit, device_map="cpu"
    )
    with quiet():
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    assert type(model.get_submodule(f"{PREFIX}model.layers.0.mlp.up_proj")).__name__ == "Linear4bit"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(initial[plain(name)])
    section = parity.config([*RUN, f"model.hf={folder}"])
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = adamw(trained, section)
    data, losses = UnevenTokens(SEQ_LEN, VOCAB), list[float]()
    for step in range(1, STEPS + 1):
        ids, targets = data.batch("train", section.run.seed, step, 0, 1, section.data.global_batch)
        adam.zero_grad()
        loss = loss_of(model, ids, targets)
        loss.backward()
        set_rate(adam, section, step)
        adam.step()
        losses.append(loss.item())
    return losses


def losses_of(overrides: list[str]) -> list[float]:
    """Of three steps, in the precision that is asked for."""
    run = parity.trainer([*RUN, *overrides])
    return [run.train_step(step).wait().loss for step in range(1, STEPS + 1)]


def merged_by_peft(folder: str, adapters: str, quant_type: str) -> dict[str, torch.Tensor]:
    """What peft merges into a model whose linear layers have rounded weights."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    round_linear(model, quant_type)
    with quiet():
        return PeftModel.from_pretrained(model, adapters).merge_and_unload().state_dict()
