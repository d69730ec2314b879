"""scripts/slurm_cluster does what it says: nodes that are machines, faults, repair, refusal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import SCRIPT, Cluster, clean_environment

NODES = ["n1", "n2", "n3", "n4", "n5"]


def submit(cluster: Cluster, folder: Path) -> dict[str, str]:
    greedy = f"{cluster.python} -c 'x = bytearray(500 << 20); import time; time.sleep(30)'"
    return {
        "hosts": cluster.sbatch("-N5", f"-o{folder}/hosts", script="srun hostname"),
        "oom": cluster.sbatch("--mem=200", f"-o{folder}/oom", script=f"srun {greedy}"),
    }


def test_up_twice_is_refused_and_the_first_stays(cluster):
    done = cluster.script("up", check=False)
    assert done.returncode == 1
    assert done.stderr == f"slurm_cluster: {cluster.name} is already up\n"
    assert set(cluster.node_states()) == set(NODES)


def test_status_names_every_part(cluster):
    lines = cluster.script("status").stdout.splitlines()
    words = {line.split()[0]: line for line in lines}
    for daemon in ("munged", "mariadbd", "slurmdbd", "slurmctld"):
        assert words[daemon].startswith(f"{daemon} process ")
    assert all(line in "\n".join(lines) for line in NODES)
    assert not any("dead" in line for line in lines)


def test_a_node_is_a_machine_of_its_own(cluster):
    script = 'hostname; ip -4 -o address show eth0; echo x >/dev/shm/"$0"; ls /dev/shm; pwd'
    seen = {n: cluster.node("exec", n, "sh", "-c", script, n).stdout.splitlines() for n in NODES}
    assert [lines[0] for lines in seen.values()] == NODES
    addresses = [lines[1].split()[3] for lines in seen.values()]
    assert [a.split(".")[3] for a in addresses] == ["1/24", "2/24", "3/24", "4/24", "5/24"]
    for node, lines in seen.items():
        assert lines[2:] == [node, str(SCRIPT.parents[1])]
        cluster.node("exec", node, "rm", f"/dev/shm/{node}")


def test_nodes_know_each_other_and_the_login_host_by_name(cluster):
    script = "getent hosts n1 n5; ls /proc | grep -c '^[0-9]'"
    *hosts, processes = cluster.node("exec", "n3", "sh", "-c", script).stdout.splitlines()
    assert [line.split()[1] for line in hosts] == ["n1", "n5"]
    assert int(processes) < 40


def test_a_job_runs_on_five_hosts(cluster, submitted, folder):
    assert cluster.wait_end(submitted["hosts"]) == "COMPLETED"
    assert sorted((folder / "hosts").read_text().split()) == NODES


def test_a_step_above_its_memory_is_killed(cluster, submitted, folder):
    assert cluster.wait_end(submitted["oom"]) == "FAILED"
    assert "exceeded memory limit" in (folder / "oom").read_text()


def test_sacct_knows_a_job_that_ended(cluster, submitted):
    cluster.wait_end(submitted["hosts"])
    ask = ["sacct", "-n", "-X", "-P", "-j", submitted["hosts"], "-o", "State,NodeList,ExitCode"]
    expected = "COMPLETED|n[1-5]|0:0"
    cluster.wait_for(lambda: cluster.run(*ask).stdout.strip() == expected, 30, "sacct")
    # from a node as well as from the login host
    assert cluster.node("exec", "n2", *ask).stdout.strip() == expected


def test_a_crashed_node_is_down_and_idle_again_after_boot(own_cluster):
    own_cluster.power_off("n2")
    assert own_cluster.node_states() == dict.fromkeys(NODES, "idle") | {"n2": "down"}
    assert own_cluster.node("exec", "n2", "true", check=False).returncode == 1
    assert own_cluster.node("crash", "n2", check=False).returncode == 1
    own_cluster.node("boot", "n2")
    own_cluster.wait_for(lambda: own_cluster.node_states()["n2"] == "idle", 30)
    assert own_cluster.run("srun", "-wn2", "hostname").stdout == "n2\n"


def test_a_crash_takes_every_process_of_the_node(own_cluster):
    job = own_cluster.sbatch("-wn3", "--no-requeue", "-o/dev/null", script="srun sleep 4321")
    # srun, which is on the node too, and the task
    own_cluster.wait_for(lambda: len(processes_with(b"sleep\x004321")) >= 2)
    own_cluster.power_off("n3")
    assert not processes_with(b"sleep\x004321")
    assert own_cluster.wait_end(job) == "NODE_FAIL"


def test_a_cut_cable_is_out_until_it_is_joined(own_cluster):
    address = own_cluster.node("exec", "n5", "hostname", "-i").stdout.strip()
    ping = ["exec", "n4", "bash", "-c", f"timeout 2 bash -c '</dev/tcp/{address}/6818'"]
    assert own_cluster.node(*ping, check=False).returncode == 0
    own_cluster.node("cut", "n4")
    assert own_cluster.node(*ping, check=False).returncode != 0
    assert own_cluster.node("exec", "n4", "hostname").stdout == "n4\n"
    own_cluster.node("join", "n4")
    own_cluster.wait_for(lambda: own_cluster.node(*ping, check=False).returncode == 0, 20)


def test_slurmd_dies_alone_and_starts_again(own_cluster):
    own_cluster.node("kill-slurmd", "n1")
    assert "n1" in own_cluster.script("status").stdout.partition("slurmd dead")[0]
    assert own_cluster.node("exec", "n1", "hostname").stdout == "n1\n"
    own_cluster.node("start-slurmd", "n1")
    assert own_cluster.run("srun", "-wn1", "hostname").stdout == "n1\n"


def test_settle_repairs_everything_at_once(own_cluster):
    own_cluster.sbatch("-N5", "-o/dev/null", script="sleep 1000")
    own_cluster.power_off("n1")
    own_cluster.node("cut", "n2")
    own_cluster.node("kill-slurmd", "n3")
    own_cluster.settle()
    assert own_cluster.run("squeue", "-h").stdout == ""
    assert sorted(own_cluster.run("srun", "-N5", "hostname").stdout.split()) == NODES


def test_two_cards_and_gpus_beside_the_others(new_cluster, cluster):
    with new_cluster(nodes=2, cards=2, gpus=2, rate="1gbit", cpus=4) as other:
        show = "ip -4 -o address show | grep -o 'eth[01] .*/'; echo $CUDA_VISIBLE_DEVICES; nproc"
        out = other.run("srun", "-wn2", "--gpus-per-node=2", "sh", "-c", show).stdout.split()
        assert out[0] == "eth0" and out[3] == "eth1"
        assert out[2].rpartition(".")[0] != out[5].rpartition(".")[0]
        assert out[6] == "0,1"
        assert other.run("scontrol", "show", "node", "n1").stdout.count("CPUTot=4") == 1
        qdisc = other.node("exec", "n1", "tc", "qdisc", "show", "dev", "eth1").stdout
        assert "tbf" in qdisc and "rate 1Gbit" in qdisc
        assert set(cluster.node_states()) == set(NODES)
        assert other.conf != cluster.conf
    assert not other.conf.exists()
    assert other.script("down").stdout == f"{other.name} is not up\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
def test_an_interrupted_up_leaves_nothing_or_what_the_next_one_clears(cluster, number):
    name = f"{cluster.name}-cut-{number}"
    command = [sys.executable, str(SCRIPT), "--name", name]
    folder = Path(f"/tmp/tdp-slurm-{name}")
    started = subprocess.Popen([*command, "up"], stdout=subprocess.PIPE, env=clean_environment())
    cluster.wait_for((folder / "run" / "munged.pid").exists, 30, every_s=0.01)
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert folder.exists() == (number == signal.SIGKILL)
    try:
        done = subprocess.run([*command, "up"], env=clean_environment(), timeout=120, check=False)
        assert done.returncode == 0
    finally:
        subprocess.run([*command, "down"], env=clean_environment(), timeout=120, check=True)
    assert not folder.exists()
    assert not any(name in path.name for path in Path("/run/netns").iterdir())


def test_an_up_that_fails_says_why_and_leaves_nothing(cluster):
    name = f"{cluster.name}-bad"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--name", name, "up", "--rate", "fast"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert 'illegal value for "rate": "fast"' in done.stderr
    assert not Path(f"/tmp/tdp-slurm-{name}").exists()
    assert not any(name in path.name for path in Path("/run/netns").iterdir())


def test_a_recorded_pid_that_is_someone_elses_by_now_is_left_alone(cluster):
    bystander = subprocess.Popen(["sleep", "100"])
    name = f"{cluster.name}-reuse"
    command = [sys.executable, str(SCRIPT), "--name", name]
    try:
        run = Path(f"/tmp/tdp-slurm-{name}/run")
        run.mkdir(parents=True)
        (run / "munged.pid").write_text(f"{bystander.pid} 12345\n")
        subprocess.run([*command, "down"], timeout=60, check=True, capture_output=True)
        assert not run.exists()
        time.sleep(0.2)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.fixture
def put():
    """A path in the place of an instance's folder, which is cleared afterwards."""
    path = Path(f"/tmp/tdp-slurm-planted-{os.getpid()}")
    yield path
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


