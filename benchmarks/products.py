"""`tensor_parallel` with q, k and v as one product, whose backward sums meanwhile, or with copies.

    python -m benchmarks.products [--rounds N] [--json FILE]      as root, three minutes

Steps of a Llama on two hosts with a core each (data_parallel/link.py), by the link between them.
Both sides have the same weights, to the bit, when all turns are through.
"""

import os
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.common import arguments, show, take_turns, write
from benchmarks.data_parallel.link import RATES, Link, enter_alone, shape
from benchmarks.turns import Turn, ratio, rounds_s, spread_ms
from torchdistpackage.launch.workers import run_local

PRELOAD = ("torch", "transformers.models.llama.modeling_llama")
OURS, COPIES = "one product", "copies"
LINKS = ("free", "4g", "1g")
SIZES = ((512, 4, 2, 64), (512, 4, 4, 128))
"""Hidden size, layers, sequences and tokens of each."""


def rank_main(hosts: Sequence[str], rounds: int) -> dict[tuple[Any, ...], Any]:
    """Turns of a rank, by size and link, side and round."""
    import torch
    import torch.distributed as dist

    from benchmarks.any_model.models import Case, make, trained_on
    from torchdistpackage import tensor_parallel
    from torchdistpackage.comm.runtime import leave, setup_distributed
    from torchdistpackage.compat.tensor_parallel.engine.family_plan import plan_for

    def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def turn(side: str) -> Turn:
        dist.barrier()
        begin = time.monotonic()
        steps[side]()
        return begin, time.monotonic()

    enter_alone(hosts, int(os.environ["RANK"]))
    rank = setup_distributed()[0]
    found: dict[tuple[Any, ...], Any] = {}
    for size in SIZES:
        case = Case("llama", *size)
        whole, ids = make(case), trained_on(case)
        plan = plan_for(whole, 2)
        assert plan is not None
        models, steps = {}, {}
        for side, config in ((OURS, plan), (COPIES, replace(plan, entrances={}))):
            model = tensor_parallel(deepcopy(whole), tensor_parallel_config=config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
            models[side], steps[side] = model, partial(step, model, optimizer, ids)
            steps[side]()
        for link in LINKS:
            dist.barrier()
            if rank == 0:
                shape(hosts, RATES[link])
            found[*size, link] = take_turns([*steps], (), rounds, turn)
        for ours, copies in zip(*(m.parameters() for m in models.values()), strict=True):
            if not torch.equal(ours, copies):
                raise ValueError(f"{size}: a weight differs")
    leave()
    return found


def main() -> None:
    options = arguments(__doc__)
    with Link() as link:
        args, env = (link.hosts, options.rounds), {**link.env, "OMP_NUM_THREADS": "1"}
        ranks = run_local(rank_main, args, num_procs=2, preload=PRELOAD, env=env)
    results = {}
    for key in ranks[0]:
        sides = {s: spread_ms(rounds_s([rank[key][s] for rank in ranks])) for s in (OURS, COPIES)}
        dim, layers, batch, length, name = key
        title = f"Llama {dim}, {layers} layers, {batch} x {length} tokens, link {name}"
        middle, half = ratio(sides[OURS], sides[COPIES])
        assert half is not None
        show(title, sides, "ms a step", COPIES)
        print(f"{OURS} / {COPIES}: {middle:.3f} ({half[0]:.3f} to {half[1]:.3f})", flush=True)
        results[title] = {**sides, "ratio": middle, "half": half}
    write(options.json, results)


if __name__ == "__main__":
    main()
