"""Write what `detect` makes of this process: join_detect.py FOLDER [SECONDS to stay]."""

import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path

from torchdistpackage.environment.rendezvous import detect


def write(folder: Path, stay_s: float = 0.0) -> str:
    """The file that holds it, one per process, whole as soon as it is there."""
    begin = time.time()
    found = dataclasses.asdict(detect(os.environ))
    time.sleep(stay_s)
    job = os.environ.get("SLURM_JOB_ID", "none")
    me = {"host": socket.gethostname(), "job": job, "from_s": begin, "to_s": time.time()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job}.{me['host']}.{os.getpid()}.part"
    path.write_text(json.dumps(found | me))
    return str(path.rename(path.with_suffix(".json")))


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(float, sys.argv[2:]))
