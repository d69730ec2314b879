"""The switches or blocks above the nodes of a cluster, from Slurm.

Read is what `scontrol show topology` prints and `topology.conf`, of the plugins tree and block:

    SwitchName=s0 Nodes=n[1-2]                             topology.conf
    SwitchName=t0 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]       scontrol
    BlockName=b0 BlockIndex=0 Nodes=n[1-18] BlockSize=18
    AggregatedBlock=b[0-1] BlockIndex=2 Nodes=n[1-36] BlockSize=36
    BlockSizes=18,36                                       topology.conf: b0 and b1 are aggregated

The rule: a node hangs below the lowest switch that lists it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchdistpackage.environment.slurm_env import expand
from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.launch.slurm.query import Runner, run_command

SHOW = ("scontrol", "show", "topology")
FROM_SLURM = "slurm"
"""Stands for scontrol's answer where a file path is expected."""
_KEYS = frozenset({"switchname", "blockname", "aggregatedblock", "blocksizes"})


@dataclass(frozen=True, slots=True)
class SwitchTree:
    """The tree of switches.

    paths: for each node the switches above it, lowest first, all equally long: a branch with fewer
    levels repeats its highest switch."""

    paths: Mapping[str, tuple[str, ...]]

    @property
    def num_levels(self) -> int:
        return len(next(iter(self.paths.values())))

    def nodes(self) -> tuple[str, ...]:
        """Return all nodes, with those of one switch adjacent."""
        # nodes keep the order in which their highest switch was met first, then the next lower
        order: dict[str, int] = {}
        for path in self.paths.values():
            for name in path:
                order.setdefault(name, len(order))
        return tuple(
            sorted(self.paths, key=lambda node: [order[x] for x in self.paths[node][::-1]])
        )


@dataclass(slots=True)
class _Switch:
    """One switch. line: where it is defined, such as topology.conf:3."""

    line: str
    nodes: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


@dataclass(slots=True)
class _Read:
    switches: dict[str, _Switch] = field(default_factory=dict[str, _Switch])
    blocks: list[str] = field(default_factory=list[str])
    sizes: tuple[int, ...] = ()
    parents: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, switch: _Switch) -> None:
        if name in self.switches:
            raise ConfigError(
                f"{switch.line}: {name} is named a second time, after {self.switches[name].line}; "
                f"give each switch one line"
            )
        self.switches[name] = switch


def read_switches(source: str, runner: Runner = run_command) -> SwitchTree:
    """Read the tree from a file, or from scontrol here if the source is "slurm".

    Raises:
        ConfigError: the file cannot be read, or names no tree; says the line.
        LaunchError: Slurm does not answer, or knows of no switches.
    """
    if source == FROM_SLURM:
        ran = runner(SHOW)
        if ran.code != 0 or not ran.out.strip():
            raise LaunchError(
                f"scontrol show topology names no switches: {ran.why}; give a file in the form of "
                f"topology.conf"
            )
        return parse_switches(ran.out, "scontrol show topology")
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--topology {source} cannot be read: {why}; give a topology.conf, what scontrol show "
            f"topology printed, or the word {FROM_SLURM} to ask scontrol here"
        ) from error
    return parse_switches(text, source)


def parse_switches(text: str, source: str) -> SwitchTree:
    """Return the tree in a text; source: its name in errors.

    Raises:
        ConfigError: see `read_switches`.
    """
    parsed = _Read()
    for line, words in _lines(text, source):
        _read_line(parsed, line, words)
    if not parsed.switches:
        raise ConfigError(
            f"{source} names no switch and no block; give lines that begin with SwitchName= or "
            "BlockName="
        )
    _aggregate(parsed)
    _find_parents(parsed)
    above = {name: _path(parsed, name) for name in parsed.switches}
    listed: dict[str, list[str]] = {}
    for name, switch in parsed.switches.items():
        for node in switch.nodes:
            listed.setdefault(node, []).append(name)
    if not listed:
        raise ConfigError(f"{source} names no node; give each lowest switch its Nodes=")
    paths: dict[str, tuple[str, ...]] = {}
    for node, names in listed.items():
        lowest = max(names, key=lambda name: len(above[name]))
        if apart := [name for name in names if name not in above[lowest]]:
            raise ConfigError(
                f"{parsed.switches[apart[0]].line}: node {node} is below {apart[0]} and below "
                f"{lowest}; list it below one of them"
            )
        paths[node] = above[lowest]
    longest = max(map(len, paths.values()))
    return SwitchTree({n: p + p[-1:] * (longest - len(p)) for n, p in paths.items()})


