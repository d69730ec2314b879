"""The texts of the configuration files; tried with Slurm 22.05 and MariaDB 10.11.

The one rule: no client program works if slurm.conf has one key that this Slurm does not know,
so only what differs from Slurm's defaults stands here.
"""

from __future__ import annotations

import socket

from slurm.instance import Instance

# Claimed, not had; far above what tests need, so that only a job that asks for less is killed.
MEMORY_MB_PER_CPU = 8000


JOB_SUBMIT = """function slurm_job_submit(desc, parts, uid)
    return slurm.SUCCESS
end
function slurm_job_modify(desc, job, parts, uid)
    return slurm.SUCCESS
end
return slurm.SUCCESS
"""
"""job_submit.lua of a site that takes every job; without the file slurmctld does not start."""


def slurm_conf(instance: Instance) -> str:
    folder = instance.folder
    last = instance.nodes
    first, _, _ = instance.address("n1").rpartition(".")
    names, addresses = (f"n[1-{last}]", f"{first}.[1-{last}]") if last > 1 else ("n1", f"{first}.1")
    lines = f"""
        ClusterName=tdp
        SlurmctldHost={host()}({instance.controller_address})
        SlurmctldPort={instance.ports["slurmctld"]}
        SlurmUser=root
        SlurmdUser=root
        AuthType=auth/munge
        # cred_expire is also how long a requeued job waits; 5 is the smallest that is obeyed.
        AuthInfo=socket={folder}/munge/socket,cred_expire=5
        SlurmctldPidFile={folder}/run/slurmctld.inner
        SlurmdPidFile={folder}/run/%n.inner
        SlurmdSpoolDir={folder}/spool/%n
        StateSaveLocation={folder}/state
        SlurmctldLogFile={folder}/log/slurmctld.log
        SlurmdLogFile={folder}/log/slurmd.%n.log
        ProctrackType=proctrack/linuxproc
        TaskPlugin={"task/affinity" if instance.affinity else "task/none"}
        MpiDefault=none
        # A step above its --mem is killed.
        JobAcctGatherType=jobacct_gather/linux
        JobAcctGatherFrequency=task=1
        JobAcctGatherParams=OverMemoryKill
        SelectType=select/cons_tres
        SelectTypeParameters=CR_Core_Memory
        DefMemPerCPU={MEMORY_MB_PER_CPU}
        SchedulerType=sched/backfill
        SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
        PreemptType=preempt/partition_prio
        PreemptMode=REQUEUE
        SlurmctldParameters=preempt_send_user_signal
        JobRequeue=1
        KillWait={instance.kill_wait_s}
        CompleteWait=0
        # A node comes back by itself, whatever took it down.
        ReturnToService=2
        SlurmctldTimeout=10
        SlurmdTimeout=10
        MessageTimeout=10
        TCPTimeout=2
        UnkillableStepTimeout=20
        MinJobAge=3600
        SlurmdParameters=config_overrides
        {accounting_lines(instance)}
        {"GresTypes=gpu" if instance.gpus else ""}
        {chr(10).join(instance.extra)}
        NodeName={names} NodeAddr={addresses} CPUs={instance.cpus} \
RealMemory={MEMORY_MB_PER_CPU * instance.cpus} \
{threads(instance)} {f"Gres={gres(instance)}" if instance.gpus else ""} State=UNKNOWN
        PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE OverSubscribe=NO State=UP
        PartitionName=main Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=0
        PartitionName=graced PriorityTier=10 PreemptMode=REQUEUE GraceTime={instance.grace_s}
        PartitionName=high PriorityTier=100 PreemptMode=OFF
    """
    return "".join(f"{line.strip()}\n" for line in lines.splitlines() if line.strip())


def gres(instance: Instance) -> str:
    kind = f":{instance.gpu_type}" if instance.gpu_type else ""
    return f"gpu{kind}:{instance.gpus}"


def threads(instance: Instance) -> str:
    if instance.threads == 1:
        return ""
    cores = instance.cpus // instance.threads
    return f"Sockets=1 CoresPerSocket={cores} ThreadsPerCore={instance.threads}"


def accounting_lines(instance: Instance) -> str:
    if not instance.accounting:
        return "AccountingStorageType=accounting_storage/none"
    # The connection to slurmdbd does not look at AuthInfo: its socket is this "password".
    return f"""AccountingStorageType=accounting_storage/slurmdbd
        AccountingStoragePass={instance.folder}/munge/socket
        AccountingStorageHost={instance.controller_address}
        AccountingStoragePort={instance.ports["slurmdbd"]}"""


def slurmdbd_conf(instance: Instance) -> str:
    folder = instance.folder
    # DbdHost must be the host's name: with an address slurmdbd takes itself for a stranger.
    return f"""DbdHost={host()}
DbdAddr={instance.controller_address}
DbdPort={instance.ports["slurmdbd"]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
PidFile={folder}/run/slurmdbd.inner
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={instance.ports["mariadbd"]}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""


def database_sql() -> str:
    grants = "".join(
        f"CREATE USER IF NOT EXISTS 'slurm'@'{place}' IDENTIFIED BY 'slurm';\n"
        f"GRANT ALL ON slurm_acct_db.* TO 'slurm'@'{place}';\n"
        for place in ("%", "localhost")
    )
    return f"CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n{grants}"


def gres_conf(instance: Instance) -> str:
    """Fake GPUs are files: with a bare count nodes come up as invalid."""
    if not instance.gpus:
        return ""
    numbers = f"[0-{instance.gpus - 1}]" if instance.gpus > 1 else "0"
    kind = f"Type={instance.gpu_type} " if instance.gpu_type else ""
    return f"AutoDetect=off\nName=gpu {kind}File={instance.folder}/dev/nvidia{numbers}\n"


def hosts(instance: Instance) -> str:
    """/etc/hosts of every node; the names of a second card end in its device."""
    lines = ["127.0.0.1 localhost", f"{instance.controller_address} {host()}"]
    for node in instance.node_names:
        for card in range(instance.cards):
            lines.append(f"{instance.address(node, card)} {node}{f'-eth{card}' if card else ''}")
    return "\n".join(lines) + "\n"


def host() -> str:
    return socket.gethostname().partition(".")[0]