ours = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who alone has clusters")


def planted(folder: Path, pid: int) -> Path:
    """What somebody else wrote: a daemon's record with the process id of another program."""
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "slurmctld.pid").write_text(f"{pid} {start}\n")
    (folder / "settings.json").write_text('{"name": "planted"}')
    return folder


@ours
@pytest.mark.parametrize("how", ["a link", "of another user"])
def test_what_others_put_in_the_place_of_its_folder_is_neither_read_nor_touched(put, tmp_path, how):
    bystander = subprocess.Popen(["sleep", "100"])
    try:
        if how == "a link":
            put.symlink_to(planted(tmp_path / "roots", bystander.pid))
        else:
            os.chown(planted(put, bystander.pid), 12345, 12345)
        before = sorted(put.rglob("*"))
        name = put.name.removeprefix("tdp-slurm-")
        commands = (["up"], ["down"], ["status"], ["conf"], ["repair"], ["node", "exec", "n1"])
        for words in commands:
            done = script("--name", name, *words)
            assert done.returncode == 1, (words, done.stdout)
            assert done.stderr.startswith(f"slurm_cluster: {put} is "), done.stderr
            assert done.stderr.count("\n") == 1 and "--name" in done.stderr
        assert bystander.poll() is None and sorted(put.rglob("*")) == before
    finally:
        bystander.kill()
        bystander.wait()


