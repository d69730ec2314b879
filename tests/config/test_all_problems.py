"""All checks of a run report together, and a check that depends on a mistake is left out."""

import pytest

from torchdistpackage.config.all_problems import ProblemCollector
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import load_draft
from torchdistpackage.errors import LayoutError


@pytest.fixture
def draft_of(tmp_path):
    def draft(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_draft(path)

    return draft


def refuse(error: Exception):
    def check():
        raise error

    return check


def test_a_right_run_gets_what_the_checks_return(draft_of):
    collector = ProblemCollector(draft_of("optim: {lr: 0.5}"), "run.yaml")
    collector.note("never printed")
    assert collector.run("first", ("model",), lambda: 7) == 7
    collector.finish()


def test_checks_of_right_keys_add_to_the_problems_of_the_file(draft_of):
    draft = draft_of("optim: {lrr: 0.5}\ntrain: {steps: none, accumulate: 2}")
    assert draft.config.train.accumulate == 2
    assert {"optim.lrr", "optim.lr", "train.steps"} <= draft.bad
    assert "train.accumulate" not in draft.bad
    collector = ProblemCollector(draft, "run.yaml")
    for name, keys in (("a", ("optim",)), ("b", ("train.steps",)), ("c", ("optim.lr",))):
        assert collector.run(name, keys, refuse(AssertionError("not called"))) is None
    problem = draft.config.problem("model.dim", "of the model")
    twice = ConfigErrors("here", [problem, problem])
    assert collector.run("d", ("model", "train.accumulate"), refuse(twice)) is None
    assert collector.run("e", ("data",), refuse(LayoutError("of a layout"))) is None
    collector.note("the last line")
    with pytest.raises(ConfigErrors) as caught:
        collector.finish()
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["optim.lrr", "train.steps", "model.dim", ""]
    assert "of a layout" in str(caught.value)
    left_out, last = caught.value.__notes__
    assert left_out.endswith("a and b and c") and last == "the last line"


def test_the_only_error_is_raised_as_it_is(draft_of):
    collector, error = ProblemCollector(draft_of(""), "run.yaml"), LayoutError("alone")
    collector.run("plan", (), refuse(error))
    with pytest.raises(LayoutError) as caught:
        collector.finish()
    assert caught.value is error


def test_a_broken_rule_leaves_out_what_reads_any_of_its_keys(draft_of):
    draft = draft_of("data: {seq_len: 30}\nparallel: {tensor: 4, sequence_parallel: true}")
    assert {"data.seq_len", "parallel.tensor", "parallel.sequence_parallel"} <= draft.bad


def test_a_file_that_is_no_mapping_leaves_out_every_check_with_keys(draft_of):
    collector = ProblemCollector(draft_of("[1, 2]"), "run.yaml")
    assert collector.run("plan", ("model",), refuse(AssertionError("not called"))) is None
    with pytest.raises(ConfigErrors):
        collector.finish()
