"""What ranks do with low-rank adapters on transformers' modules, and peft in one process."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tests.train import parity
from tests.train.transformers_ranks import (
    RUN,
    STEPS,
    Answer,
    adam_of,
    adamw,
    alone,
    everywhere_float64,
    steps_of,
    trainer,
    whole,
)
from torchdistpackage.models.transformers_meta import build_options
from torchdistpackage.train.train_state import TrainState, save_state

PREFIX = "base_model.model."


@contextmanager
def quiet() -> Iterator[None]:
    """peft asks transformers by an earlier name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def lora_steps(overrides: list[str]) -> Answer:
    """Three steps; nothing but adapters has a gradient, or state in the optimizer."""
    run = trainer(overrides)
    for name, parameter in run.stage.named_parameters():
        assert parameter.requires_grad is (".lora_" in name), name
    return steps_of(run, range(1, STEPS + 1))


def initial_of(overrides: list[str]) -> parity.Held:
    return parity.held(parity.trainer([*RUN, *overrides]), "data")


def plain(name: str) -> str:
    """The global name of what peft's model calls `name`."""
    for part in (PREFIX, ".base_layer", ".modules_to_save", ".default"):
        name = name.replace(part, "." if part == PREFIX and not name.startswith(PREFIX) else "")
    return name


def peft_model(
    folder: str,
    initial: dict[str, torch.Tensor],
    options: dict,
    dtype: torch.dtype = torch.float64,
):
    """transformers' model with peft's adapters, which have these values."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **build_options(dtype))
    with quiet():
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(initial[plain(name)])
    return model


def of_peft(folder: str, initial: dict[str, torch.Tensor], options: dict) -> Answer:
    """`lora_steps` of transformers and peft in one process, without this package."""
    section = parity.config([*RUN, f"model.hf={folder}"])
    model = peft_model(folder, initial, options)
    trained = {plain(n): p for n, p in model.named_parameters() if p.requires_grad}
    adam = adamw(trained.values(), section)
    gradients, losses = alone(model, trained, adam, section)
    return Answer(whole({plain(n): p for n, p in model.named_parameters()}), gradients, losses)


def save_after(overrides: list[str], folder: str, num: int) -> list[float]:
    """`num` steps and a checkpoint, in a run folder."""
    run = trainer(overrides)
    losses = [run.train_step(step).wait().loss for step in range(1, num + 1)]
    save_state(run, TrainState(step=num), Path(folder), keep_last=1)
    if run.rank == 0:
        (Path(folder) / "resolved.yaml").write_text(run.plan.config.to_yaml())
    return losses


def loaded_by_peft(
    base: str, folder: str, prompt: list[int]
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Every adapter's parameter of a folder of peft, as peft loads it, and greedy tokens behind a
    prompt; it writes the folder again."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with quiet():
        model = PeftModel.from_pretrained(model, folder)
        model.save_pretrained(f"{folder}-again", save_embedding_layers=False)
    with everywhere_float64():
        ids = model.generate(
            input_ids=torch.tensor([prompt]),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    adapters = {plain(n): p.detach() for n, p in model.named_parameters() if "lora_" in n}
    return adapters, ids[0, len(prompt) :].tolist()


def exported_logits(base: str, folder: str) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """Logits of a model with the adapters of a folder, added in by hand and as peft loads it, and
    the names of peft's adapters. What peft misses or does not expect it warns of."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    def model():
        # transformers' stacked experts have no float64
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    by_hand, ids = model(), torch.arange(10).view(1, 10) % 7 + 2
    settings = json.loads((Path(folder) / "adapter_config.json").read_text())
    held, scale = load_file(f"{folder}/adapter_model.safetensors"), settings["lora_alpha"]
    with torch.no_grad(), quiet():
        for name in (x for x in held if "lora_A" in x):
            b, layer = held[name.replace("lora_A", "lora_B")], name.partition(".lora_A")[0]
            weight = by_hand.get_parameter(f"{layer.removeprefix(PREFIX)}.weight")
            weight += scale / settings["r"] * (b @ held[name])
        expected = by_hand(ids).logits
        adapted = PeftModel.from_pretrained(model(), folder)
        found = adapted(ids).logits
    names = {n.replace(".default", "") for n, _ in adapted.named_parameters() if "lora_" in n}
    return expected, found, names


def recomputed(overrides: list[str], how: list[str]) -> tuple[tuple[str, ...], parity.Held, list]:
    """(what is recomputed, weights after two steps, losses)."""
    run = trainer([*overrides, *how])
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    return run.recomputed, parity.held(run, "data"), losses


