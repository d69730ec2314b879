"""Trees of switches from topology.conf and from what scontrol printed."""

import pytest

from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.launch.slurm.query import CompletedCommand
from torchdistpackage.launch.slurm.switches import parse_switches, read_switches

TREE = """\
SwitchName=s0 Level=0 LinkSpeed=100 Nodes=n[1-2]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[5-6]
SwitchName=t0 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]
SwitchName=t1 Level=1 LinkSpeed=1 Nodes=n[5-6] Switches=s2
SwitchName=root Level=2 LinkSpeed=1 Nodes=n[1-6] Switches=t[0-1]
"""
"""Of Slurm 22.05, which read this:"""
TREE_CONF = """\
# of a test
SwitchName=s0 Nodes=n[1-2] LinkSpeed=100
SwitchName=s1 \\
    Nodes=n[3-4]
switchname=s2 nodes=n[5-6]   # small letters
SwitchName=t0 Switches=s[0-1]
SwitchName=t1 Switches=s2
SwitchName=root Switches=t[0-1]
"""
BLOCKS = """\
BlockName=g_b0 BlockIndex=0 Nodes=10.1.71.103,10.1.88.115 BlockSize=2
BlockName=g_b1 BlockIndex=1 Nodes=10.1.79.152,10.1.93.120 BlockSize=2
AggregatedBlock=g_b[0-1] BlockIndex=2 Nodes=10.1.71.103,10.1.79.152,10.1.88.115,10.1.93.120 BlockSize=4
"""  # noqa: E501
"""Of a cluster of GB300 with Slurm 25.11; its addresses are shortened."""


def test_what_scontrol_prints_and_the_file_it_read_are_one_tree():
    tree = parse_switches(TREE, "scontrol")
    assert tree == parse_switches(TREE_CONF, "topology.conf")
    assert tree.paths["n3"] == ("s1", "t0", "root")
    assert tree.paths["n6"] == ("s2", "t1", "root")
    assert tree.nodes() == ("n1", "n2", "n3", "n4", "n5", "n6")


def test_blocks_are_below_the_blocks_that_join_them():
    tree = parse_switches(BLOCKS, "scontrol")
    assert tree.paths["10.1.88.115"] == ("g_b0", "g_b[0-1]")
    assert tree.nodes()[:2] == ("10.1.71.103", "10.1.88.115")
    lines = "".join(f"BlockName=b{i} Nodes=n{i}[0-1]\n" for i in range(5))
    of_sizes = parse_switches(lines + "BlockSizes=2,4,8\n", "topology.conf")
    assert of_sizes.paths["n30"] == ("b3", "b2-b3", "b0-b3")
    assert of_sizes.paths["n41"] == ("b4", "b4 of 4", "b4 of 8")


def test_a_branch_with_fewer_levels_repeats_its_highest_switch():
    text = "SwitchName=s0 Nodes=a\nSwitchName=t0 Switches=s0\nSwitchName=s1 Nodes=b\n"
    assert parse_switches(text, "x").paths == {"a": ("s0", "t0"), "b": ("s1", "s1")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no switch"),
        ("\nNodeName=n1 CPUs=4\n", "x:2: 'NodeName=n1'"),
        ("SwitchName=s0 Nodes=n[1-\n", "x:1: host list"),
        ("SwitchName=s0 Nodes=n1\nSwitchName=s0 Nodes=n2\n", "x:2: s0 .* after x:1"),
        ("SwitchName=s0 Nodes=n1\nSwitchName=s1 Nodes=n1\n", "node n1 is below s"),
        ("SwitchName=t Switches=s[0-1]\nSwitchName=s0 Nodes=n1\n", "x:1: t has s1 below it"),
        ("SwitchName=s Switches=t Nodes=n1\nSwitchName=t Switches=s\n", "is below itself"),
        ("SwitchName=t Switches=s\nSwitchName=s\n", "names no node"),
        ("BlockName=b Nodes=n1\nBlockSizes=2,many\n", "x:2: BlockSizes=2,many"),
    ],
)
def test_a_text_that_is_no_tree_is_refused_with_its_line(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_switches(text, "x")


def test_scontrol_is_asked_by_the_word_slurm_and_may_know_nothing(tmp_path):
    asked = []

    def answer(args):
        asked.append(args)
        return CompletedCommand(0, TREE)

    assert read_switches("slurm", answer).num_levels == 3
    assert asked == [("scontrol", "show", "topology")]
    with pytest.raises(LaunchError, match="No topology information"):
        nothing = CompletedCommand(1, "", "scontrol: error: No topology information available")
        read_switches("slurm", lambda args: nothing)
    with pytest.raises(ConfigError, match="No such file"):
        read_switches(str(tmp_path / "absent"))
