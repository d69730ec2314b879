"""The host-list parser against what a real `scontrol show hostnames` answered."""

import json
import time
from pathlib import Path

import pytest

from torchdistpackage.environment.slurm_env import MAX_HOSTS, expand, expand_counts, first_host
from torchdistpackage.errors import LaunchError

CORPUS = json.loads((Path(__file__).parent / "hostlist_corpus.json").read_text())


def test_corpus_holds_what_it_should():
    lists = CORPUS["lists"]
    assert len(lists) == len({row["text"] for row in lists}) == 540
    assert sum(row["hosts"] is None for row in lists) >= 40
    assert sum(row["text"].count("[") > 2 and row["hosts"] is not None for row in lists) >= 100


def test_every_list_of_the_corpus_is_read_as_scontrol_reads_it():
    wrong = {}
    for row in CORPUS["lists"]:
        try:
            hosts = list(expand(row["text"]))
        except LaunchError as error:
            hosts = None
            assert repr(row["text"]) in str(error)
        if hosts != row["hosts"]:
            wrong[row["text"]] = (hosts, row["hosts"])
    assert not wrong


def test_a_bracket_without_a_partner_is_refused_where_scontrol_guesses():
    assert len(CORPUS["unpaired"]) >= 10
    for row in CORPUS["unpaired"]:
        with pytest.raises(LaunchError) as error:
            expand(row["text"])
        assert repr(row["text"]) in str(error.value)


@pytest.mark.parametrize("text", ["n[1 - 2]", "n[ 1]", "n[+1]", "n[18446744073709551616]", "n[٣]"])
def test_what_only_a_damaged_variable_holds_is_refused(text):
    with pytest.raises(LaunchError, match="host list"):
        expand(text)


def test_order_of_several_brackets_is_slurms_and_not_a_plain_product():
    assert expand("r[1-2]c[1-2]n[1-2]")[:4] == ("r1c1n1", "r1c1n2", "r2c1n1", "r2c1n2")


def test_a_list_of_lists_is_the_lists_one_after_the_other():
    good = [row for row in CORPUS["lists"] if row["hosts"] is not None]
    joined = ",".join(row["text"] for row in good)
    assert list(expand(joined)) == [host for row in good for host in row["hosts"]]


def test_first_host():
    assert first_host("gpu[08-11],a1") == "gpu08"
    with pytest.raises(LaunchError, match="names no host"):
        first_host(" ,")


def test_the_largest_list_is_one_full_range():
    assert len(expand(f"n[1-{MAX_HOSTS}]")) == MAX_HOSTS
    with pytest.raises(LaunchError, match="more than 65536"):
        expand(f"n[1-{MAX_HOSTS}],n0")


@pytest.mark.parametrize(
    "text",
    [
        "n[0-99999999999]",
        "n" + "[0-9]" * 40,
        "n" * 100_000 + "[1-60000]",
        "n[" + "1-65536," * 10_000 + "1]",
        "n[" + "9" * 100_000 + "]",
        "n[" + "0" * 10_000 + "1-9]" + "[0-65535]",
        "n[1-2" * 100_000,
        ",".join(["n[1-60000]"] * 3),
    ],
    ids=["range", "product", "name", "ranges", "digits", "padding", "open", "sum"],
)
def test_a_list_that_explodes_is_refused_before_it_is_built(text):
    start = time.process_time()
    with pytest.raises(LaunchError) as error:
        expand(text)
    assert time.process_time() - start < 5.0  # building one takes minutes
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("1", (1,)),
        ("2(x2)", (2, 2)),
        ("3,1", (3, 1)),
        ("3,1(x2)", (3, 1, 1)),
        ("4,3,1(x2),8(x1)", (4, 3, 1, 1, 8)),
    ],
)
def test_expand_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "3,", "2(x0)", "2(3)", "2x3", "-1", "1(x999999999)"])
def test_bad_counts_are_named(text):
    with pytest.raises(LaunchError, match="task counts") as error:
        expand_counts(text)
    assert repr(text) in str(error.value)
