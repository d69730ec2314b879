"""The order in which the parts of an instance start, and in which they go.

The one rule: `down` undoes any prefix of `up`, and is harmless on nothing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
from pathlib import Path

from slurm import files, network, processes
from slurm.instance import Failed, Instance, exists, folder_of, load

HERE = Path(__file__).resolve().parent


def is_up(instance: Instance | None) -> bool:
    return instance is not None and processes.pid_of(instance, "slurmctld") is not None


def make_folder(instance: Instance) -> None:
    """The instance's folder; Failed if somebody has just put something in its place.

    Others pass through, and list nothing: munged asks that of its socket's folders, and the
    database, which runs as mysql, has its own folder in this one.
    """
    os.umask(0o022)
    try:
        instance.folder.mkdir(mode=0o711)
    except FileExistsError:
        raise Failed(f"{instance.folder} is there already; remove it, or take a --name") from None


def up(instance: Instance) -> None:
    """Start everything in `make_folder`'s; returns when every node is idle."""
    _write_files(instance)
    network.make(instance)
    _start_munged(instance)
    if instance.accounting:
        _start_accounting(instance)
    processes.start(instance, "slurmctld", ["slurmctld", "-D", "-c", "-f", str(instance.conf)])
    for node in instance.node_names:
        boot(instance, node)
    _wait_idle(instance)


def down(name: str) -> None:
    """Take down what an `up` of this name started, whole or in part."""
    instance = load(name) or Instance(name)
    processes.stop(instance, "slurmctld")
    for node in instance.node_names:
        processes.stop(instance, node, term=False)
    for daemon in ("slurmdbd", "mariadbd", "munged"):
        processes.stop(instance, daemon)
    network.remove(instance)
    if exists(name):
        shutil.rmtree(folder_of(name))


def boot(instance: Instance, node: str) -> None:
    # Not `ip netns exec`: it mounts /sys anew, which hides the control groups.
    enter = ["nsenter", f"--net=/run/netns/{instance.netns(node)}"]
    own = ["unshare", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork"]
    init = ["bash", str(HERE / "node_init"), node, str(instance.folder)]
    processes.start(instance, node, [*enter, *own, "--kill-child", *init])


def _write_files(instance: Instance) -> None:
    folder = instance.folder
    instance.save()
    for name in ("etc", "run", "spool", "munge", "dev"):
        (folder / name).mkdir(mode=0o711)
    for name in ("state", "log"):
        (folder / name).mkdir(mode=0o700)
    instance.conf.write_text(files.slurm_conf(instance))
    (folder / "etc" / "gres.conf").write_text(files.gres_conf(instance))
    (folder / "etc" / "hosts").write_text(files.hosts(instance))
    if "JobSubmitPlugins=lua" in instance.extra:
        (folder / "etc" / "job_submit.lua").write_text(files.JOB_SUBMIT)
    for index in range(instance.gpus):
        # Nothing stands behind a fake GPU: it is the null device under another name.
        path = folder / "dev" / f"nvidia{index}"
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        path.chmod(0o666)


def _start_munged(instance: Instance) -> None:
    """One munged of our own for all nodes: its socket is a path, and paths are shared."""
    folder = instance.folder / "munge"
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    options = {
        "socket": folder / "socket",
        "key-file": key,
        "pid-file": folder / "pid",
        "seed-file": folder / "seed",
        "log-file": instance.folder / "log" / "munged.log",
    }
    command = ["munged", "--foreground", *(f"--{k}={v}" for k, v in options.items())]
    processes.start(instance, "munged", command)
    _wait_for(instance, "munged", ["munge", "-n", "-S", str(folder / "socket")])


def _start_accounting(instance: Instance) -> None:
    """slurmdbd over a MariaDB of its own, whose data may be lost."""
    data = instance.folder / "mysql"
    data.mkdir(mode=0o700)
    shutil.chown(data, "mysql", "mysql")
    install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}"]
    # seconds, but minutes where a busy machine's disk is slow to say that a write is safe
    more = ["--skip-test-db", "--auth-root-authentication-method=normal"]
    _run(instance, [*install, *more], limit_s=600)
    sql = instance.folder / "etc" / "database.sql"
    sql.write_text(files.database_sql())
    port = instance.ports["mariadbd"]
    options = {
        "user": "mysql",
        "datadir": data,
        "socket": data / "socket",
        "pid-file": data / "pid",
        "bind-address": "127.0.0.1",
        "port": port,
        "init-file": sql,
        "innodb-buffer-pool-size": "64M",
        "innodb-log-file-size": "16M",
        "innodb-flush-log-at-trx-commit": 0,
        "innodb-lock-wait-timeout": 900,
    }
    command = ["mariadbd", "--no-defaults", *(f"--{k}={v}" for k, v in options.items())]
    processes.start(instance, "mariadbd", [*command, "--skip-name-resolve"])
    ask = ["mariadb", "--no-defaults", "-uslurm", "-pslurm", "-h127.0.0.1", f"-P{port}"]
    _wait_for(instance, "mariadbd", [*ask, "-e", "select 1", "slurm_acct_db"])

    conf = instance.folder / "etc" / "slurmdbd.conf"
    conf.touch(mode=0o600)  # slurmdbd refuses any other mode
    conf.write_text(files.slurmdbd_conf(instance))
    processes.start(instance, "slurmdbd", ["slurmdbd", "-D"])
    _wait_for(instance, "slurmdbd", ["sacctmgr", "-n", "show", "cluster"])


def _wait_for(instance: Instance, daemon: str, question: list[str]) -> None:
    def answers() -> bool:
        if not processes.pid_of(instance, daemon):
            raise Failed(f"{daemon} ended at once")
        return _ask(instance, question).returncode == 0

    processes.wait_until(answers, 60, f"an answer of {daemon}")


def _wait_idle(instance: Instance) -> None:
    def all_idle() -> bool:
        if not processes.pid_of(instance, "slurmctld"):
            raise Failed("slurmctld ended")
        for node in instance.node_names:
            if not processes.pid_of(instance, node):
                raise Failed(f"node {node} ended")
        return states(instance) == dict.fromkeys(instance.node_names, "idle")

    try:
        processes.wait_until(all_idle, 60, "that all nodes are idle")
    except Failed as error:
        raise Failed(f"{error}; nodes: {states(instance)}") from None


def states(instance: Instance) -> dict[str, str]:
    lines = _ask(instance, ["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"]).stdout.splitlines()
    return dict(line.split() for line in lines)


def _ask(
    instance: Instance, command: list[str], limit_s: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=instance.env(), capture_output=True, text=True, timeout=limit_s, check=False
    )


def _run(instance: Instance, command: list[str], limit_s: float = 60) -> None:
    done = _ask(instance, command, limit_s)
    if done.returncode:
        raise Failed(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
