"""`tdp doctor`: one report about this machine, to paste into a request for help.

Each section reads its facts anew, and says in a line why where it cannot. Values of environment
variables are printed only for those of _VARIABLES, and never where a name or a value may hold a
secret.
"""

import os
import platform
import re
import resource
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.disk_room import mount_of
from torchdistpackage.environment.network import is_loopback, read_addresses, resolve
from torchdistpackage.errors import TorchDistError
from torchdistpackage.harness.gpu_facts import FIELDS, gpu_facts
from torchdistpackage.launch.process import usable_cpus
from torchdistpackage.launch.slurm.query import run_command
from torchdistpackage.lazy import resolve as imported

TIMEOUT_S = 10.0
"""Seconds after which a command of the machine, such as sinfo, is given up."""
MIN_OPEN_FILES, MIN_SHARED_MEMORY = 4096, 1 << 30
MIN_FREE_BYTES, MIN_FREE_FILES = 10 << 30, 10_000
"""Below these a report warns: a rank 0 of thousands of ranks keeps many sockets; data workers and
NCCL use /dev/shm; a checkpoint needs room and files."""
_VARIABLES = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|NVIDIA|SLURM|MASTER|RANK|WORLD_SIZE|LOCAL_RANK|HF_HUB|"
    r"TRANSFORMERS|TDP|PYTHON|LD|TMPDIR|VIRTUAL_ENV|CONDA)(_|$|PATH)"
)
_SECRETS = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|JWT|COOKIE|://[^/@\s]*@", re.IGNORECASE
)

Facts = Iterator[tuple[str, str]]
"""Names and values; the name "!" marks a warning."""


def doctor(
    folder: Annotated[
        Path, typer.Option("--folder", help="Folder of runs, whose file system is looked at.")
    ] = Path("runs"),
) -> None:
    """Print a report about this machine, to ask for help with. It holds no secrets."""
    warnings: list[str] = []
    for title, lines in report(os.environ, folder):
        typer.echo(f"\n{title}" if title != "Versions" else title)
        for name, value in lines:
            if name == "!":
                warnings.append(f"{title.lower()}: {value}")
            else:
                typer.echo(f"  {name}: {value}")
    typer.echo("\nLook at" if warnings else "\nNothing stands out.")
    for warning in warnings:
        typer.echo(f"  {warning}")


