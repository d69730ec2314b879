"""Ask a Slurm site what it has, which options it requires, and which it refuses.

scontrol, sinfo and sacctmgr print partitions, GRES, limits, accounts and QOS. Required and
forbidden options are listed nowhere, because a submit plugin decides them. So `sbatch --test-only`
is asked: it goes through the same plugin and queues no job.
"""

import getpass
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torchdistpackage.config.site import GPU_OPTIONS, Site, SiteNode, SitePartition, partition_order
from torchdistpackage.config.slurm import header, time_seconds
from torchdistpackage.environment.network import read_addresses
from torchdistpackage.environment.slurm_env import scrub_slurm_env
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import Runner, job_id_of, run_command

MAX_TRIALS = 150
"""Largest number of calls of `sbatch --test-only`; each takes some hundredths of a second."""
_CHOICES = 4
"""Largest number of tried values of an option."""
_SETTINGS = (
    "AccountingStorageEnforce",
    "JobRequeue",
    "JobSubmitPlugins",
    "KillOnBadExit",
    "KillWait",
    "PreemptMode",
    "PrivateData",
)
"""Settings of slurm.conf that a user may want to know."""
_SINFO = ("sinfo", "--noheader", "--format=%R|%D|%c|%m|%G")
_NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs\d?|lustre|gpfs|beegfs\w*|ceph|cifs|panfs|wekafs|orangefs|9p|fuse\.(?!portal|gvfs)\w+"
)
_RUNTIMES = ("apptainer", "singularity", "enroot", "podman", "charliecloud")
Trial = Mapping[str, str | None]
"""Options of sbatch that are tried together."""


