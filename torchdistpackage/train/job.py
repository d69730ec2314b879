"""A run as processes: start them on this machine, or be one of those a launcher started. No torch.

Under torchrun or srun this process is a rank already. Alone, it starts the ranks and watches them.
"""

import importlib
import os

from torchdistpackage.config.load import load
from torchdistpackage.launch.local import run_local
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.train.folder import prepare_folder
from torchdistpackage.train.plan import local_procs, make_plan

RANK = "torchdistpackage.train.rank"
# torch._dynamo: the first optimizer of a process imports it, which takes seconds
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "numpy", "safetensors.torch", RANK)


def launch(path: str, overrides: list[str], resume: str = "auto") -> int:
    """Run the configuration at `path`; the exit code.

    Raises:
        ConfigError: it is wrong, for any rank; nothing has been started.
        RankError: a rank failed; names the first culprit.
    """
    rendezvous = detect(os.environ)
    if rendezvous.source != "alone":
        config = load(path, overrides, rendezvous.world_size)
        # only a rank pays for torch; the parent of local ones does without
        return importlib.import_module(RANK).rank_main(config, resume)
    config = load(path, overrides)
    num_procs = local_procs(config)
    make_plan(config, num_procs, path)
    folder = prepare_folder(config, resume)
    run_local(
        f"{RANK}:rank_main",
        (config, resume),
        num_procs=num_procs,
        preload=PRELOAD,
        log_dir=folder / "logs",
    )
    return 0
