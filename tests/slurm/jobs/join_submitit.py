"""Submit `write` of join_detect.py through submitit: join_submitit.py FOLDER; prints the job."""

import sys
from pathlib import Path

import join_detect
import submitit

folder = Path(sys.argv[1])
executor = submitit.AutoExecutor(folder=folder / "submitit", cluster="slurm")
executor.update_parameters(
    nodes=2, tasks_per_node=2, timeout_min=5, slurm_setup=[f"export PYTHONPATH={sys.argv[2]}"]
)
print(executor.submit(join_detect.write, folder / "tasks").job_id)
