"""The batch script of a job, and a bash to run it in, with stand-ins for Slurm's commands."""

import subprocess
from dataclasses import replace
from pathlib import Path

from torchdistpackage.config.load import loads
from torchdistpackage.launch.slurm.job import BatchJob, CodePaths, batch_job
from torchdistpackage.launch.slurm.script import render
from torchdistpackage.run_files import RunDir

ODD = '/shared/my run\'s "x" $HOME 100%/runs'
STUB = """#!/bin/bash
printf '%s\\0' "$(basename "$0")" "$@" >>"$NOTED"
printf '\\n' >>"$NOTED"
case $(basename "$0") in
srun)
    case $* in *" true") exit "${CHECK_CODE:-0}" ;; esac
    env >"$NOTED.env"
    printf '%s' "$PWD" >"$NOTED.cwd"
    [ -z "$WORD" ] || echo "$WORD" >"$RUN/job/decision.7.${SLURM_RESTART_COUNT:-0}"
    exit "${SRUN_CODE:-0}"
    ;;
squeue)
    [ -z "$WARNING" ] || echo "$WARNING" >&2
    answer=${STATE-RUNNING None}
    case $* in *%e*) answer=${END:+$(date +%FT%T) $END} ;; esac
    for format in "$@"; do :; done
    format=${format#--format=}
    [ -z "$answer" ] || echo "${format%%=*}=$answer"
    ;;
sbatch) env >"$NOTED.sbatch"; echo "${NEXT:-8}" ;;
scontrol)
    case $* in *"show job"*) printf '%s' "$SHOWN"; exit ;; esac
    exit "${SCONTROL_CODE:-0}"
    ;;
python) exit "${VERDICT:-3}" ;;
esac
"""


def job_of(
    options: str = "{}", run: Path | None = None, degrees: str = "data: 4", **more
) -> BatchJob:
    config = loads(
        f"run: {{name: one}}\nparallel: {{{degrees}}}\ndata: {{global_batch: 48}}\n"
        f"pipeline: {{microbatches: 1}}\nlaunch: {{slurm: {options}}}",
        overrides=more.pop("overrides", ()),
        job=True,
    )
    folder = run or Path(ODD, "one")
    code = CodePaths(f"{folder}/code/abc", (f"{folder}/code/abc/tree", "/other"), f"{folder}/here")
    return batch_job(config, [folder], Path("/home/me"), code, "/venv/bin/python", "login", **more)


def lines(job: BatchJob) -> list[str]:
    return [line for line in render(job).splitlines() if line.startswith("#SBATCH")]


class Bash:
    """`bash(job, WORD=...)` runs the script in a job 7 of its own; what it did, for the asking."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "runs" / "my run"
        self.noted, self.commands = place / "noted", place / "bin"
        self.script = place / "job.sbatch"
        self.commands.mkdir()
        for name in ("srun", "squeue", "sbatch", "scontrol", "python", "sleep"):
            (self.commands / name).write_text(STUB)
            (self.commands / name).chmod(0o755)
        RunDir(self.folder).job.mkdir(parents=True)

    def __call__(self, job: BatchJob, *args: str, **env: str) -> subprocess.CompletedProcess:
        self.script.write_text(render(replace(job, python=("python",))))
        self.noted.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(self.script), *args],
            env={
                "PATH": f"{self.commands}:/usr/bin:/bin",
                "NOTED": str(self.noted),
                "RUN": str(self.folder),
                "WORD": "finished well",
                "END": "2030-01-01T00:00:00",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n[1-2]",
                **env,
            },
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.stderr == "" or env.get("WARNING", "\n") in done.stderr
        return done

    def words(self, command: str) -> list[list[str]]:
        rows = [line.split("\0")[:-1] for line in self.noted.read_text().splitlines()]
        return [row[1:] for row in rows if row[0] == command]

    def env(self, of: str = "env") -> dict[str, str]:
        found = Path(f"{self.noted}.{of}").read_text().splitlines()
        return dict(line.split("=", 1) for line in found if "=" in line)
