"""Every fault, in every phase of a run, on the first, a middle and the last of four ranks.

Rule: what is expected of a case is written down here before it runs (`EXPECTED`), and only what a
user reads is judged: the last error of the launcher, the report of a hang, the log of rank 0.

    python -m benchmarks.faults_matrix --seed 1 --minutes 30 --json FILE

It goes on where FILE ends; each case is a line of it. Needs root on Linux: memory is limited by a
cgroup, the full disk is a small file system of memory, nodes are network namespaces.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchdistpackage.errors import TorchDistError
from torchdistpackage.launch.fork_server_client import ForkServer
from torchdistpackage.train import job

RANKS = 4
PLACES = {"first": 0, "middle": 2, "last": RANKS - 1}
MOMENTS = ("start", "first step", "forward", "backward", "reduce", "save", "validation", "end")
ENDS = ("killed", "stopped", "out of memory", "os exit", "exception", "hang")
CALLS = ("lone collective", "skipped collective", "wrong shape")
SLOW = ("slow rank", "slow disk")
NODES = ("dead node", "unplugged")
NUMBERS = ("nan", "corrupted weight", "clock jump")
FAULTS = (*ENDS, *CALLS, *SLOW, "full disk", *NODES, "dead slurmd", *NUMBERS)
NOT_HERE = ("dead slurmd",)
"""Faults of a cluster; tests/slurm has one of each."""
STEPS, LONG, TIMEOUT_S, JOIN_S = 8, 32, 4.0, 8.0
"""Steps of a run, and of one with a slow rank, which is promised to be named within 20."""
SLOW_LIMIT_S = 6.0
"""Limit of a validation or a save, set by the plant; a run allows ten minutes."""
AT_ONCE_S, REPORT_S, LIMIT_S = 12.0, 15.0, 45.0
"""Promised: all ranks are gone so long after a fault that ends a process, and so long after the
time limit for one that does not. A case is given up after the last."""
MEMORY_BYTES, DISK_BYTES = 900 << 20, 24 << 20
SPACE = "TDP_FAULT_SPACE"
"""Variable with the name of this run's network namespaces, without their numbers."""
CGROUPS = Path("/sys/fs/cgroup/memory")
LAYOUTS = {"data": ["parallel.data=4", "parallel.pipe=1"], "pipe": ["parallel.data=2"]}

SAYS = {
    "killed": r"killed by signal 9|its process has ended",
    "stopped": r"stopped",
    "out of memory": r"killed by signal 9|its process has ended",
    "os exit": r"exit code 3|its process has ended|exited",
    "exception": r"ValueError: a planted exception",
    "hang": r"hang: it is in|is in (its|the|data|saving|a |valid)|hang",
    "dead node": r"no rank on fault\d|does not answer|its process has ended|never come",
    "unplugged": r"",
    "nan": r"nan|not finite|NonFinite",
    "corrupted weight": r"differ",
}
"""Cause that must stand beside the culprit."""


@dataclass
class Row:
    """One case. named: the rank that was named first, None if none was."""

    fault: str
    phase: str
    rank: int
    layout: str
    seed: int
    expected: str = ""
    ended: str = ""
    named: int | None = None
    says: str = ""
    right: bool = False
    gone_s: float | None = None
    limit_s: float = 0.0
    orphans: int = 0
    took_s: float = 0.0
    code: str = ""
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 1))

    @property
    def steps(self) -> int:
        return LONG if self.fault in ("slow rank", "none, long") else STEPS

    @property
    def key(self) -> tuple[str, str, int]:
        return self.fault, self.phase, self.rank


def cases(seed: int) -> list[Row]:
    """All cases in the order of `seed`; each draws its own layout and number."""
    draw = random.Random(seed)
    rows = [
        Row(fault, phase, rank, draw.choice(sorted(LAYOUTS)), draw.randrange(1 << 30))
        for fault in FAULTS
        for phase in MOMENTS
        for rank in PLACES.values()
    ]
    for row in rows:
        if row.fault == "corrupted weight":  # two replicas do not say which of them is wrong
            row.layout = "data"
        row.expected = expected(row.fault, row.phase)
    draw.shuffle(rows)
    return rows


