"""One instance of the cluster: what it was asked for, its folder, names, subnets and ports.

The one rule: everything that is outside the folder (network links, namespaces, ports, addresses)
follows from what `settings.json` in the folder says, so that any later process can remove it.
So nothing is read from a folder that somebody else than root has put in its place.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import stat
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

LOCK = Path("/run/tdp-slurm.lock")


class Refused(Exception):
    """This machine or this user cannot have a cluster, whatever is tried."""


class Failed(Exception):
    """Something that should have worked did not."""


@dataclass(frozen=True)
class Instance:
    name: str
    nodes: int = 5
    cpus: int = 8
    gpus: int = 0
    cards: int = 1
    rate: str | None = None
    grace_s: int = 20
    kill_wait_s: int = 5
    accounting: bool = False
    affinity: bool = False
    gpu_type: str | None = None
    threads: int = 1
    # Lines of slurm.conf for an odd site, such as JobSubmitPlugins=lua.
    extra: list[str] = field(default_factory=list)
    # One block for each network card; the last host of the first one is the controller.
    subnets: list[str] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return folder_of(self.name)

    @property
    def conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def node_names(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    def address(self, node: str, card: int = 0) -> str:
        return str(ipaddress.ip_network(self.subnets[card])[int(node[1:])])

    def addresses(self, node: str) -> list[str]:
        return [self.address(node, card) for card in range(self.cards)]

    @property
    def controller_address(self) -> str:
        return str(ipaddress.ip_network(self.subnets[0])[-2])

    def netns(self, node: str) -> str:
        return f"tdp-{self.name}-{node}"

    # Links have at most 15 characters, so the name of the instance enters as a hash.
    @property
    def link_prefix(self) -> str:
        return f"tdp{digest(self.name):06x}"

    def bridge(self, card: int) -> str:
        return f"{self.link_prefix}b{card}"

    def link(self, node: str, card: int) -> str:
        return f"{self.link_prefix}{'xy'[card]}{node[1:]}"

    def env(self) -> dict[str, str]:
        """The environment of daemons and client programs: Slurm's own variables are ours alone."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return env | {"SLURM_CONF": str(self.conf)}

    def save(self) -> None:
        """Write settings.json whole or not at all."""
        path = self.folder / "settings.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(path)


def folder_of(name: str) -> Path:
    return Path(f"/tmp/tdp-slurm-{name}")


def exists(name: str) -> bool:
    """Whether the folder is there; Failed if it is a link, or not root's."""
    folder = folder_of(name)
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0:
        kind = "a link" if stat.S_ISLNK(found.st_mode) else "no folder of root's"
        raise Failed(f"{folder} is {kind} (uid {found.st_uid}); remove it, or take a --name")
    return True


def load(name: str) -> Instance | None:
    """The instance as `up` wrote it down, or None where there is none; Failed as `exists`."""
    path = folder_of(name) / "settings.json"
    if not exists(name) or not path.is_file():
        return None
    settings = json.loads(path.read_text())
    # Another version of this script may have written it: `down` shall work all the same.
    return Instance(**{f.name: settings[f.name] for f in fields(Instance) if f.name in settings})


def digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "big")
