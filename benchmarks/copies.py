"""Two ways to bring a backward's 34 MB of gradients into flat memory, on one rank.

Copy each fresh gradient in a hook (what NaiveDDP does), or zero the memory and let autograd add to
it. The limit is the same backward that leaves its gradients where they are. The results of the two
must be equal bit for bit.
"""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.common import arguments, in_turns, local, rows, show, write


def copies(rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    inputs = torch.randn(256, 1024)
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes))
    views = [v.view_as(p) for v, p in zip(flat.split(sizes), parameters, strict=True)]
    found: dict[str, Tensor] = {}

    def copied(p: Tensor, view: Tensor) -> None:
        view.copy_(p.grad)
        p.grad = view

    def backward(way: str) -> None:
        hooks = []
        for p, view in zip(parameters, views, strict=True):
            p.grad = view if way == "zero, then add in place" else None
            if way == "fresh, then copy":
                hook = partial(copied, view=view)
                hooks.append(p.register_post_accumulate_grad_hook(hook))
        if way == "zero, then add in place":
            flat.zero_()
        model(inputs).square().mean().backward()
        for hook in hooks:
            hook.remove()
        found[way] = flat.clone() if way != "neither" else flat

    ways = ("neither", "fresh, then copy", "zero, then add in place")
    times = in_turns({way: partial(backward, way) for way in ways}, 3 * rounds, None)
    assert torch.equal(found[ways[1]], found[ways[2]]), "the two ways differ"
    return times


def main() -> None:
    options = arguments(__doc__)
    table = rows(local(copies, options.rounds, num_procs=1)[0])
    show("8 x Linear(1024), batch 256", table, "ms per backward", "neither")
    write(options.json, {"unit": "ms per backward", "results": table})


if __name__ == "__main__":
    main()