def query_site(runner: Runner = run_command, env: Mapping[str, str] | None = None) -> Site:
    """Return Slurm's information about this site and its users, and the options it requires.

    Raises:
        LaunchError: there is no Slurm here, or its controller does not answer.
    """
    env = os.environ if env is None else env
    config = parse_config(_answer(runner, "scontrol", "show", "config"))
    partitions = parse_partitions(_answer(runner, "scontrol", "--oneliner", "show", "partition"))
    partitions = add_nodes(partitions, _answer(runner, *_SINFO))
    accounts, user_qos, qos = _accounting(runner)
    limits = config.get("EnforcePartLimits", "NO").lower()
    site = Site(
        cluster=config.get("ClusterName", ""),
        slurm=config.get("SLURM_VERSION", ""),
        partitions=partitions,
        part_limits="all" if limits == "all" else "any" if limits in ("any", "yes") else "no",
        accounts=accounts,
        qos={name: qos.get(name) for name in user_qos or qos},
        settings={name: config[name] for name in _SETTINGS if config.get(name)},
        interfaces=[
            f"{x.interface} {x.ip}"
            for x in read_addresses()
            if x.up and not x.ip.is_loopback and not x.ip.is_link_local
        ],
        shared=_shared_mounts(Path("/proc/mounts")),
        containers=_containers(runner, env),
    )
    return _Trials(runner, env).learn(site)


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`: a name, blanks, an equals sign and a value on each line."""
    pairs = re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE)
    return {name: "" if value.strip() == "(null)" else value.strip() for name, value in pairs}


def parse_partitions(text: str) -> dict[str, SitePartition]:
    """Parse `scontrol --oneliner show partition`; partitions that accept no jobs are left out."""
    partitions: dict[str, SitePartition] = {}
    for line in text.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        name, state = facts.get("PartitionName"), facts.get("State", "UP")
        if name is None or state not in ("UP", "DOWN"):
            continue
        partitions[name] = SitePartition(
            default=facts.get("Default") == "YES",
            max_nodes=_number(facts.get("MaxNodes", "")),
            max_time_s=_seconds(facts.get("MaxTime", "")),
            accounts=_listed(facts.get("AllowAccounts", "")),
            qos=_listed(facts.get("AllowQos", "")),
            preempt=facts.get("PreemptMode", "OFF"),
            grace_s=_number(facts.get("GraceTime", "")) or 0,
        )
    return partitions


def add_nodes(partitions: Mapping[str, SitePartition], text: str) -> dict[str, SitePartition]:
    """Return the partitions with the information that `_SINFO` printed about their nodes, one line
    for each kind.
    """
    out = dict(partitions)
    for line in text.splitlines():
        fields = [part.strip() for part in line.split("|")]
        if len(fields) != 5 or fields[0] not in out or not fields[1].isdigit():
            continue
        name, num_nodes, cpus, memory, gres = fields
        earlier = out[name]
        kinds = [x for x in re.split(r",(?![^(]*\))", gres) if x and x != "(null)"]
        out[name] = earlier.model_copy(
            update={
                "nodes": earlier.nodes + int(num_nodes),
                "cpus": _least(earlier.cpus, cpus),
                "memory_mb": _least(earlier.memory_mb, memory),
                "gres": list(dict.fromkeys([*earlier.gres, *(_plain_gres(x) for x in kinds)])),
            }
        )
    return out


def parse_associations(text: str) -> tuple[list[str], list[str]]:
    """Parse `account|qos,qos|default qos` lines: the accounts, and the QOS, default ones first."""
    accounts: dict[str, None] = {}
    qos: dict[str, None] = {}
    others: dict[str, None] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) >= 3 and fields[0]:
            accounts[fields[0]] = None
            if fields[2]:
                qos[fields[2]] = None
            others |= dict.fromkeys(x for x in fields[1].split(",") if x)
    return [*accounts], [*(qos | others)]


def parse_qos(text: str) -> dict[str, int | None]:
    """Parse `name|longest time` lines: seconds, None for no limit."""
    rows = [line.split("|") for line in text.splitlines()]
    return {row[0]: _seconds(row[1]) for row in rows if len(row) >= 2 and row[0]}


def _accounting(runner: Runner) -> tuple[list[str], list[str], dict[str, int | None]]:
    """Return the user's accounts and QOS, and all QOS; nothing if sacctmgr may not be asked."""
    ask = ("sacctmgr", "--noheader", "--parsable2", "show")
    try:
        answer = runner(
            [*ask, "associations", f"user={getpass.getuser()}", "format=account,qos,defaultqos"]
        )
        every = runner([*ask, "qos", "format=name,maxwall"])
    except LaunchError:
        return [], [], {}
    accounts, qos = parse_associations(answer.out if answer.code == 0 else "")
    return accounts, qos, parse_qos(every.out if every.code == 0 else "")


def _answer(runner: Runner, *words: str) -> str:
    ran = runner(list(words))
    if ran.code != 0:
        raise LaunchError(f"{' '.join(words[:3])} gave no answer: {ran.why}; see `scontrol ping`")
    return ran.out


class _Trials:
    """Trial calls of `sbatch --test-only`, and the conclusions about a site."""

    def __init__(self, runner: Runner, env: Mapping[str, str]) -> None:
        self._runner = runner
        self._env = scrub_slurm_env(env)
        self._left = MAX_TRIALS

    def refusal(self, trial: Trial) -> str:
        """Return why Slurm refuses a one-minute job with these options, or "" if it accepts it."""
        if self._left <= 0:
            return "not tried"
        self._left -= 1
        options = {"time": "1", **trial}
        words = [f"--{name}" if x is None else f"--{name}={x}" for name, x in options.items()]
        ran = self._runner(["sbatch", "--test-only", *words, "--wrap=true"], env=self._env)
        return "" if ran.code == 0 else ran.why

    def learn(self, site: Site) -> Site:
        """Return the site with its required options, its refused options, and how it expects GPU
        requests.

        Raises:
            LaunchError: it takes no job at all.
        """
        first = self.refusal({})
        base = {} if not first else self._accepted(site)
        if base is None:
            raise LaunchError(
                f"this site takes no job with any partition, account, QOS or memory that is tried: "
                f"{first}; ask its people which options a job needs, and set them in launch.slurm"
            )
        gpus = self._gpus(site, base)
        if gpus is not None and gpus[0] is not None:
            base = gpus[1]
        forbidden: dict[str, str] = {}
        trials: dict[str, Trial] = {
            "mem": {"mem": "100"},
            "exclusive": {"exclusive": None},
            "requeue": {"requeue": None},
        }
        for name, trial in trials.items():
            if name == "mem" and base.keys() & {"mem", "mem-per-cpu"}:
                continue
            if why := self.refusal(base | dict(trial)):
                forbidden[name] = why
        option, kind = (None, None) if gpus is None else gpus[0] or (None, None)
        return site.model_copy(
            update={
                "options": base,
                "forbidden": forbidden,
                "gpu_option": option,
                "gpu_type": kind,
            }
        )

    def _accepted(self, site: Site) -> dict[str, str | None] | None:
        """Return the fewest options with which Slurm takes a job."""
        order = partition_order(site)
        partition = next((site.partitions[name] for name in order), SitePartition())
        share = math.floor(partition.memory_mb / max(partition.cpus, 1))
        choices = {
            "partition": list(order)[:_CHOICES],
            "account": site.accounts[:_CHOICES],
            "qos": [*site.qos][:_CHOICES],
            "memory": [f"mem-per-cpu={share}", f"mem={partition.memory_mb}"] if share else [],
        }
        for trial in combinations(choices):
            if not self.refusal(trial):
                return trial
        return None

    def _gpus(
        self, site: Site, base: Mapping[str, str | None]
    ) -> tuple[tuple[str, str | None] | None, dict[str, str | None]] | None:
        """Return option and type of a GPU request that Slurm accepts, with its other options.

        ("none", None) if no node has GRES; None as the option if Slurm accepts no request.
        """
        with_gpus = [name for name in partition_order(site) if site.partitions[name].gpus]
        if not with_gpus:
            return (("none", None), dict(base)) if site.partitions else None
        types = dict.fromkeys(
            match[1]
            for name in with_gpus
            for gres in site.partitions[name].gres
            if (match := re.fullmatch(r"gpu:([A-Za-z_][^:]*):\d+", gres))
        )
        places = [dict(base), *(dict(base) | {"partition": name} for name in with_gpus)]
        for partition, kind, option in itertools.product(places, [None, *types], GPU_OPTIONS):
            text = ":".join(x for x in ("gpu" if option == "gres" else "", kind or "", "1") if x)
            if not self.refusal(partition | {option: text}):
                return (option, kind), partition
        return None, dict(base)


def combinations(choices: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str | None]]:
    """Yield combinations with one value each of some choices, fewest choices first.

    A value such as `mem=100` contains its own name.
    """
    for count in range(1, len(choices) + 1):
        for chosen in itertools.combinations(choices, count):
            for values in itertools.product(*(choices[name] for name in chosen)):
                pairs = zip(chosen, values, strict=True)
                yield dict(_pair(name, value) for name, value in pairs)


def _pair(name: str, value: str) -> tuple[str, str | None]:
    stated, equals, value_text = value.partition("=")
    return (stated, value_text) if equals else (name, value)


PROBE = r"""#!/bin/bash
# What a job of one task sees on a node; lines of name=value.
{
printf 'host=%s\n' "$(hostname)"
printf 'arch=%s\n' "$(uname -m)"
printf 'clock_s=%s\n' "$(date +%s)"
for python in "$@" "$(command -v python3)" "$(command -v python)"; do
    [ -n "$python" ] || continue
    works=no
    "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
        >/dev/null 2>&1 && works=yes
    printf 'python=%s %s\n' "$works" "$python"
done
[ -d "$HOME" ] && home=there || home=absent
[ ! -d "$HOME" ] || [ -w "$HOME" ] || home=read-only
printf 'home=%s\n' "$home"
printf 'tmp_mb=%s\n' "$(df -Pm "${TMPDIR:-/tmp}" 2>/dev/null | awk 'NR == 2 { print $4 }')"
printf 'srun=%s\n' "$(command -v srun)"
printf 'modules=%s\n' "$(command -v module || ls /etc/profile.d/*mod*.sh 2>/dev/null | head -1)"
printf 'open_files=%s\n' "$(ulimit -Hn)"
printf 'locked_memory_kb=%s\n' "$(ulimit -Hl)"
printf 'umask=%s\n' "$(umask)"
printf 'addresses=%s\n' "$(hostname -I 2>/dev/null)"
printf 'own_name=%s\n' "$(getent hosts "$(hostname)" | awk '{ print $1 }' | paste -sd,)"
printf 'gpus=%s\n' "$(nvidia-smi --list-gpus 2>/dev/null | sed 's/ (UUID.*//' | paste -sd,)"
printf 'end=1\n'
} >"$TDP_PROBE.part" && mv "$TDP_PROBE.part" "$TDP_PROBE"
"""
"""Script of the job of `tdp site --probe`; arguments: interpreters to look for."""


def probe_node(
    site: Site,
    folder: Path,
    wait_s: float,
    runner: Runner = run_command,
    env: Mapping[str, str] | None = None,
) -> SiteNode:
    """Run `PROBE` as a job of one task, in `folder`, and return what it saw.

    Raises:
        LaunchError: the job is not taken, does not end in `wait_s` seconds, or left no file here,
            as it does where nodes do not see this folder.
    """
    env = os.environ if env is None else env
    name = f".tdp-site-probe.{os.getpid()}"
    script, answer, output = (folder / f"{name}{end}" for end in (".sh", "", ".out"))
    try:
        script.write_text(PROBE)
        words = [
            "sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--time=2", f"--chdir={folder}",
            f"--output={output}", "--job-name=tdp-site-probe",
        ]  # fmt: skip
        for option, value in header(site.options).items():
            words.append(f"--{option}" if value is None else f"--{option}={value}")
        environment = scrub_slurm_env(env) | {"TDP_PROBE": str(answer)}
        ran = runner([*words, str(script), sys.executable], env=environment)
        job = job_id_of(ran.out) if ran.code == 0 else ""
        if not job:
            raise LaunchError(f"sbatch refused the probe: {ran.why}")
        end_s = time.monotonic() + wait_s
        while not answer.exists():
            if time.monotonic() > end_s:
                runner(["scancel", job])
                text = output.read_text(errors="replace").strip() if output.exists() else ""
                raise LaunchError(
                    f"the probe, job {job}, left no {answer} in {wait_s:g} s; it may still have "
                    f"waited in the queue (give it longer with --wait), or nodes do not see "
                    f"{folder}: call tdp site in a folder that they share"
                    f"{f'; it said {text[-200:]}' if text else ''}"
                )
            # polls, because the answer is a file that another node writes
            time.sleep(0.3)
        return parse_probe(answer.read_text(errors="replace"), time.time())
    finally:
        for path in (script, answer, output):
            path.unlink(missing_ok=True)


def parse_probe(text: str, now_s: float) -> SiteNode:
    """Parse the output of `PROBE`. now_s: when this machine found it, to compare clocks."""
    pairs = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    facts: dict[str, str] = dict(pairs)
    pythons = [value.partition(" ") for name, value in pairs if name == "python"]
    values = {x: y.strip() for x, y in pairs if x not in ("python", "arch", "end", "clock_s") if y}
    clock = facts.get("clock_s", "")
    if clock.isdigit() and (apart_s := round(int(clock) - now_s)) and abs(apart_s) > 2:
        values["clock"] = f"{apart_s:+} s from here"
    return SiteNode(
        arch=facts.get("arch", ""),
        pythons={path: works == "yes" for works, _, path in pythons},
        found=values,
    )


def sbatch_words(site: Site) -> str:
    """Return the options of the site as words of a command line."""
    words = (f"--{x}" if y is None else f"--{x}={y}" for x, y in header(site.options).items())
    return shlex.join(words)


def _containers(runner: Runner, env: Mapping[str, str]) -> list[str]:
    path = env.get("PATH")
    runtimes = [name for name in _RUNTIMES if shutil.which(name, path=path)]
    try:
        if "--container-image" in runner(["srun", "--help"]).out:
            runtimes.append("pyxis")
    except LaunchError:
        pass
    return runtimes


def _shared_mounts(mounts: Path) -> list[str]:
    rows = (line.split() for line in mounts.read_text().splitlines()) if mounts.exists() else ()
    return [row[1] for row in rows if _NETWORK_FILE_SYSTEMS.fullmatch(row[2])]


def _seconds(text: str) -> int | None:
    seconds = time_seconds(text)
    return None if seconds is None else int(seconds)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _listed(text: str) -> list[str] | None:
    return None if text in ("", "ALL") else text.split(",")


def _least(previous: int, text: str) -> int:
    digits = re.match(r"\d+", text)  # 64+ where nodes differ
    number = int(digits[0]) if digits else 0
    return min(previous, number) if previous else number


def _plain_gres(gres: str) -> str:
    return re.sub(r"\(.*\)$", "", gres)


def summary(site: Site) -> Iterable[str]:
    """Yield lines that summarise the findings."""
    yield f"Slurm {site.slurm}, cluster {site.cluster}"
    for name in partition_order(site):
        part = site.partitions[name]
        limit = "" if part.max_time_s is None else f", at most {part.max_time_s / 3600:g} h"
        gres = ", ".join(part.gres) or "no GRES"
        default = " (default)" if part.default else ""
        yield (
            f"partition {name}{default}: {part.nodes} nodes, {part.cpus} CPUs, "
            f"{part.memory_mb} MiB, {gres}{limit}"
        )
    for label, values in (
        ("accounts", site.accounts), ("QOS", site.qos), ("shared", site.shared),
        ("containers", site.containers), ("interfaces here", site.interfaces),
    ):  # fmt: skip
        if values:
            yield f"{label}: {', '.join(values)}"
    yield f"jobs need: {sbatch_words(site) or 'no further options'}"
    for name, words in site.forbidden.items():
        yield f"refused: --{name}: {words}"
    if site.node is not None:
        yield f"a node: {site.node.arch}, {json.dumps(site.node.found)}"