def expected(fault: str, phase: str) -> str:
    """`named`: the run ends and the rank is named first; `noticed`: it goes on and the rank is
    named; `unharmed`: it ends as undisturbed, and nobody is named; `disk`: it ends and names the
    disk, or is whole.
    """
    if fault in ("slow disk", "clock jump"):
        return "unharmed"
    if fault == "slow rank":
        return "noticed"
    if fault in ("nan", "corrupted weight") and phase == "end":
        return "unharmed"  # no step comes that could see it, and the state is saved
    return "disk" if fault == "full disk" else "named"


# -- one case -----------------------------------------------------------------------------------


def words(row: Row, folder: Path) -> list[str]:
    args = {"seq_len": 16, "vocab": 64, "fault": row.fault.replace("-", "_"), "phase": row.phase,
            "rank": row.rank, "note": str(folder / "note"), "seed": row.seed}  # fmt: skip
    return [
        f"run.dir={folder}", "run.name=run", *LAYOUTS[row.layout], "pipeline.microbatches=2",
        "model.layers=2", "model.dim=32", "model.heads=2", "model.vocab=64", "data.name=null",
        "data.target=benchmarks.faults_plant:Planted", f"data.args={json.dumps(args)}",
        "data.seq_len=16", "data.global_batch=16", f"train.steps={row.steps}", "train.eval_every=4",
        "train.eval_batches=1", "train.generate_tokens=0", f"train.step_timeout_s={TIMEOUT_S}",
        "train.straggler_every=4", "train.check_replicas_every=2", "checkpoint.save_every=4",
        "log.plot=false", "log.report=false", "log.every=1", f"launch.init_timeout_s={JOIN_S}",
    ]  # fmt: skip


class KeptServer(ForkServer):
    """One server for all cases, so that none waits for imports."""

    def __exit__(self, *_: object) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def run(row: Row, server: ForkServer, config: Path, base: Path, undisturbed: "Undisturbed") -> None:
    folder = base / "case"
    folder.mkdir()
    began = time.time()
    with contextlib.ExitStack() as stack:
        if row.fault == "full disk":
            stack.enter_context(small_disk(folder))
        if row.fault == "out of memory":
            os.environ["TDP_FAULT_CGROUP"] = str(stack.enter_context(limited_memory()))
        local = run_on_nodes if row.fault in NODES else run_here
        text = local(row, server, config, folder)
        ended_s = time.time()
        note = folder / "note"
        struck = json.loads(note.read_text())["at_s"] if note.exists() else None
        row.gone_s = round(ended_s - struck, 1) if struck is not None else None
        judge(row, text, folder / "run", struck is not None, undisturbed)
        row.orphans = len(children(server))
    row.took_s = round(time.time() - began, 1)
    shutil.rmtree(folder, ignore_errors=True)


def run_here(row: Row, server: ForkServer, config: Path, folder: Path) -> str:
    """As `tdp train` starts ranks, whose launcher this process is; what it says at the end."""
    said = ""
    with output_to(folder.parent / "log"):
        signal.alarm(int(LIMIT_S))
        try:
            row.ended = str(job.launch(str(config), words(row, folder)))
        except TorchDistError as error:
            row.ended, said = type(error).__name__, str(error)
        except TimeoutError:
            row.ended = "given up"
        finally:
            signal.alarm(0)
    return said


