"""A public name that no run executes is found, and must have a reason."""

import pytest

from tests.train import unreached


def test_names_without_a_call_are_found_and_need_a_reason(monkeypatch: pytest.MonkeyPatch):
    every = list(unreached.public())
    assert "parallel/pipeline/pipeline.py:Pipeline" in every
    assert "ddp/bucket_comm.py:BucketComm" not in every, "a protocol runs nothing"
    called = {f"{name}.method" for name in every if not name.startswith("optim/clip.py")}
    names = unreached.unreached(called)
    assert "optim/clip.py:clip_grad_norm_" in names and len(names) < len(every)
    reasons = {"optim/clip.py:clip_*": "of loops", "ddp/*": "of none"}
    monkeypatch.setattr(unreached, "REASONS", reasons)
    wrong = unreached.problems(names)
    assert "optim/clip.py:grad_norms has no reason" in wrong
    assert "no run leaves out ddp/*, which has a reason" in wrong
    assert not any("clip_grad_norm_" in text for text in wrong)


def test_a_run_calls_what_training_stands_on(ranks):
    """Under the profile of a rank."""
    degrees = {"data": 1, "pipe": 2, "tensor": 1, "context": 1}
    from tests.train.test_parity import overrides

    found = ranks(2).run(unreached.traced, [*overrides(degrees, False), "parallel.pipe=2"])
    seen = set[str]().union(*found)
    names = set(unreached.unreached(seen))
    assert names.isdisjoint(
        {
            "ddp/naive_ddp.py:NaiveDDP",
            "optim/clip.py:clip_factor",
            "optim/clip.py:counts_here",
            "optim/clip.py:grad_norms",
            "optim/clip.py:scale_gradients",
            "parallel/pipeline/executor.py:Executor",
            "parallel/pipeline/grad_sync.py:reducing",
            "parallel/pipeline/losses.py:Losses",
        }
    )
    assert "ddp/ema.py:ShardedEMA" in names
