"""The room that a disk and a quota leave, beside what df says, and with a stand-in for quota. No
torch.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from torchdistpackage.disk_room import DiskRoom, mount_of, rooms_of, shortage

GIB = 1 << 30
SetQuota = Callable[[int, int, int, int], str]


@pytest.fixture
def set_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetQuota:
    """A quota of the user on the file system of tmp_path: KiB used and allowed, files likewise."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    device = mount_of(tmp_path)[0]

    def install(blocks: int, most_blocks: int, files: int, most_files: int) -> str:
        """Write it as `quota -w -p` of Linux DiskQuota does: with a star what is too much."""
        star = "*" if most_blocks and blocks >= most_blocks else ""
        row = f"{blocks}{star} {most_blocks} {most_blocks} 0 {files} {most_files} {most_files} 0"
        text = f"""#!/bin/sh
[ "$*" = "-w -p" ] || exit 9
echo "Disk quotas for user me (uid 1000):"
echo "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace"
echo "  other:/home       7       8       8       0       1       2       2       0"
echo "  {device} {row}"
"""
        (folder / "quota").write_text(text)
        (folder / "quota").chmod(0o755)
        return device

    return install


def test_a_disk_leaves_what_df_says(tmp_path):
    words = ["df", "-B1", "--output=avail,iavail", str(tmp_path)]
    free = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-2:]
    room = rooms_of(tmp_path / "not" / "there")[0]
    assert str(tmp_path) in room.source and room.num_bytes is not None
    assert room.num_bytes == pytest.approx(int(free[0]), rel=0.05)
    assert room.num_files is None or room.num_files == pytest.approx(int(free[1]), rel=0.05)
    assert shortage(tmp_path, 1, 1) == ""
    assert "900 TiB in 1 files" in shortage(tmp_path, 900 << 40, 1)


def test_a_quota_counts_with_its_bytes_and_files(tmp_path, set_quota: SetQuota):
    device = set_quota(3 << 20, 4 << 20, 995, 1000)
    assert rooms_of(tmp_path)[1] == DiskRoom(f"your quota on {device}", GIB, 5)
    assert shortage(tmp_path, GIB, 5) == ""
    for num_bytes, num_files in ((GIB + 1, 5), (1, 6)):
        problem = shortage(tmp_path, num_bytes, num_files)
        assert "1 GiB" in problem and "5 files" in problem and device in problem
    set_quota(9 << 20, 4 << 20, 1, 0)
    assert rooms_of(tmp_path)[1][1:] == (0, None)
    set_quota(0, 0, 0, 0)
    assert rooms_of(tmp_path)[1][1:] == (None, None) and shortage(tmp_path, GIB, 10) == ""


def test_a_disk_with_few_inodes_is_short_of_files(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=4", "tmpfs", str(disk)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        assert rooms_of(disk)[0][1:] == (1 << 20, 3)  # the root of the disk is one of four
        assert shortage(disk, 1 << 20, 3) == ""
        assert "3 files" in shortage(disk, 1, 4) and "1 MiB" in shortage(disk, (1 << 20) + 1, 1)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