def run_on_nodes(row: Row, server: ForkServer, config: Path, folder: Path) -> str:
    """Each rank on a node of its own, with nobody who watches over it."""
    ranks = []
    port = str(20_000 + row.seed % 9_000)
    for rank in range(RANKS):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address(0), "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
        }  # fmt: skip
        with (folder.parent / f"log{rank}").open("wb") as log:
            ranks.append(
                server.spawn(
                    "benchmarks.faults_matrix:be_node",
                    (rank, str(config), words(row, folder)),
                    env=env, stdout=log, stderr=log,
                )
            )  # fmt: skip
    until_s = time.monotonic() + LIMIT_S
    while any(rank.exit is None for rank in ranks) and time.monotonic() < until_s:
        time.sleep(0.05)
        server.reap()
    alive = [rank for rank in ranks if rank.exit is None]
    row.ended = "given up" if alive else str(max(abs(rank.exit.exit_code) for rank in ranks))
    for rank in alive:
        rank.signal(signal.SIGKILL)
    while any(rank.exit is None for rank in ranks):
        time.sleep(0.05)
        server.reap()
    for rank in range(RANKS):  # a node that was cut off is mended
        subprocess.run(
            ["ip", "-n", f"{os.environ[SPACE]}{rank}", "link", "set", "eth0", "up"],
            check=True,
            timeout=10,
        )
    # one opens the report, or the log of a rank that is not the culprit, from its end
    reports = sorted((folder / "run").glob("hang.*.txt"))
    logs = [folder.parent / f"log{rank}" for rank in range(RANKS) if rank != row.rank]
    return "\n".join(path.read_text(errors="replace") for path in [*reports, *logs])


