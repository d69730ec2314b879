"""What rotary scalings need and read, without torch."""

import pytest

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.rope import Rope

LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"type": "linear"}, ["type=linear needs factor"]),
        ({"type": "dynamic"}, ["type='dynamic' is unknown; use default, linear, llama3, yarn"]),
        (
            {"type": "llama3", "factor": 0.5, "truncate": False, "theta": 1.0},
            [
                "type=llama3 needs low_freq_factor, high_freq_factor, original_max_position_emb",
                "truncate would not be read with type=llama3; remove it",
                "theta=1; set it to above 1",
                "factor=0.5; set it to 1 or more",
            ],
        ),
        (LLAMA3 | {"low_freq_factor": 4.0}, ["low_freq_factor=4 and high_freq_factor=4"]),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 1.0,
            },
            ["beta_fast=1 and beta_slow=1; set the first above the second"],
        ),
    ],
)
def test_every_problem_is_listed_at_once(values, texts):
    with pytest.raises(LayoutError) as caught:
        Rope(**values)
    assert all(text in str(caught.value) for text in texts)
    assert len(str(caught.value).split("; ")) >= len(texts)


def test_only_yarn_changes_the_size_of_the_tables():
    assert Rope().table_factor == Rope(**LLAMA3).table_factor == 1
    yarn = {"type": "yarn", "original_max_position_embeddings": 64}
    assert Rope(**yarn, factor=4.0).table_factor == pytest.approx(1.138629436)
    assert Rope(**yarn, factor=1.0).table_factor == 1
    assert Rope(**yarn, factor=4.0, attention_factor=0.7).table_factor == 0.7
    assert Rope(**yarn, factor=4.0, mscale=0.5, mscale_all_dim=0.5).table_factor == 1
