"""The peer's submission: submitit's executor, one torchrun on each node. Prints the job's id.

As submitit's documentation has it: a callable whose `checkpoint` submits itself again.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import submitit

PORT = 29500


class Training:
    def __init__(self, words: list[str], nodes: int, max_restarts: int):
        self.words, self.nodes, self.max_restarts = words, nodes, max_restarts

    def __call__(self) -> None:
        first = submitit.JobEnvironment().hostnames[0]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += [f"--nnodes={self.nodes}", "--nproc-per-node=1"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{PORT}"]
        torchrun += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"]
        if self.max_restarts:
            torchrun += [f"--max-restarts={self.max_restarts}"]
            # Agents count their restarts apart, and in a store that outlives them attempts mix.
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        subprocess.run([*torchrun, *self.words], check=True)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--partition", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    options, words = parser.parse_known_args()
    executor = submitit.AutoExecutor(folder=options.logs, cluster="slurm")
    executor.update_parameters(
        name="peer",
        nodes=options.nodes,
        tasks_per_node=1,
        timeout_min=60,
        slurm_partition=options.partition,
    )
    script = str(Path(__file__).resolve().with_name("faults_train.py"))
    job = executor.submit(Training([script, *words], options.nodes, options.max_restarts))
    print(job.job_id)


if __name__ == "__main__":
    main()
