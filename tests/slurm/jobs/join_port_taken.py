"""Take the first candidate port of the step that comes, then run it: FILE COMMAND..."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from torchdistpackage.environment.rendezvous import detect

step = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GTIDS": "0",
}
ports = detect({**os.environ, **step}).ports
with socket.socket() as taken:
    taken.bind(("0.0.0.0", ports[0]))
    taken.listen()
    Path(sys.argv[1]).write_text(str(ports[0]))
    sys.exit(subprocess.run(sys.argv[2:], check=False, timeout=300).returncode)