def be_node(rank: int, config: str, overrides: Sequence[str]) -> None:
    """A rank on its node: a network and a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{os.environ[SPACE]}{rank}") as file:  # noqa: PTH123
        if libc.setns(file.fileno(), 0x40000000) or libc.unshare(0x04000000):
            raise OSError(ctypes.get_errno(), "no namespace")
    socket.sethostname(f"fault{rank}")
    raise SystemExit(job.launch(config, list(overrides)))


# -- what is said ---------------------------------------------------------------------------------

_NAMED = re.compile(r"^(?:tdp: )?(?:hang: )?rank (\d+)\b[^\n]*", re.MULTILINE)


def judge(row: Row, text: str, folder: Path, struck: bool, undisturbed: "Undisturbed") -> None:
    found = _NAMED.search(text)
    row.named, row.says = (int(found[1]), found[0][:300]) if found else (None, text[:300])
    at_once = row.fault in ("killed", "out of memory", "os exit", "exception", "nan")
    slow = {"first step": JOIN_S, "forward": TIMEOUT_S, "backward": TIMEOUT_S}
    row.limit_s = AT_ONCE_S if at_once else slow.get(row.phase, SLOW_LIMIT_S) + REPORT_S
    rows = losses(folder / "metrics.jsonl")
    log = folder.parent.parent / "log"
    lines = log.read_text(errors="replace") if log.exists() else ""
    expected_rows = undisturbed.rows(row) if row.ended == "0" else None
    whole = rows == expected_rows
    if not struck:
        row.right, row.says = False, f"the fault never came: {row.says}"
    elif row.expected == "unharmed":
        row.right = whole and found is None and "straggler: " not in lines
        if not row.right:
            rows_are = "equal" if rows == expected_rows else "differ"
            row.says = f"ended {row.ended}, rows {rows_are}; {row.says}"
    elif row.expected == "noticed":
        stragglers = re.findall(r"straggler: rank (\d+)[^\n]*", lines)
        row.named = int(stragglers[0]) if stragglers else row.named
        row.says = next(iter(re.findall(r"straggler: [^\n]*", lines)), row.says)[:300]
        row.right = whole and row.named == row.rank
    elif row.expected == "disk":
        row.right = whole or ("No space left" in text and row.ended != "given up")
    else:
        row.right = (
            row.named == row.rank
            and "is not known" not in row.says
            and row.ended not in ("0", "given up")
            and re.search(SAYS.get(row.fault, ""), text) is not None
        )


def losses(path: Path) -> list[tuple[int, float]]:
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            rows.append((row["step"], row["loss"]))
    return rows


# -- what cases need of the machine ----------------------------------------------------


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Of this process and what it starts."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "fault", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def limited_memory() -> Iterator[Path]:
    path = CGROUPS / f"tdp-fault-{os.getpid()}"
    path.mkdir(exist_ok=True)
    (path / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


def address(rank: int) -> str:
    return f"10.89.{os.getpid() % 200}.{rank + 1}"


@contextlib.contextmanager
def nodes() -> Iterator[None]:
    """A network namespace for each rank, joined by a bridge."""
    ip("link", "add", f"{os.environ[SPACE]}br", "type", "bridge")
    try:
        ip("link", "set", f"{os.environ[SPACE]}br", "up")
        for rank in range(RANKS):
            name = f"{os.environ[SPACE]}{rank}"
            ip("netns", "add", name)
            ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}v", "master", f"{os.environ[SPACE]}br", "up")
            ip("-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for rank in range(RANKS):
            ip("netns", "del", f"{os.environ[SPACE]}{rank}", check=False)
        ip("link", "del", f"{os.environ[SPACE]}br", check=False)


def ip(*args: str, check: bool = True) -> None:
    subprocess.run(["ip", *args], check=check, capture_output=not check, timeout=20)


def children(server: ForkServer) -> list[int]:
    """Processes that the server has made and that are not gone."""
    process = server._process
    assert process is not None
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == process.pid and int(entry.name) != process.pid:
                found += [int(entry.name)] if fields[0] != "Z" else []
    return found


# -- all of them ----------------------------------------------------------------------


class Undisturbed:
    """The rows of the same run without a fault, made when a case first asks for them."""

    def __init__(self, server: ForkServer, config: Path, base: Path) -> None:
        self._run = server, config, base
        self._rows: dict[tuple[str, int], list[tuple[int, float]]] = {}

    def rows(self, row: Row) -> list[tuple[int, float]]:
        key = row.layout, row.steps
        if key not in self._rows:
            server, config, base = self._run
            folder = base / "undisturbed"
            folder.mkdir()
            alone = Row("none, long" if row.steps == LONG else "none", "start", -1, row.layout, 0)
            said = run_here(alone, server, config, folder)
            if alone.ended != "0":
                sys.exit(f"undisturbed: {alone.ended}: {said}")
            self._rows[key] = losses(folder / "run" / "metrics.jsonl")
            shutil.rmtree(folder)
        return self._rows[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--json", type=Path, required=True, help="a case a line, added to")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th case, beside other parts")
    parser.add_argument("--only", default="", help="regular expression for FAULT/PHASE/RANK")
    options = parser.parse_args()
    done = set()
    if options.json.exists():
        lines = options.json.read_text().splitlines()
        done = {Row(**json.loads(line)).key for line in lines}
    left = [
        row
        for row in cases(options.seed)
        if row.fault not in NOT_HERE
        and row.key not in done
        and re.search(options.only, f"{row.fault}/{row.phase}/{row.rank}")
    ]
    part, parts = map(int, options.part.split("/"))
    left = left[part::parts]
    print(f"{len(done)} cases are there, {len(left)} are left", flush=True)
    until_s = time.monotonic() + 60 * options.minutes
    signal.signal(signal.SIGALRM, _too_long)
    os.environ |= {"OMP_NUM_THREADS": "1", "TDP_FAULT_MATRIX": "1", SPACE: f"f{os.getpid()}n"}
    base = Path(tempfile.mkdtemp(prefix="faults-"))
    config = Path(__file__).resolve().parents[1] / "configs" / "gpt_tiny.yaml"
    try:
        needed = any(row.fault in NODES for row in left)
        with (
            nodes() if needed else contextlib.nullcontext(),
            ForkServer((*job.PRELOAD, "benchmarks.faults_plant")) as server,
        ):
            server.__class__ = KeptServer
            job.ForkServer = lambda preload: server  # type: ignore[assignment, misc]
            undisturbed = Undisturbed(server, config, base)
            for row in left:
                if time.monotonic() > until_s:
                    break
                run(row, server, config, base, undisturbed)
                with options.json.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                print(told(row), flush=True)
            ForkServer.close(server)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def told(row: Row) -> str:
    return (
        f"{'ok ' if row.right else 'BAD'} {'/'.join(map(str, row.key)):38} {row.layout:5}"
        f"{row.ended:>12} gone {row.gone_s} of {row.limit_s:g} s, {row.orphans} orphans, "
        f"took {row.took_s} s: {row.says[:140]}"
    )


def _too_long(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    main()
