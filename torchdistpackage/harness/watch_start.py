"""Where a watch begins: one name and one folder, which all ranks see.

One rule: who cannot be heard is told so at once. Ranks whose folders are not the same one would
each report, in the first hang, that the others have never come.
"""

import os
import shutil
import socket
import time
from pathlib import Path
from typing import cast

from torchdistpackage.comm import primitives
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.hang.dump import Folder
from torchdistpackage.harness.hang.waits import SHOWN
from torchdistpackage.launch.slurm.run_dir import attempt_id


def agree_on_start(folder: str | Path, *, rank: int, world_size: int) -> str:
    """A name for what begins now, the same on all ranks and never used before.

    Collective. The files of that name are in `folder` afterwards.

    Raises:
        ConfigError: some ranks do not see the folder of rank 0; raised on all.
        OSError: rank 0 cannot write there.
    """
    now_s, us = divmod(time.time_ns() // 1000, 10**6)
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    start, parent = f"{attempt_id(os.environ)}.{when}.{us:06}", Path(folder).absolute()
    if rank == 0:
        Folder(parent, start).make()
    if world_size == 1:
        return start
    start = str(primitives.broadcast_object(start))
    # nobody has asked for that name before, so no file system remembers that it was not there
    files = Folder(parent, start)
    mine = (files.path.is_dir(), f"{socket.gethostname()} at {parent}")
    seen = cast(list[tuple[bool, str]], primitives.gather_objects(mine))
    blind = [f"rank {rank} on {where}" for rank, (sees, where) in enumerate(seen) if not sees]
    if blind:
        if rank == 0:
            shutil.rmtree(files.path, ignore_errors=True)
        many = f", ... ({len(blind)} ranks)" if len(blind) > SHOWN else ""
        raise ConfigError(
            f"watch: what rank 0 on {seen[0][1]} makes is not seen by {', '.join(blind[:SHOWN])}"
            f"{many}; name one folder, on a file system that all hosts share"
        )
    return start
