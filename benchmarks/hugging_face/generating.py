"""Greedy tokens of a Llama: ours and transformers' own, both with a cache, in turns in one process.

Ours runs the model as `tdp generate` does with the folder: as this package's GPT, and as
transformers' own modules (`model.hf`).
"""

import time
from itertools import islice
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.hugging_face.bars import OURS, OURS_HF, TRANSFORMERS
from benchmarks.turns import Turn
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.config.load import loads
from torchdistpackage.config.yaml_loader import write
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_model
from torchdistpackage.train.generate import generate_batch
from torchdistpackage.train.inference_request import Sampling
from torchdistpackage.train.staged_model import StagedModel

SIDES = (OURS, OURS_HF, TRANSFORMERS)
_TURN_S = 240.0


def rank_main(folder: str, rounds: int, num_prompt: int, num_new: int) -> dict[str, Any]:
    """Turns by side: seconds of `num_new` tokens after a prompt of `num_prompt`. Tokens agree."""
    setup_distributed()
    theirs = LlamaForCausalLM.from_pretrained(folder).eval()
    vocab = theirs.config.vocab_size
    draw = torch.Generator().manual_seed(2)
    prompt = torch.randint(vocab, (1, num_prompt), generator=draw)
    models = {OURS: _model(folder, "weights"), OURS_HF: _model(folder, "hf")}

    def ours(model: StagedModel) -> list[int]:
        found = generate_batch(model, prompt.tolist(), Sampling(), 1024, _TURN_S)
        return [token for (token,) in islice(found, num_new)]

    def of_transformers() -> list[int]:
        how = {"do_sample": False, "max_new_tokens": num_new, "min_new_tokens": num_new}
        found = theirs.generate(prompt, **how, attention_mask=torch.ones_like(prompt))
        return found[0, num_prompt:].tolist()

    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    cpu_s: dict[str, list[float]] = {side: [] for side in SIDES}
    told: dict[str, list[int]] = {}
    for number in range(rounds + 1):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            began, began_cpu = time.perf_counter(), time.process_time()
            told[side] = of_transformers() if side == TRANSFORMERS else ours(models[side])
            if number:  # the first is not counted
                turns[side].append((began, time.perf_counter()))
                cpu_s[side].append(time.process_time() - began_cpu)
    truth = told[TRANSFORMERS]
    same = min(sum(a == b for a, b in zip(told[side], truth, strict=True)) for side in SIDES)
    leave()
    return {"turns": turns, "cpu_s": cpu_s, "same": same}


def _model(folder: str, key: str) -> StagedModel:
    data = {"name": "tokens", "path": "/dev/null", "seq_len": 1024, "global_batch": 1}
    text = write({"model": {key: folder}, "data": data, "pipeline": {"microbatches": 1}})
    plan = make_plan(loads(text, folder, ["parallel.data=1"], 1), 1)
    return build_model(plan, 0, torch.device("cpu"))
