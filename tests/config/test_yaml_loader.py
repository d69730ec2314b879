"""Text means what YAML 1.2 says, and whatever it holds, reading ends in a run or in problems."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.yaml_loader import read, write


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            (t, 1e-4)
            for t in ("1e-4", "1E-4", "1.e-4", "+1e-04", ".1e-3", "0.0001", "!!float 1e-4")
        ],
        *[(t, 10) for t in ("10", "010", "+10", "0xA", "0o12", "1_0", "!!int '10'")],
        *[
            (t, t)
            for t in ("yes", "off", "1:30", "2024-01-01", "=", "0b1", "1__0", "e4", "1e", ".")
        ],
        *[(f"'{t}'", t) for t in ("1e-4", "true", "null", "<<", "10")],
        *[(t, None) for t in ("", "~", "null")],
        *[(t, True) for t in ("true", "True")],
        (".inf", float("inf")),
        ("-.INF", -float("inf")),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    read = loads(f"model: {{target: 'a:b', args: {{a: {text}}}}}").model.args["a"]
    assert (read, type(read)) == (value, type(value))


def test_anchors_stand_for_their_values() -> None:
    config = loads("train: {steps: &n 30}\noptim: {warmup_steps: *n}")
    assert config.train.steps == config.optim.warmup_steps == 30


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1e-4",
        "yes",
        "null",
        "<<",
        "010",
        " a ",
        "a: b",
        "a #b",
        "\x85",
        "x\u2028y",
        "\ufeff",
        "a\n\nb",
    ],
)
def test_what_is_written_reads_back(text: str) -> None:
    value = {"a": text, text: [text, {"b": text}, 1e-5, 1e22, -0.0, True, None]}
    document = read(write(value), "r.yaml")
    assert (document.value, document.problems) == (value, [])


PIECES = [
    *["model", "optim", "lr", "args", "{", "}", "[", "]", ",", ":", "#"],
    *[": ", ":\n ", "\n", "- ", "? ", "|\n", "\t", "&a ", "*a", "!!int ", "!x ", "<<"],
    *['"', "'", "\\U0011FFFF", "\\ud800", "1e-4", "\x85", "\ufeff"],
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_a_run_or_a_list_of_printable_lines(text: str) -> None:
    for arguments in ((text,), ("", "r.yaml", [text]), ("", "r.yaml", [f"model.args={text}"])):
        try:
            assert isinstance(loads(*arguments), RunConfig)
        except ConfigErrors as error:
            lines = str(error).splitlines()
            assert len(lines) == len(error.problems) + 1 > 1
            assert all(line.isprintable() for line in lines)
