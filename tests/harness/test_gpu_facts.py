"""What nvidia-smi says of the GPUs of a node, from a stand-in for that program."""

import pytest

from torchdistpackage.harness.gpu_facts import FIELDS, gpu_facts, throttles

ROWS = """
0, NVIDIA H100, 570.1, 81559, Enabled, 0, 1980, 1980, 0x0000000000000001, 41, 5, 5, 16, 16
1, NVIDIA H100, 570.1, 81559, Enabled, 3, 345, 1980, 0x0000000000000048, 91, 1, 5, 8, 16
2, NVIDIA H100, 570.1, 81559, [N/A], [N/A], 1980, 1980, [N/A], 41, [N/A], 5, [N/A], 16
"""
LINKS = """
GPU 0: NVIDIA H100 (UUID: GPU-1)
    Link 0: 26.562 GB/s
    Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 (UUID: GPU-2)
    Link 0: 26.562 GB/s
    Link 1: <inactive>
GPU 2: NVIDIA H100 (UUID: GPU-3)
    Link 0: <inactive>
"""
PROGRAM = """#!/bin/sh
case $1 in
--query-gpu={fields}) [ "$2" = --format=csv,noheader,nounits ] && cat <<'END' ;;
{rows}END
nvlink) cat <<'END' ;;
{links}END
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """`nvidia_smi(text)` puts a program of that text first in the path."""

    def put(text: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_memory_errors_throttled_clocks_and_lost_lanes_and_links_are_found(nvidia_smi):
    rows = ROWS.lstrip("\n")
    nvidia_smi(PROGRAM.format(fields=",".join(FIELDS), rows=rows, links=LINKS.lstrip("\n")))
    facts = gpu_facts()
    assert facts.findings == (
        "GPU 1: 3 uncorrected memory errors",
        "GPU 1: clocks lowered by hardware slowdown, hardware thermal limit (345 of 1980 MHz, "
        "91 C)",
        "GPU 1: PCIe link has 8 of 16 lanes",
        "GPU 1: 1 NVLinks inactive",
    )
    assert [row["index"] for row in facts.rows] == ["0", "1", "2"] and not facts.error


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("#!/bin/sh\necho 'Field \"x\" is not a valid field to query.'; exit 2\n", "not a valid"),
        ("#!/bin/sh\nexec sleep 60\n", "gave no answer in 0.2 s"),
    ],
)
def test_a_program_that_refuses_or_hangs_is_an_error_in_words(nvidia_smi, program, error):
    nvidia_smi(program)
    facts = gpu_facts(timeout_s=0.2)
    assert error in facts.error and not facts.rows


def test_without_nvidia_smi_there_are_no_facts(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_facts().error.startswith("there is no nvidia-smi here")


def test_idle_clocks_are_not_lowered_ones():
    assert throttles("0x0000000000000001") == throttles("0x0000000000000002") == []
    assert throttles("[N/A]") == ()