def report(env: Mapping[str, str], folder: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the title of each section and its facts."""
    sections: dict[str, Callable[[], Facts]] = {
        "Versions": _versions,
        "Machine": lambda: _machine(env),
        "Devices": _devices,
        "Limits": _limits,
        "Network": _network,
        "Slurm": lambda: _slurm(env),
        "File systems": lambda: _file_systems(env, folder),
        "Environment variables": lambda: _variables(env),
    }
    for title, facts in sections.items():
        lines: list[tuple[str, str]] = []
        try:
            for fact in facts():  # one by one: what came before an error stays
                lines.append(fact)
        except (OSError, ValueError, RuntimeError, TorchDistError) as error:
            lines.append(("not read", str(error) or type(error).__name__))
        yield title, lines


def _versions() -> Facts:
    name = "torchdistpackage"
    yield name, version(name)
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    requirements = [re.split(r"[\s;<>=!\[~(]", x)[0] for x in distribution(name).requires or ()]
    for package in sorted({*requirements, "peft", "numpy", "nvidia-nccl-cu13"}, key=str.lower):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _machine(env: Mapping[str, str]) -> Facts:
    yield "host", socket.gethostname()
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "libc", " ".join(platform.libc_ver())
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if models:
        yield "CPU", f"{models[0]}, {len(models)} threads"
    yield "usable CPUs", str(usable_cpus(env))
    memory = dict(re.findall(r"^(\w+):\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.M))
    for key in ("MemTotal", "MemAvailable", "SwapTotal"):
        yield key, _bytes(int(memory[key]) * 1024)


def _devices() -> Facts:
    cuda: Any = imported("torch:cuda")  # a second, which the sections before it do not wait for
    yield "CUDA of torch", str(imported("torch:version").cuda)
    if not cuda.is_available():
        yield "GPUs", "none that torch can use"
        if Path("/proc/driver/nvidia").exists():
            yield "!", "there is an NVIDIA driver, and torch finds no GPU; compare its CUDA version"
        return
    yield "NCCL", ".".join(map(str, cuda.nccl.version()))
    for index in range(cuda.device_count()):
        gpu = cuda.get_device_properties(index)
        yield f"GPU {index}", f"{gpu.name}, {_bytes(gpu.total_memory)}"
    facts = gpu_facts(timeout_s=TIMEOUT_S)
    yield "nvidia-smi", facts.error or ", ".join(FIELDS[1:])
    for row in facts.rows:
        index, *values = row.values()
        yield f"GPU {index}", ", ".join(values)
    for finding in facts.findings:
        yield "!", finding


def _limits() -> Facts:
    for name in ("NOFILE", "MEMLOCK", "NPROC", "STACK", "CORE"):
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        yield name.lower(), f"{_limit(soft)} (at most {_limit(hard)})"
        if name == "NOFILE" and hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
            yield "!", f"at most {hard:,} open files (ulimit -Hn), which thousands of ranks exceed"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").exists() and locked != resource.RLIM_INFINITY:
        yield "!", "InfiniBand needs locked memory without a limit (ulimit -l unlimited)"
    mask = os.umask(0o077)
    os.umask(mask)
    yield "umask", f"{mask:03o}"


def _network() -> Facts:
    for address in read_addresses():
        yield address.interface, f"{address.ip}{'' if address.up else ', down'}"
    host = socket.gethostname()
    addresses = resolve(host)
    yield f"{host} resolves to", ", ".join(addresses) or "nothing"
    if all(map(is_loopback, addresses)):
        yield (
            "!",
            f"{host} has no address by its own name that another node could reach; set "
            f"MASTER_ADDR for runs on several nodes without Slurm",
        )


def _slurm(env: Mapping[str, str]) -> Facts:
    command = run_command(["scontrol", "--version"], timeout_s=TIMEOUT_S)
    yield "version", command.out.strip() if command.code == 0 else command.why
    command = run_command(
        ["sinfo", "--noheader", "--format=%P %a %l %D nodes, %c CPUs, %m MB, %G"],
        timeout_s=TIMEOUT_S,
    )
    if command.code:
        yield "partitions", command.why
    for line in command.out.splitlines() if command.code == 0 else ():
        name, _, facts = line.partition(" ")
        yield f"partition {name}", facts
    if job := env.get("SLURM_JOB_ID"):
        yield "in job", job


def _file_systems(env: Mapping[str, str], folder: Path) -> Facts:
    shared = Path("/dev/shm")
    places = {
        "runs": folder.absolute(),
        "home": Path(env.get("HOME", "/")),
        "temporary files": Path(tempfile.gettempdir()),
        "shared memory": shared,
    }
    for name, path in places.items():
        while not path.exists():
            path = path.parent
        _, mount, kind, options = mount_of(path)
        room = os.statvfs(path)
        free = room.f_bavail * room.f_frsize
        flags = [x for x in ("ro", "noexec") if x in options.split(",")]
        files = f", {room.f_favail:,} files" if room.f_files else ""
        yield (
            name,
            f"{path} on {mount} ({', '.join([kind, *flags])}): {_bytes(free)}{files} free"
            f"{'' if os.access(path, os.W_OK) else ', not writable'}",
        )
        if path == shared:
            if room.f_blocks * room.f_frsize < MIN_SHARED_MEMORY:
                yield "!", f"{shared} has {_bytes(room.f_blocks * room.f_frsize)}; give it 1 GiB"
            continue
        if not os.access(path, os.W_OK):
            yield "!", f"{name}: {path} is not writable"
        if free < MIN_FREE_BYTES or (room.f_files and room.f_favail < MIN_FREE_FILES):
            yield "!", f"{name}: {_bytes(free)}{files} left at {path}"
    mode = places["home"].stat().st_mode if places["home"].exists() else 0
    if mode & stat.S_IWOTH:
        yield "!", f"everybody may write to {places['home']}"


def _variables(env: Mapping[str, str]) -> Facts:
    for name in sorted(env):
        if _VARIABLES.match(name):
            hidden = _SECRETS.search(name) or _SECRETS.search(env[name])
            yield name, "(not shown)" if hidden else env[name]


def _bytes(number: float) -> str:
    return f"{number / 2**30:,.1f} GiB"


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else f"{number:,}"
