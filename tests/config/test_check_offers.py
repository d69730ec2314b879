"""What a broken rule offers mends it."""

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.config.test_rules import run
from torchdistpackage.config.check import RULES, failed_rules


@given(
    st.fixed_dictionaries(
        {
            "parallel__data": st.integers(1, 6),
            "parallel__tensor": st.integers(1, 9),
            "parallel__pipe": st.integers(1, 9),
            "parallel__sequence_parallel": st.booleans(),
            "pipeline__microbatches": st.integers(1, 20),
            "model__heads": st.integers(1, 12),
            "model__dim": st.integers(1, 200) | st.sampled_from([12288, 1 << 17]),
            "model__mlp_ratio": st.floats(0.1, 8) | st.floats(8, 1024),
            "model__kv_heads": st.none() | st.integers(1, 12),
            "model__head_dim": st.none() | st.integers(1, 9),
            "model__mlp_hidden": st.none() | st.integers(1, 60),
            "model__layers": st.integers(1, 8),
            "data__global_batch": st.integers(1, 200),
            "data__seq_len": st.integers(1, 50),
            "train__accumulate": st.integers(1, 4),
            "train__steps": st.integers(1, 30),
        }
    )
)
def test_every_offered_value_mends_its_rule(values: dict[str, Any]) -> None:
    """ "set heads to 3 or 6" is a promise: with either, the same rule is content."""
    for keys, text in failed_rules(run(**values)):
        if text.endswith("remove one of them"):
            continue
        offers = re.findall(r"(?:set|,|or) (\w+) to ([\d.]+)(?: or ([\d.]+))?", text)
        assert offers, text
        for key, *numbers in offers:
            if key == "it":
                key = keys[0].rpartition(".")[2]
            (field,) = [f for f in keys if f.rpartition(".")[2] == key]
            for number in filter(None, numbers):
                value = float(number) if "." in number else int(number)
                mended = run(**{**values, field.replace(".", "__"): value})
                (rule,) = [rule for rule in RULES if rule.fields == keys]
                assert rule.message(mended, None) is None, (text, key, number)
