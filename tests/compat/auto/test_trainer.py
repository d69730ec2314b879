"""Hugging Face's Trainer with a model that rules split: 3 ranks cannot share 2 key heads evenly."""

from __future__ import annotations

import pytest

from tests.parallel.auto.test_trainer import as_one_process

RANKS_IMPORT = ("transformers.trainer",)


@pytest.mark.full
@pytest.mark.late_in_full
def test_as_the_trainer_of_one_process(ranks, tmp_path):
    as_one_process(ranks, tmp_path, [("tensor", 3)], {}, 0)
