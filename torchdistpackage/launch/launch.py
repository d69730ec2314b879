"""The same script by hand or under a launcher: be a rank if one was made here, else start them.

One rule: a launcher is never overruled. Under torchrun or srun this process is a rank already, so
it calls the function itself and starts nothing.
"""

import os
from collections.abc import Callable, Sequence

from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.launch.workers import run_local

# A rank that trains imports all of these; the last when it makes its first optimizer.
_PRELOAD = ("torch", "torch.distributed", "torch._dynamo")


def run_or_launch(
    fn: Callable[..., object],
    *args: object,
    num_procs: int,
    preload: Sequence[str] = (),
) -> object:
    """Call `fn(*args)` as the rank that this process is, or on `num_procs` new ranks.

    fn: a function at the top level of a module or script; it calls `setup_distributed()`.
    preload: what is imported once, before the new ranks are forked, beside torch.

    Returns what `fn` returned: here under a launcher, else on rank 0.

    Raises:
        RankError: a new rank failed; the text ends with its rank, host and traceback.
        LaunchError: the launcher's variables are incomplete, or no process can be started.
    """
    if detect(os.environ).source != "alone":
        return fn(*args)
    return run_local(fn, args, num_procs=num_procs, preload=(*_PRELOAD, *preload))[0]