def test_the_folder_is_for_others_to_pass_through_only(cluster):
    folder = cluster.conf.parents[1]
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    parts = ("etc", "run", "spool", "munge", "dev")
    assert {modes[part] for part in (folder.name, *parts)} == {0o711}
    assert {modes[part] for part in ("state", "log", "mysql")} == {0o700}
    assert (folder / "etc" / "slurmdbd.conf").stat().st_mode & 0o777 == 0o600
    assert (folder / "munge" / "key").stat().st_mode & 0o777 == 0o600


@ours
def test_packages_are_installed_for_who_asks_for_it():
    """Here a file of one is hidden, in a mount namespace that goes with the command."""
    hide = 'for d in /usr/lib/*/slurm*; do [ -d "$d" ] && mount -t tmpfs none "$d"; done; exec "$@"'
    policy = Path("/usr/sbin/policy-rc.d")
    before = policy.exists() and policy.stat().st_mtime_ns
    done = script(
        *("--name", "bare", "up", "--accounting"),
        first=("unshare", "--mount", "sh", "-c", hide, "-"),
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("cannot: ") and done.stderr.count("\n") == 1
    assert "slurm-wlm-mysql-plugin not installed" in done.stderr
    assert "scripts/slurm_cluster up --install" in done.stderr
    assert (policy.exists() and policy.stat().st_mtime_ns) == before
    assert not Path("/tmp/tdp-slurm-bare").exists()


def script(*words: str, first: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*first, sys.executable, str(SCRIPT), *words]
    return subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )


def test_without_root_it_refuses_in_one_line():
    command = [sys.executable, str(SCRIPT), "--name", "refused", "up"]
    if os.geteuid() == 0:
        # In a user namespace without a mapping nobody is root.
        command = ["unshare", "--user", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("cannot: nodes are network namespaces, which root alone makes")
    assert done.stderr.count("\n") == 1
    assert not Path("/tmp/tdp-slurm-refused").exists()


def processes_with(words: bytes) -> list[int]:
    """Those that have `words` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