def merged_by_peft(base: str, adapters: str, folder: str) -> str:
    """What peft merges of a folder and its adapters, as transformers saves it in `folder`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    with quiet():
        PeftModel.from_pretrained(model, adapters).merge_and_unload().save_pretrained(folder)
    return folder


def option_steps(overrides: list[str]) -> Answer:
    """Three steps of whatever has gradients."""
    return steps_of(trainer(overrides), range(1, STEPS + 1))


def of_peft_options(folder: str, initial: dict[str, torch.Tensor], options: dict) -> Answer:
    """`option_steps` of transformers and peft in one process, without this package."""
    section = parity.config([*RUN, f"model.hf={folder}"])
    model = peft_model(folder, initial, options)
    tensors = {plain(n): p for n, p in model.named_parameters() if ".original_module." not in n}
    trained = {n: p for n, p in tensors.items() if p.requires_grad}
    gradients, losses = alone(model, trained, adam_of(trained, section), section)
    return Answer(whole(tensors), gradients, losses)


def saved_by_peft(base: str, adapters: str, folder: str) -> None:
    """The folder of adapters, as peft loads and saves it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    with quiet():
        model = PeftModel.from_pretrained(model, adapters, is_trainable=True)
        model.save_pretrained(folder, save_embedding_layers=False)


def expert_factors(model) -> dict[str, tuple[torch.nn.Parameter, Callable[[Tensor], Tensor]]]:
    """By global name the factors of peft's wrappers around experts, and how this package stacks
    them: A (E, r, Din), B (E, Dout, r).
    """
    from peft.tuners.lora.layer import ParamWrapper

    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            stack = f"{plain(path)}.{module.parameter_name}"
            num, r = module.num_experts, module.r["default"]

            def a_of(x, num=num, r=r):
                return x.reshape(num, r, -1)

            def b_of(x, num=num, r=r):
                return x.reshape(-1, r, num).permute(2, 0, 1)

            found[f"{stack}.lora_A"] = (module.lora_A["default"].weight, a_of)
            found[f"{stack}.lora_B"] = (module.lora_B["default"].weight, b_of)
    return found


def of_peft_experts(folder: str, initial: dict[str, torch.Tensor], options: dict) -> Answer:
    """`option_steps` of transformers and peft's `target_parameters` in one process."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    section = parity.config([*RUN, f"model.hf={folder}"])
    model = AutoModelForCausalLM.from_pretrained(folder, **build_options(torch.float64))
    with quiet():
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    factors = expert_factors(model)
    ours = {id(p): (name, stacked) for name, (p, stacked) in factors.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in ours:
                key, stacked = ours[id(parameter)]
                stacked(parameter.data).copy_(initial[key])
            elif "lora_" in name:
                parameter.copy_(initial[plain(name)])

    def named(tensors: dict[str, tuple[torch.nn.Parameter, Tensor]]) -> dict[str, Tensor]:
        by_name = {}
        for name, (parameter, value) in tensors.items():
            key, stacked = ours.get(id(parameter), (plain(name), lambda x: x))
            by_name[key] = stacked(value)
        return by_name

    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients, losses = alone(model, trained, adamw(trained.values(), section), section)
    by_step = []
    for held in gradients:
        tensors = {name: (trained[name], x) for name, _, _, x in held}
        by_step.append(whole(named(tensors)))
    weights = named({n: (p, p) for n, p in model.named_parameters()})
    return Answer(whole(weights), by_step, losses)


def grown_by_peft(folder: str, initial: dict[str, torch.Tensor], options: dict, vocab: int):
    """transformers' model with more tokens and peft's adapters, with these values."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **build_options(torch.float64))
    model.resize_token_embeddings(vocab, mean_resizing=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in initial:  # the added rows too
                parameter.copy_(initial[name])
    with quiet():
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(initial[plain(name)])
    return model


def of_peft_tokens(
    folder: str, initial: dict[str, torch.Tensor], options: dict, vocab: int
) -> Answer:
    """`option_steps` of transformers and peft in one process, with more tokens than the folder."""
    section = parity.config([*RUN, f"model.hf={folder}", f"model.vocab={vocab}"])
    model = grown_by_peft(folder, initial, options, vocab)
    named = {
        plain(n).replace("token_adapter.weight", "weight"): p
        for n, p in model.named_parameters()
        if ".original_module." not in n
    }
    trained = {n: p for n, p in named.items() if p.requires_grad}
    gradients, losses = alone(model, trained, adam_of(trained, section), section)
    return Answer(whole(named), gradients, losses)


def merged_with_tokens(base: str, adapters: str, folder: str, vocab: int) -> str:
    """What peft merges of a folder whose model is resized first, as transformers saves it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model.resize_token_embeddings(vocab, mean_resizing=False)
    with quiet():
        PeftModel.from_pretrained(model, adapters).merge_and_unload().save_pretrained(folder)
    return folder
