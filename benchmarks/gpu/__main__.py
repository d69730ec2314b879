"""What only a GPU can tell, on one GPU: `python -m benchmarks.gpu --out FOLDER`.

    python -m benchmarks.gpu --only host_syncs,offload    some parts; --list says what each is

Each part is a process with a time limit of its own, so a failure or a hang takes no other with
it. The table goes to the terminal and to FOLDER/table.txt, the numbers to FOLDER/results.json.
The exit code is 1 if a part failed. Without a GPU the parts run small on the CPU over gloo and
decide nothing.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.rows import Status, status_of, table

ALL_S = 600.0
"""For all parts together."""
LINES = 30
"""Of what a part wrote, kept where it failed."""
ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:18} at most {part.limit_s:.0f} s: {part.decides}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    on_gpu = bool(options.cpu is False and has_gpu())
    results: dict[str, object] = {"date": datetime.now().astimezone().isoformat(), "parts": {}}
    say(options.out, heading(on_gpu), "w")
    end_s = time.monotonic() + options.seconds
    for name in options.only:
        left_s = end_s - time.monotonic()
        limit_s = min(PARTS[name].limit_s, left_s)
        more = [f"--cases={options.cases}", *(["--resume"] if options.resume else [])]
        more = more if PARTS[name].has_cases else []
        part = run(name, PARTS[name], options.out, limit_s, on_gpu, more)
        results["machine"] = part.get("machine") or results.get("machine")
        results["parts"][name] = part
        say(options.out, "\n".join(table(name, part)), "a")
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    statuses = [part["status"] for part in results["parts"].values()]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))
    say(options.out, f"\n{counts}; {heading(on_gpu)}", "a")
    return int(Status.FAILED in statuses)


def run(
    name: str, part: Part, out: Path, limit_s: float, on_gpu: bool, more: Sequence[str] = ()
) -> dict:
    """The part's rows, status, seconds, and why it failed. more: which cases, for one of many."""
    if limit_s <= 0:
        why = f"the seconds for all parts are over; run it alone with --only {name}"
        return {"status": Status.NOT_RUN, "seconds": 0.0, "rows": [], "why": why}
    file, log = out / f"{name}.json", out / f"{name}.log"
    if "--resume" not in more:
        file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.part"]
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, part.module, str(file.absolute()), f"--seconds={limit_s}", *more],
            cwd=ROOT,
            env=environment(part, on_gpu),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code, why = process.wait(timeout=limit_s), ""
        except subprocess.TimeoutExpired:
            code, why = 1, f"not done after {limit_s:.0f} s; {log} has what it wrote"
        finally:
            kill(process)
    seconds = time.monotonic() - began
    if code and not why:
        why = f"the process ended with {code}; {log} has what it wrote"
    found = json.loads(file.read_text()) if file.exists() else {"machine": {}, "rows": []}
    if why:
        tail = log.read_text(errors="replace").splitlines()[-LINES:]
        return {**found, "status": Status.FAILED, "seconds": seconds, "why": why, "tail": tail}
    return {**found, "status": status_of(found["rows"]), "seconds": seconds, "why": ""}


def environment(part: Part, on_gpu: bool) -> Mapping[str, str]:
    """Of a process alone: what a launcher left behind would make it one of several ranks."""
    launchers = ("SLURM_", "TORCHELASTIC_", "TDP_")
    left_out = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith(launchers)
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = part.env if on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**kept, "PYTHONPATH": path, **own}


def kill(process: subprocess.Popen) -> None:
    """The part, and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def has_gpu() -> bool:
    """Asked in a process of its own, so that this one never touches a device."""
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0


def heading(on_gpu: bool) -> str:
    if on_gpu:
        return "one GPU"
    return "cpu, small: shows only that the script runs"


def say(out: Path, text: str, mode: str) -> None:
    """To the terminal and to the table's file."""
    print(text, flush=True)
    with (out / "table.txt").open(mode, encoding="utf-8") as file:
        file.write(text + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in PARTS]:
            raise argparse.ArgumentTypeError(f"no part {unknown[0]!r}; use {', '.join(PARTS)}")
        return found

    parser.add_argument("--only", type=names, default=[*PARTS], help=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_benchmarks"))
    parser.add_argument("--seconds", type=float, default=ALL_S, help="for all parts together")
    parser.add_argument(
        "--cases", default="", help="of part several: patterns of names, such as 'schedule *'"
    )
    parser.add_argument(
        "--resume", action="store_true", help="of part several: keep the rows of --out that hold"
    )
    parser.add_argument("--cpu", action="store_true", help="small, on the CPU, in any case")
    parser.add_argument("--list", action="store_true", help="say what each part decides")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
