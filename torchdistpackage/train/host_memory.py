"""Read how much memory this host can still give to processes. No torch."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""(limit, use, details) of the control group of a container or job, for versions 2 and 1."""


def available_bytes() -> int:
    """Return the memory available without swapping, within the limit of the control group, if
    any.
    """
    limits = [_field(Path("/proc/meminfo"), "MemAvailable:") * 1024]
    for limit, use, details in _LIMITS:
        most, used = _number(_CGROUP / limit), _number(_CGROUP / use)
        if most is not None and used is not None:
            # pages of files count as used, and are given back on demand
            limits.append(max(most - used + _field(_CGROUP / details, "inactive_file"), 0))
    return min(limits)


def _field(path: Path, name: str) -> int:
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value.split()[0])
    except (OSError, ValueError):
        pass
    return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max"
        return None
