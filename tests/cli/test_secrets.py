"""`tdp site` and `tdp doctor` where variables, Slurm's configuration and a refusal of the site hold
secrets: none of them is printed or written. No torch.
"""

import os
from pathlib import Path

import pytest

from torchdistpackage.cli import doctor
from torchdistpackage.cli.main import main

SECRET = "hunter2"
VARIABLES = {
    "HF_TOKEN": SECRET,
    "HF_HUB_TOKEN": SECRET,
    "WANDB_API_KEY": SECRET,
    "AWS_ACCESS_KEY_ID": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "http_proxy": f"http://me:{SECRET}@proxy:3128",
    "HTTPS_PROXY": f"http://me:{SECRET}@proxy:3128",
    "NCCL_NET_PLUGIN": f"https://me:{SECRET}@host/plugin",
    "SLURM_JWT": SECRET,
    "TDP_PASSPHRASE": SECRET,
}
"""As users and sites set them."""
CONFIG = f"""ClusterName             = big
AccountingStoragePass   = {SECRET}
AuthInfo                = cred_expire=120,key={SECRET}
JobCompLoc              = https://me:{SECRET}@host:8080/jobs
JobSubmitPlugins        = lua
SLURM_VERSION           = 25.05.1
"""
REFUSAL = f"sbatch: error: no --exclusive here; see https://me:{SECRET}@portal/help"
COMMANDS = {
    "scontrol": f"""
case "$*" in
--version) echo slurm 25.05.1 ;;
"show config") cat <<'END' ;;
{CONFIG}END
*) echo "PartitionName=cpu Default=YES MaxTime=UNLIMITED State=UP" ;;
esac""",
    "sinfo": f"""
case "$*" in
*%R*) echo "cpu|2|8|64000|(null)" ;;
*) echo "sinfo: error: asked https://me:{SECRET}@db in vain" >&2; exit 1 ;;
esac""",
    "sacctmgr": f'echo "sacctmgr: error: key={SECRET}" >&2; exit 1',
    "sbatch": f"""
case "$*" in
*--exclusive*) echo '{REFUSAL}' >&2; exit 1 ;;
*--test-only*) ;;
*) for word in "$@"; do case $word in /*.sh) script=$word ;; esac; done
    bash "$script" "${{@: -1}}"; echo 7 ;;
esac""",
    "srun": "exit 0",
    "nvidia-smi": "exit 9",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a login node whose commands and variables hold secrets."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_of_a_site_holds_no_secret(site: Path, capsys):
    assert main(["site", "--probe"]) == 0
    printed, text = capsys.readouterr(), (site / "site.yaml").read_text()
    for output in (printed.out, printed.err, text):
        assert SECRET not in output
    assert "no --exclusive here; see https://***@portal/help" in text
    assert "node:" in text and "cluster: big" in text
    assert {x.name for x in site.iterdir()} == {"bin", "site.yaml"}, "nor is the probe left"


def test_the_report_of_a_machine_holds_no_secret(site: Path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_devices", lambda: iter(()))  # torch, and perhaps a GPU
    assert main(["doctor"]) == 0
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert "NCCL_NET_PLUGIN: (not shown)" in printed.out
    assert "asked https://***@db in vain" in printed.out
