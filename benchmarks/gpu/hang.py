"""A rank stuck in a hook of the backward on the device: what its hang report says.

On a GPU hooks run in autograd's threads, which Python's `threading` does not know.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found

TIMEOUT_S, END_S = 2.0, 60.0
"""Of a step, and of the whole process."""

STUCK = """
import sys, time
import torch
from torchdistpackage import setup_distributed
from torchdistpackage.harness.watchdog import watch

def stuck_in_a_hook(gradient):
    if sys.argv[2] == "cuda":
        torch.cuda._sleep(2**62)
        return gradient + float(gradient.sum())
    time.sleep(1000)

if __name__ == "__main__":
    setup_distributed()
    with watch(sys.argv[1], timeout_s={timeout_s}, first_timeout_s={timeout_s}) as w:
        w.step()
        x = torch.ones(4, device=sys.argv[2], requires_grad=True)
        y = x * 2
        y.register_hook(stuck_in_a_hook)
        y.sum().backward()
"""

THREAD = """
import sys, threading, time
import torch
from torchdistpackage import setup_distributed
setup_distributed()

def wait():
    if sys.argv[2] == "cuda":
        torch.cuda._sleep(int(2e10))
        torch.cuda.synchronize()
    else:
        time.sleep(1000)

if __name__ == "__main__":
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.5)
    print("last word", flush=True)
"""


def measure(here: Here, found: Found) -> None:
    with found.case("stuck in a hook"), tempfile.TemporaryDirectory() as folder:
        took_s, code = _run(here, Path(folder), STUCK.format(timeout_s=TIMEOUT_S))
        reports = [path.read_text() for path in Path(folder).glob("hang.*.txt")]
        text = "\n".join(reports)
        sys.stderr.write(text)
        named = "stuck_in_a_hook" in text
        said = "names the hook" if named else "does not name the hook" if text else "no report"
        found.judge("stuck in a hook", named, f"{said}; over after {took_s:.1f} s, code {code}")
    with found.case("the end with a stuck thread"), tempfile.TemporaryDirectory() as folder:
        took_s, code = _run(here, Path(folder), THREAD)
        found.judge(
            "the end with a stuck thread",
            code == 0,
            f"over after {took_s:.1f} s, code {code}",
            seconds=took_s,
        )


def _run(here: Here, folder: Path, program: str) -> tuple[float, int | None]:
    """Seconds until it is over, and its code; None: it had to be killed."""
    script = folder / "program.py"
    script.write_text(program)
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(script), str(folder), here.device.type],
            timeout=END_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return time.monotonic() - began, None
    return time.monotonic() - began, done.returncode
