"""Sites that are odd in thirty-six ways (sites.py), each made of the test cluster, with `tdp site`,
`tdp submit` and scripts/sbatch_example.sh there.

One test of several kinds at once is of the small set; each kind alone is of the full one, whose
results TDP_RECORD=1 stores for docs/sites.md.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.lives import CONFIG, RUN, rows, send, until_step
from tests.slurm.sites import RESULT, SAYS, SITES, WORKS
from torchdistpackage.config.site import Site, read_site

LIMIT_S = 240
VENV = Path(Cluster.python).parent
# In place of training: writes what it sees and leaves the word of the ranks.
STAND_IN = """#!/bin/bash
case "$*" in *failure_report*) exit 0 ;; esac
for config; do :; done
run=$(dirname "$(dirname "$config")")
env >"$run/env.$SLURM_PROCID"
[ "$SLURM_PROCID" != 0 ] ||
    echo finished well >"$run/job/decision.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
"""
NO_MEMORY = "desc.min_mem_per_node == nil and desc.min_mem_per_cpu == nil"
BANNER = """#!/bin/bash
echo "*** Welcome to the cluster. 17 nodes are down. ***"
{} "$@"
code=$?
echo "Quota: 12 of 100 TB used; job 99 of yours waits"
exit $code
"""


class Here:
    """A user's folder on the login node of an odd site."""

    def __init__(self, cluster: Cluster, folder: Path, stack: ExitStack) -> None:
        self.cluster, self.folder, self.stack = cluster, folder, stack
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self.env = {
            "PATH": f"{self.bin}:{VENV}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        self.stand_in = self.program("stand_in", STAND_IN)

    def program(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def plugin(self, *refusals: tuple[str, str], say: str = "") -> None:
        """The submit plugin refuses jobs of which a condition holds, with these words."""
        lines = [f'    slurm.log_user("{say}")'] if say else []
        for condition, words in refusals:
            lines.append(f'    if {condition} then slurm.log_user("{words}") return 2000 end')
        path = self.cluster.conf.parent / "job_submit.lua"
        takes_every_job = path.read_text()
        head, rest = takes_every_job.split("\n", 1)
        path.write_text("\n".join([head, *lines, rest]))
        self.stack.callback(path.write_text, takes_every_job)

    def control(self, set_: str, reset: str) -> None:
        self.cluster.run("scontrol", *set_.split())
        self.stack.callback(self.cluster.run, "scontrol", *reset.split())

    def on_nodes(self, do: str, undo: str = "", nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        for node in nodes:
            self.cluster.node("exec", node, "bash", "-ec", do)
            if undo:
                self.stack.callback(self.cluster.node, "exec", node, "bash", "-c", undo)

    def task_prolog(self, text: str) -> None:
        path = self.cluster.conf.parent / "task_prolog"
        path.write_text(f"#!/bin/bash\n{text}\n")
        self.stack.callback(path.write_text, "#!/bin/bash\n")

    def ask(self, *words: str) -> Site:
        """`tdp site`; what it wrote."""
        self.cluster.tdp("site", *words, cwd=self.folder, env=self.env, limit_s=LIMIT_S)
        return read_site(self.folder / "site.yaml")

    def submit(
        self, launch: dict[str, Any], check: bool = True, ranks: int = 2, python: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`tdp submit --follow` of a run of two nodes, in which the stand-in trains."""
        slurm = {"nodes": 2, "container": [str(self.stand_in)]} | launch.get("slurm", {})
        slurm = {key: value for key, value in slurm.items() if value is not None}
        site = {"site": "site.yaml"} if (self.folder / "site.yaml").exists() else {}
        run = {"parallel": {"data": ranks}, "launch": {**site, **launch, "slurm": slurm}}
        run |= {"train": {"steps": 2, "generate_tokens": 0}, "log": {"every": 1, "plot": False}}
        (self.folder / "run.yaml").write_text(yaml.safe_dump(run))
        words = [python or self.cluster.python, "-m", "torchdistpackage"]
        words += ["submit", "run.yaml", "--follow"]
        done = self.cluster.run(*words, cwd=self.folder, env=self.env, check=False, limit_s=LIMIT_S)
        if check:
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.log}"
        return done

    def works(self, launch: dict[str, Any], **more: Any) -> dict[str, str]:
        """The run is submitted and ends well; its job as Slurm shows it."""
        self.submit(launch, **more)
        records = (self.folder / "runs" / "run" / "job" / "submissions.jsonl").read_text()
        job = self.cluster.job(json.loads(records.splitlines()[-1])["job"])
        assert job["JobState"] == "COMPLETED", job
        ranks = more.get("ranks", 2)
        assert sorted(x.name for x in self.run.glob("env.*")) == [f"env.{i}" for i in range(ranks)]
        return job

    def pasted(self, launch: dict[str, Any], *parts: str, **more: Any) -> dict[str, Any]:
        """The run is refused here with YAML; `launch` with what was to be written."""
        done = self.submit(launch, check=False, **more)
        assert done.returncode == 2 and not (self.folder / "runs").exists(), done.stderr
        assert all(part in done.stderr for part in parts), done.stderr
        (written,) = re.findall(r"write (launch: \{.*\})$", done.stderr, re.MULTILINE)
        return merged(launch, yaml.safe_load(written)["launch"])

    def train(
        self,
        *changes: str,
        ranks: int = 2,
        steps: int = 4,
        words: tuple[str, ...] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Two nodes train a small model; all steps are there."""
        slurm = ["launch.slurm.nodes=2", f"launch.slurm.ntasks-per-node={ranks // 2}"]
        run = [x for x in RUN if "eval" not in x and "train.steps" not in x]
        more = [f"train.steps={steps}", "train.eval_every=0", "parallel.data=auto"]
        command = [*words, self.cluster.python, "-m", "torchdistpackage", "submit", str(CONFIG)]
        command += [
            *run,
            *more,
            *slurm,
            *changes,
            f"run.dir={self.folder}/runs",
            "run.name=trained",
        ]
        done = self.cluster.run(
            *command, "--follow", cwd=ROOT, env=self.env, check=False, limit_s=LIMIT_S
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.log}"
        assert [row["step"] for row in rows(self.trained)][-1] == steps
        return done

    def example(self, *words: str) -> None:
        """The batch script for a script of one's own works here too, with options of the site."""
        script = ROOT / "scripts" / "sbatch_example.sh"
        hello = self.program("hello.py", "import os\nprint('task', os.environ['SLURM_PROCID'])\n")
        out = self.folder / "example.log"
        done = self.cluster.run(
            *shlex.split(" ".join(["sbatch", *words, "-o", str(out)])), script, hello,
            cwd=self.folder, env=self.env,
        )  # fmt: skip
        job = re.findall(r"Submitted batch job (\d+)", done.stdout)[-1]
        assert self.cluster.wait_end(job, LIMIT_S) == "COMPLETED", out.read_text()
        assert sorted(re.findall(r"task \d", out.read_text())) == [f"task {i}" for i in range(4)]

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    @property
    def trained(self) -> Path:
        """The folder of the run of `train`."""
        return self.folder / "runs" / "trained"

    @property
    def log(self) -> str:
        """What the jobs of both runs wrote."""
        paths = (run / "logs" / "main.log" for run in (self.run, self.trained))
        return "".join(path.read_text() for path in paths if path.exists())

    def env_of(self, rank: int) -> dict[str, str]:
        lines = (self.run / f"env.{rank}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    out = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


Scenario = Callable[[Here], str | None]
"""Returns what came out, if not that it works."""
PLAIN: dict[int, Scenario] = {}
UNTYPED: dict[int, Scenario] = {}
TYPED: dict[int, Scenario] = {}
HYPER: dict[int, Scenario] = {}
SHAPES: dict[str, tuple[dict[int, Scenario], dict[str, Any]]] = {
    "plain": (PLAIN, {"accounting": True}),
    "untyped": (UNTYPED, {"gpus": 2}),
    "typed": (TYPED, {"gpus": 2, "gpu_type": "h100"}),
    "hyper": (HYPER, {"threads": 2}),
}


def site(number: int, shape: dict[int, Scenario] = PLAIN) -> Callable[[Scenario], Scenario]:
    def note(scenario: Scenario) -> Scenario:
        shape[number] = scenario
        return scenario

    return note


def odd_cluster(shared: Cluster, **options: Any) -> Cluster:
    """A cluster of two nodes with a submit plugin and a task prolog, which do nothing yet."""
    own = shared.sibling(nodes=2, extra=["JobSubmitPlugins=lua"], **options)
    conf = own.conf.parent
    prolog = conf / "task_prolog"
    prolog.write_text("#!/bin/bash\n")
    prolog.chmod(0o755)
    with own.conf.open("a") as text:
        text.write(f"TaskProlog={prolog}\n")
    own.run("scontrol", "reconfigure")
    if options.get("accounting"):
        manage = ("sacctmgr", "-i")
        own.run(*manage, "add", "account", "proj")
        own.run(*manage, "add", "qos", "long")
        own.run(*manage, "add", "user", "root", "account=proj")
        own.run(*manage, "modify", "user", "root", "set", "qos+=long")
    return own


# The handful of the small set


def submit(cluster: Cluster, folder: Path) -> Future[Any]:
    return cluster.beside(demanding, cluster, folder)


def demanding(shared: Cluster, folder: Path) -> tuple[Site, dict[str, str], str]:
    """Account, QOS, partition and memory are demanded, exclusive jobs are refused, and sbatch
    prints banners."""
    with ExitStack() as stack:
        here = Here(odd_cluster(shared, accounting=True), folder / "demanding", stack)
        here.control("update partition=main Default=NO", "update partition=main Default=YES")
        here.plugin(
            ('desc.account ~= "proj"', "error: account please"),
            ('desc.qos ~= "long"', "error: QOS please"),
            (NO_MEMORY, "error: memory please"),
            ("desc.shared == 0", "error: nodes are shared here"),
            say="Welcome",
        )
        here.program("sbatch", BANNER.format("/usr/bin/sbatch"))
        found = here.ask()
        return found, here.works({"slurm": {"exclusive": True}}), here.log


def test_a_demanding_site_gets_what_it_wants(submitted: Future[Any]):
    found, job, _ = submitted.result()
    assert {"account", "qos", "partition", "mem-per-cpu"} == {*found.options}
    assert "shared here" in found.forbidden["exclusive"]
    assert (job["Account"], job["QOS"]) == ("proj", "long")
    assert job["OverSubscribe"] == "OK" and "MinMemoryCPU" in job


# Each kind alone


@pytest.fixture(scope="module")
def results(cluster: Cluster) -> Generator[dict[str, str]]:
    found: dict[str, str] = {}
    yield found
    if os.environ.get("TDP_RECORD") == "1":
        slurm = cluster.run("sinfo", "--version")
        before = json.loads(RESULT.read_text())["sites"] if RESULT.exists() else {}
        order = sorted((before | found).items(), key=lambda item: int(item[0]))
        kept = {"slurm": slurm.stdout.split()[-1], "sites": dict(order)}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")


@pytest.fixture(scope="module")
def odd(cluster: Cluster) -> Callable[[str], Cluster]:
    made: dict[str, Cluster] = {}

    def of(shape: str) -> Cluster:
        if shape not in made:
            made[shape] = odd_cluster(cluster, **SHAPES[shape][1])
        made[shape].settle()
        return made[shape]

    return of


@pytest.mark.full
@pytest.mark.parametrize("number", [x.number for x in SITES])
def test_the_site_is_as_stated(number: int, odd, folder: Path, results: dict[str, str]):
    stated = SITES[number - 1].verdict
    shape, scenarios = next((x, y) for x, (y, _) in SHAPES.items() if number in y)
    results[str(number)] = "fails"
    with ExitStack() as stack:
        verdict = scenarios[number](Here(odd(shape), folder / f"site{number}", stack))
    results[str(number)] = verdict or WORKS
    assert results[str(number)] == stated


@site(1, UNTYPED)
def untyped(here: Here):
    here.ask()
    job = here.works({"slurm": {"gpus-per-node": "h100:2"}}, ranks=2)
    assert job["TresPerNode"] == "gres:gpu:2"
    assert here.env_of(0)["CUDA_VISIBLE_DEVICES"] == "0,1"


@site(2, TYPED)
def typed(here: Here):
    asks = "desc.tres_per_node ~= nil and string.find(desc.tres_per_node, 'h100') == nil"
    here.plugin((asks, "error: say which GPUs"))
    assert here.ask().gpu_type == "h100"
    job = here.works({"slurm": {"gpus-per-node": 2}}, ranks=2)
    assert job["TresPerNode"] == "gres:gpu:h100:2"


@site(3)
def no_gres(here: Here):
    assert here.ask().gpu_option == "none"
    job = here.works({"slurm": {"gpus-per-node": 2, "ntasks-per-node": 2}}, ranks=4)
    assert "TresPerNode" not in job and job["OverSubscribe"] == "NO"


@site(4)
def account(here: Here):
    here.plugin(('desc.account ~= "proj"', "error: account please"))
    assert here.ask().options == {"account": "proj"}
    assert here.works({})["Account"] == "proj"
    here.example("-A", "proj")


@site(5)
def qos(here: Here):
    here.plugin(('desc.qos ~= "long"', "error: QOS please"))
    assert here.ask().options == {"qos": "long"}
    assert here.works({})["QOS"] == "long"


@site(6)
def no_default_partition(here: Here):
    here.control("update partition=main Default=NO", "update partition=main Default=YES")
    (name,) = here.ask().options.values()
    assert here.works({})["Partition"] == name


@site(7)
def partitions(here: Here):
    here.control("update partition=main MaxTime=60", "update partition=main MaxTime=INFINITE")
    here.ask()
    job = here.works({"slurm": {"partition": ["main", "high"], "time": "2:00:00"}})
    assert job["Partition"] == "high"


@site(8)
def time_limit(here: Here):
    here.control("update partition=main MaxTime=60", "update partition=main MaxTime=INFINITE")
    here.ask()
    asked = {"slurm": {"time": "2-00:00:00"}}
    job = here.works(here.pasted(asked, "2-00:00:00", "0-01:00:00 of partition main"))
    assert job["TimeLimit"] == "01:00:00"
    return SAYS


@site(9)
def memory_required(here: Here):
    here.plugin((NO_MEMORY, "error: memory please"))
    here.ask()
    assert here.works({})["MinMemoryCPU"] == "8000M"


@site(10)
def memory_forbidden(here: Here):
    here.plugin((f"not ({NO_MEMORY})", "error: memory is not yours to ask"))
    assert "mem" in here.ask().forbidden
    here.works({"slurm": {"mem": "1G"}})


@site(11)
def exclusive_forbidden(here: Here):
    here.plugin(("desc.shared == 0", "error: nodes are shared here"))
    assert "exclusive" in here.ask().forbidden
    assert here.works({"slurm": {"exclusive": True}})["OverSubscribe"] == "OK"


@site(12)
def chatty_plugin(here: Here):
    here.plugin(say="123 You have 17 GPU hours left")
    here.ask()
    here.works({})
    here.example()


@site(13)
def banner(here: Here):
    here.program("sbatch", BANNER.format("/usr/bin/sbatch"))
    here.ask()
    here.works({})
    here.example()


@site(14)
def srun_elsewhere(here: Here):
    tools = here.folder / "slurm" / "bin"
    tools.mkdir(parents=True)
    for name in ("srun", "sbatch"):
        shutil.copy(f"/usr/bin/{name}", tools)
    here.env["PATH"] = f"{tools}:{here.env['PATH']}"
    here.on_nodes("mount --bind /dev/null /usr/bin/srun", "umount /usr/bin/srun")
    here.task_prolog(f"echo export PATH={VENV}:/usr/bin:/bin")
    here.works({})


@site(33)
def several_clusters(here: Here):
    here.program("sbatch", '#!/bin/bash\nexec /usr/bin/sbatch -M tdp "$@"\n')
    done = here.cluster.run("sbatch", "-M", "tdp", "--parsable", "--wrap=true")
    assert done.stdout.strip().endswith(";tdp")
    here.ask()
    here.works({})


@site(31)
def squeue_refused(here: Here):
    refuses = '#!/bin/bash\necho "slurm_load_jobs error: Access/permission denied" >&2; exit 1\n'
    stand_in = here.program("squeue", refuses)
    here.program("sacct", refuses)
    mount = "".join(f"mount --bind {stand_in} /usr/bin/{x};" for x in ("squeue", "sacct"))
    here.on_nodes(mount, "umount /usr/bin/squeue /usr/bin/sacct")
    here.works({})
    assert "TDP_JOB_END_S" not in here.env_of(0) or int(here.env_of(0)["TDP_JOB_END_S"]) > 0
    here.works({"slurm": {"time": "0:30:00"}})  # the earlier job is asked for first
    left_s = int(here.env_of(0)["TDP_JOB_END_S"]) - time.time()
    assert 1600 < left_s < 1801


@site(30)
def requeue_forbidden(here: Here):
    here.plugin(("desc.requeue == 1", "error: --requeue is not for users"))
    assert "requeue" in here.ask().forbidden
    job = here.works(here.pasted({}, "launch.requeue.mode", "not for users"))
    assert job["Requeue"] == "0"
    return SAYS


@site(15)
def modules_only(here: Here):
    tools = here.folder / "trainlib"
    here.program("trainlib", "#!/bin/bash\n", tools)
    here.stand_in = here.program(
        "stand_in", STAND_IN.replace("case", "trainlib || exit 9\ncase", 1)
    )
    load = f'module() {{ [ "$*" = "load train/1" ] || return 1; export PATH="{tools}:$PATH"; }}'
    text = shlex.quote(f"{load}\nexport -f module\n")
    here.on_nodes(
        f"mount -t tmpfs tmpfs /etc/profile.d; printf '%s' {text} >/etc/profile.d/modules.sh",
        "umount /etc/profile.d",
    )
    here.works({"slurm": {"modules": ["train/1"]}})


@site(16)
def pyxis(here: Here):
    image = here.folder / "train.sqsh"
    here.program("python", STAND_IN, image / "bin")
    real = here.folder / "real" / "srun"
    real.parent.mkdir()
    shutil.copy("/usr/bin/srun", real)
    text = f"""#!/bin/bash
# stand-in for pyxis: an image is a folder
[ "$1" != --help ] || {{ echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"; exit; }}
image= words=()
for word; do
    case $word in
    --container-image=*) image=${{word#*=}} ;;
    --container-*) ;;
    *) words+=("$word") ;;
    esac
done
[ -n "$image" ] || {{ echo "error: only steps in containers are allowed" >&2; exit 1; }}
export PATH="$image/bin:$PATH"
exec {real} "${{words[@]}}"
"""
    wrapper = here.program("srun", text)
    here.on_nodes(f"mount --bind {wrapper} /usr/bin/srun", "umount /usr/bin/srun")
    assert "pyxis" in here.ask().containers
    here.works({"slurm": {"container": None, "srun": [f"--container-image={image}"]}})


@site(17)
def apptainer(here: Here):
    image = here.folder / "train.sif"
    here.program("python", STAND_IN, image / "bin")
    text = """#!/bin/bash
# stand-in for apptainer: an image is a folder
[ "$1" = exec ] || exit 255
shift
while [[ $1 = --* ]]; do shift; done
export PATH="$1/bin:$PATH"
shift
exec "$@"
"""
    here.program("apptainer", text)
    assert "apptainer" in here.ask().containers
    here.works({"slurm": {"container": ["apptainer", "exec", "--nv", str(image)]}})


@site(18)
def conda(here: Here):
    base = here.folder / "conda"
    here.program("python", STAND_IN, base / "envs" / "train" / "bin")
    setup = base / "etc" / "profile.d" / "conda.sh"
    setup.parent.mkdir(parents=True)
    setup.write_text(
        "# stand-in for conda\n"
        f'conda() {{ [ "$1" = activate ] && export PATH="{base}/envs/$2/bin:$PATH"; }}\n'
    )
    prologue = [f". {setup}", "conda activate train"]
    here.works({"slurm": {"container": None, "prologue": prologue, "python": "python"}})
    tool = here.program("conda", f'#!/bin/bash\n[ "$*" != "info --base" ] || echo {base}\n')
    here.env["CONDA_EXE"] = str(tool)
    here.works({"slurm": {"container": None, "conda": "train"}})


@site(19)
def no_network(here: Here):
    here.on_nodes('! timeout 3 bash -c "</dev/tcp/1.1.1.1/443" 2>/dev/null')
    here.train()


@site(20)
def home_read_only(here: Here):
    home = here.folder / "home"
    home.mkdir()
    here.env["HOME"] = str(home)
    bind = f"mount --bind {home} {home}; mount -o remount,ro,bind {home}; ! touch {home}/x"
    here.on_nodes(f"{bind} 2>/dev/null", f"umount {home}")
    here.train()


@site(21)
def home_absent(here: Here):
    home = here.folder / "homes" / "me"
    home.mkdir(parents=True)
    here.env["HOME"] = str(home)
    here.on_nodes(f"mount -t tmpfs tmpfs {home.parent}", f"umount {home.parent}")
    here.train()


@site(22)
def tiny_tmp(here: Here):
    kept = [str(here.cluster.conf.parents[1]), str(here.folder), str(ROOT)]
    kept = [x for x in kept if x.startswith("/tmp/")]
    lines = ["mkdir -p /run/kept", "mount --rbind /tmp /run/kept"]
    lines.append("mount -t tmpfs -o size=1m,noexec,mode=1777 tmpfs /tmp")
    lines += [f"mkdir -p {x}; mount --rbind /run/kept{x[4:]} {x}" for x in kept]
    lines.append("cp /usr/bin/true /tmp/x; ! /tmp/x 2>/dev/null")
    here.on_nodes("; ".join(lines), "umount -l /tmp; umount -l /run/kept")
    here.train()


def hosts(here: Here, text_of: Callable[[str], str]) -> None:
    """Each node has a hosts file of its own."""
    for node in ("n1", "n2"):
        path = here.folder / f"hosts.{node}"
        path.write_text(text_of(node))
        here.on_nodes(f"mount --bind {path} /etc/hosts", "umount /etc/hosts", (node,))


@site(23)
def loopback_names(here: Here):
    common = (here.cluster.conf.parent / "hosts").read_text()

    def text_of(node: str) -> str:
        own = re.sub(rf"(?m)^\S+ {node}$", f"127.0.1.1 {node}", common)
        assert own != common
        return own

    hosts(here, text_of)
    here.train()


@site(24)
def ipv6_names(here: Here):
    for i, node in enumerate(("n1", "n2"), 1):
        here.on_nodes(
            f"ip -6 address add fd00:7464::{i}/64 dev eth0 nodad",
            f"ip -6 address del fd00:7464::{i}/64 dev eth0",
            (node,),
        )
    common = (here.cluster.conf.parent / "hosts").read_text()

    def text_of(node: str) -> str:
        del node
        return re.sub(r"(?m)^\S+ n([12])$", r"fd00:7464::\1 n\1", common)

    hosts(here, text_of)
    here.train()
    assert "fd00:7464::1" in here.log


@site(25)
def a_card_that_leads_nowhere(here: Here):
    for i, node in enumerate(("n1", "n2"), 1):
        here.on_nodes(
            "ip link add aa0 type veth peer name aa1; ip link set aa1 up; ip link set aa0 up; "
            f"ip address add 192.168.{i}.1/24 dev aa0",
            "ip link del aa0",
            (node,),
        )
    here.train()


@site(26, HYPER)
def hyperthreads(here: Here):
    here.ask()
    job = here.works({"slurm": {"ntasks-per-node": 4, "cpus-per-task": 2}}, ranks=8)
    assert job["CPUs/Task"] == "2" and job["NumNodes"] == "2"


@site(27, TYPED)
def one_device_each(here: Here):
    from torchdistpackage.environment.device import choose_device

    here.task_prolog("echo export CUDA_VISIBLE_DEVICES=0")
    here.works({"slurm": {"ntasks-per-node": 2, "gpus-per-node": 2}}, ranks=4)
    for rank in range(4):
        seen = here.env_of(rank)
        assert seen["CUDA_VISIBLE_DEVICES"] == "0"
        local = int(seen["SLURM_LOCALID"])
        choice = choose_device(local, "0", 1, local_world_size=2, exclusive=True)
        assert choice.index == 0


@site(28, TYPED)
def gpu_bind(here: Here):
    here.env |= {"SBATCH_GPU_BIND": "closest", "SLURM_GPU_BIND": "closest"}
    here.task_prolog("echo export SLURM_GPU_BIND=closest")
    here.works({"slurm": {"ntasks-per-node": 2, "gpus-per-node": 2}}, ranks=4)
    assert {here.env_of(i)["CUDA_VISIBLE_DEVICES"] for i in range(4)} == {"0,1"}


@site(29)
def kill_on_bad_exit(here: Here):
    shown = here.cluster.run("scontrol", "show", "config").stdout
    assert re.search(r"KillWait *= 5 sec", shown)
    with here.cluster.conf.open("a") as text:
        text.write("KillOnBadExit=1\n")
    here.cluster.run("scontrol", "reconfigure")
    failing = STAND_IN.replace(
        "run=", '[ "$SLURM_PROCID" = 0 ] || exit 7\ntrap "" TERM\nsleep 60\nrun=', 1
    ).replace("exit 0", "exit 7", 1)
    here.program("stand_in", failing)
    start = time.monotonic()
    done = here.submit({}, check=False)
    assert done.returncode == 7 and time.monotonic() - start < 50
    here.program("stand_in", STAND_IN)
    here.works({})
    here.train()


@site(32)
def preemption(here: Here):
    """By cancel, by suspension, and by requeue, which test_life.py has too; all without grace."""
    low = "launch.slurm.partition=main"
    here.control(
        "update partition=main PreemptMode=CANCEL", "update partition=main PreemptMode=REQUEUE"
    )
    words = ("launch.slurm.nodes=2", "launch.slurm.ntasks-per-node=1", "parallel.data=1", low)
    run, job = send(
        here.cluster, here.folder, "cancelled", *words, "launch.requeue.mode=chain", env=here.env
    )
    until_step(here.cluster, run, 10)
    high = here.cluster.sbatch("-p", "high", "-N2", "--exclusive", "-o", "/dev/null", script="true")
    here.cluster.wait_end(high, LIMIT_S)
    ids = run / "job" / "submissions.jsonl"
    here.cluster.wait_for(lambda: len(ids.read_text().splitlines()) == 2, 60, "a chained job")
    second = json.loads(ids.read_text().splitlines()[-1])["job"]
    assert here.cluster.wait_end(second, LIMIT_S) == "COMPLETED"
    steps = [row["step"] for row in rows(run)]
    assert steps[-1] == 120 and len(steps) == len(set(steps))
    run, job = send(here.cluster, here.folder, "suspended", *words, env=here.env)
    until_step(here.cluster, run, 5)
    here.cluster.run("scontrol", "suspend", job)
    time.sleep(20)
    here.cluster.run("scontrol", "resume", job)
    assert here.cluster.wait_end(job, LIMIT_S) == "COMPLETED"
    assert rows(run)[-1]["step"] == 120


@site(34)
def another_python(here: Here):
    login = here.folder / "login_only"
    login.mkdir()
    (login / "venv").symlink_to(VENV.parent)
    python = str(login / "venv" / "bin" / "python")
    here.on_nodes(f"mount -t tmpfs tmpfs {login}", f"umount {login}")
    words = [python, "-m", "torchdistpackage", "site", "--probe"]
    here.cluster.run(*words, cwd=here.folder, env=here.env, limit_s=LIMIT_S)
    found = read_site(here.folder / "site.yaml").node
    assert found is not None and found.pythons[python] is False and any(found.pythons.values())
    launch = here.pasted({"slurm": {"container": None}}, python, python=python)
    here.submit(launch, python=python)
    assert [row["step"] for row in rows(here.run)][-1] == 2
    return SAYS


# Programs that load it have another time of day, as on a node whose clock is wrong.
CLOCK = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long late(void) { const char *text = getenv("LATE_S"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (code == 0 && id == CLOCK_REALTIME) now->tv_sec -= late();
    return code;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
"""


@site(35)
def clocks_apart(here: Here):
    """n1, where the batch script and rank 0 run, is five minutes late, then early."""
    source, shim = here.folder / "clock.c", here.folder / "clock.so"
    source.write_text(CLOCK)
    here.cluster.run("gcc", "-shared", "-fPIC", "-o", shim, source, "-ldl")
    real = here.folder / "real" / "date"
    real.parent.mkdir()
    shutil.copy("/usr/bin/date", real)
    for late_s in (300, -300):
        date = f'#!/bin/sh\nLD_PRELOAD={shim} LATE_S={late_s} exec {real} "$@"\n'
        wrapper = here.program("date", date, here.folder / f"late{late_s}")
        mount = f"mount --bind {wrapper} /usr/bin/date"
        here.on_nodes(mount, "umount /usr/bin/date", ("n1",))
        exports = f"export LD_PRELOAD={shim}\\nexport LATE_S={late_s}\\n"
        here.task_prolog(f"[ $(hostname) != n1 ] || printf '{exports}'")
        here.works({"slurm": {"time": "0:30:00"}})
        # by this machine's clock, which is Slurm's
        ends_s = int(here.env_of(0)["TDP_JOB_END_S"]) + late_s
        left_s = ends_s - time.time()
        assert (1700 < left_s < 1815) if late_s > 0 else (1400 < left_s < 1815), left_s
    here.train()


@site(36)
def tight_limits(here: Here):
    limits = ("prlimit", "--nofile=1024:1024", "--memlock=65536:65536", "sh", "-c")
    here.train(words=(*limits, 'umask 077; exec "$@"', "sh"), ranks=4)
    assert (here.trained / "metrics.jsonl").stat().st_mode & 0o077 == 0


def test_each_site_has_one_scenario():
    numbers = [number for scenarios, _ in SHAPES.values() for number in scenarios]
    assert sorted(numbers) == [x.number for x in SITES] == [*range(1, 37)]