def _lines(text: str, source: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place of each line and its words by lower-case key; a trailing backslash continues
    a line."""
    begun, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if begun else number
        begun += line.partition("#")[0].rstrip()
        if begun.endswith("\\"):
            begun = begun[:-1] + " "
            continue
        words, begun = begun.split(), ""
        if not words:
            continue
        pairs = {x.partition("=")[0].lower(): x.partition("=")[2] for x in words}
        if not _KEYS & set(pairs):
            raise ConfigError(
                f"{source}:{first}: {words[0][:80]!r} does not begin a line about switches or "
                "blocks; these begin with SwitchName=, BlockName= or BlockSizes="
            )
        yield f"{source}:{first}", pairs


def _read_line(parsed: _Read, line: str, words: Mapping[str, str]) -> None:
    nodes = _hosts(words.get("nodes", ""), line)
    if "switchname" in words:
        below = _hosts(words.get("switches", ""), line)
        parsed.add(words["switchname"], _Switch(line, nodes, below))
    elif "blockname" in words:
        parsed.add(words["blockname"], _Switch(line, nodes))
        parsed.blocks.append(words["blockname"])
    elif "aggregatedblock" in words:
        name = words["aggregatedblock"]
        parsed.add(name, _Switch(line, nodes, _hosts(name, line)))
    else:
        sizes = words["blocksizes"].split(",")
        if not all(x.isdecimal() and int(x) for x in sizes):
            raise ConfigError(
                f"{line}: BlockSizes={words['blocksizes']} are not numbers of nodes; write numbers "
                "such as 18,36"
            )
        parsed.sizes = tuple(sorted(map(int, sizes)))


def _hosts(text: str, line: str) -> tuple[str, ...]:
    if text in ("", "(null)"):
        return ()
    try:
        return expand(text)
    except LaunchError as error:
        raise ConfigError(f"{line}: {error}") from error


def _aggregate(parsed: _Read) -> None:
    """Put consecutive blocks together as the sizes of topology.conf say."""
    smallest = min(parsed.sizes, default=1)
    for size in parsed.sizes[1:]:
        number = max(size // smallest, 1)
        for first in range(0, len(parsed.blocks), number):
            blocks = parsed.blocks[first : first + number]
            name = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"{blocks[0]} of {size}"
            parsed.add(name, _Switch(parsed.switches[blocks[0]].line, children=tuple(blocks)))


def _find_parents(parsed: _Read) -> None:
    for name, switch in parsed.switches.items():
        for child in switch.children:
            if child not in parsed.switches:
                raise ConfigError(
                    f"{switch.line}: {name} has {child} below it, which no line names; add "
                    f"SwitchName={child}"
                )
            parsed.parents.setdefault(child, name)


def _path(parsed: _Read, name: str) -> tuple[str, ...]:
    """Return a switch and those above it, lowest first."""
    if name in parsed.blocks:  # all sizes of aggregated blocks list the blocks themselves
        above = [x for x, switch in parsed.switches.items() if name in switch.children]
        return (name, *sorted(above, key=lambda x: len(parsed.switches[x].children)))
    path = [name]
    while (parent := parsed.parents.get(path[-1])) is not None:
        if parent in path:
            raise ConfigError(
                f"{parsed.switches[parent].line}: {parent} is below itself; remove it from Switches"
            )
        path.append(parent)
    return tuple(path)
