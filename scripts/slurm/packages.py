"""What the machine must have, and how it is got from Debian.

The one rule: a machine that cannot have a cluster is told why in one line before anything is
touched. Packages are installed for who asked for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

from slurm.instance import Refused

_PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-server",
}
_PLUGIN = "accounting_storage_mysql.so"
_SERVICE_POLICY = Path("/usr/sbin/policy-rc.d")
_SERVICE_POLICY_TEXT = "#!/bin/sh\n# slurm_cluster installs packages: start no service\nexit 101\n"


def check_user() -> None:
    """Raises Refused where this user could never have a cluster."""
    if not sys.platform.startswith("linux"):
        raise Refused(f"nodes are Linux namespaces, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise Refused(f"nodes are network namespaces, which root alone makes; uid {os.geteuid()}")


def check_machine(*, accounting: bool, install: bool) -> None:
    """Raises Refused where something is missing that cannot be got, or may not be installed."""
    if packages := sorted(set(_missing(accounting=accounting))):
        if not install:
            asked = "`scripts/slurm_cluster up --install` gets them by apt-get"
            raise Refused(f"{', '.join(packages)} not installed; {asked}")
        if not shutil.which("apt-get"):
            raise Refused(f"{', '.join(packages)} not installed, and there is no apt-get")
        sys.stderr.write(f"installing {' '.join(packages)}\n")
        install_quietly(packages)
        if left := sorted(set(_missing(accounting=accounting))):
            raise Refused(f"apt-get installed {', '.join(left)}, but its files are not there")
    _check_kernel()


def install_quietly(packages: list[str]) -> None:
    """Install packages without starting their services; raises Refused if that fails."""
    with _no_services():
        _install(packages)


def _check_kernel() -> None:
    """Make what a node needs once, in namespaces that go with the command."""
    links = "ip link add probe0 type bridge && ip link add probe1 type veth"
    own = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork"]
    probe = [*own, "sh", "-c", links]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"code {done.returncode}").splitlines()[-1]
        raise Refused(f"this kernel or container gives no namespaces or links: {reason}")


def _missing(*, accounting: bool) -> Iterator[str]:
    programs = _PROGRAMS | (_ACCOUNTING if accounting else {})
    for program, package in programs.items():
        if not shutil.which(program):
            yield package
    if accounting and not list(Path("/usr/lib").glob(f"*/slurm*/{_PLUGIN}")):
        yield "slurm-wlm-mysql-plugin"


def _install(packages: list[str]) -> None:
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    options = ["-qq", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300"]
    install = ["apt-get", "install", *options, *packages]
    for command in (install, ["apt-get", "update", "-qq"], install):
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=900, check=False
        )
        if command is install and done.returncode == 0:
            return
    lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
    raise Refused(f"apt-get cannot install {' '.join(packages)}: {lines[-1]}")


@contextlib.contextmanager
def _no_services() -> Generator[None]:
    """Packages start their services unless this file says no; a policy of the machine stays."""
    if _SERVICE_POLICY.exists() and _SERVICE_POLICY.read_text() != _SERVICE_POLICY_TEXT:
        yield
        return
    _SERVICE_POLICY.write_text(_SERVICE_POLICY_TEXT)
    _SERVICE_POLICY.chmod(0o755)
    try:
        yield
    finally:
        _SERVICE_POLICY.unlink(missing_ok=True)
