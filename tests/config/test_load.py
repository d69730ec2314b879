"""A wrong file stops with every mistake in its place; a right one says what it means."""

import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import KEYS, SECTIONS, load, loads
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.errors import ConfigError

ROOT = Path(__file__).parents[2]


def problems(text: str, *overrides: str) -> list[str]:
    """Each problem of a file named r.yaml, as it is printed."""
    with pytest.raises(ConfigError) as caught:
        loads(text, "r.yaml", overrides)
    head, *lines = str(caught.value).splitlines()
    many = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    assert head == f"{many} in r.yaml:"
    assert "Input should" not in str(caught.value) and "pydantic" not in str(caught.value)
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "run: {name: a}\nparallel:\n  pipe: 2\n  tensr: 2\n",
            "r.yaml:4: parallel.tensr: unknown key; did you mean parallel.tensor?",
        ),
        ("launch:\n  local: {prcs: 2}", "r.yaml:2: launch.local.prcs: unknown key; did you mean"),
        (
            "train:\n  num_epochs: 3",
            "r.yaml:2: train.num_epochs: unknown key; did you mean train.epochs?",
        ),
        ("num_epochs: 3", "r.yaml:1: num_epochs: unknown key; did you mean train.epochs?"),
        ("train: {ordr: 3}", "r.yaml:1: train.ordr: unknown key; did you mean parallel.order?"),
        ("train: {prcss: 3}", "r.yaml:1: train.prcss: unknown key; valid here: steps, epochs,"),
        (
            "train: {batch_size: 3}",
            "r.yaml:1: train.batch_size: unknown key; did you mean data.global_batch?",
        ),
        ("\noptimizer: {lr: 1}", "r.yaml:2: optimizer: unknown key; did you mean optim?"),
        ("log: {qqqq: 1}", "r.yaml:1: log.qqqq: unknown key; valid here: every, verbose, plot"),
        ("tensr: 2", "r.yaml:1: tensr: unknown key; did you mean parallel.tensor?"),
        ("tensor: 2", "r.yaml:1: tensor: misplaced key; did you mean parallel.tensor?"),
        ("train:\n  lr: 2", "r.yaml:2: train.lr: misplaced key; did you mean optim.lr?"),
        (
            "train: {every: 2}",
            "r.yaml:1: train.every: misplaced key; did you mean model.moe.every or log.every or "
            "train.eval_every?",
        ),
        (
            "launch: {pipeline: {schedule: gpipe}}",
            "r.yaml:1: launch.pipeline: misplaced key; did you mean pipeline at the top level?",
        ),
        (
            "optim:\n  lr: 1e-4\n  clip: 1\n  lr: 1e-3",
            "r.yaml:4: optim.lr: duplicate key, first given on line 2",
        ),
        ("log: {}\n\nlog: {}", "r.yaml:3: log: duplicate key, first given on line 1"),
        (
            "launch: {slurm: {a: 1,\n  a: 2}}",
            "r.yaml:2: launch.slurm.a: duplicate key, first given on line 1",
        ),
        (
            'parallel:\n  pipe: "2"',
            'parallel.pipe: wants a whole number, 1 or more, up to 1,024, got the text "2"',
        ),
        (
            "train:\n  steps: 3.5",
            "r.yaml:2: train.steps: wants a whole number, 1 or more, up to 1,000,000,000, got the "
            "number 3.5",
        ),
        (
            "train: {steps: true}",
            "r.yaml:1: train.steps: wants a whole number, 1 or more, up to 1,000,000,000, got true",
        ),
        ("optim: {lr: false}", "r.yaml:1: optim.lr: wants a number above 0, got false"),
        ("optim: {lr: .nan}", "r.yaml:1: optim.lr: wants a number above 0, got the number nan"),
        ("model: {tied: yes}", 'r.yaml:1: model.tied: wants true or false, got the text "yes"'),
        ("run: {name: [5]}", "r.yaml:1: run.name: wants a folder name"),
        ("run: {name: ../x}", "r.yaml:1: run.name: wants a folder name"),
        (
            "pipeline: {schedule: 1f1}",
            'or custom, got the text "1f1"; did you mean 1f1b?',
        ),
        ("pipeline: {schedule: forward}", "r.yaml:1: pipeline.schedule: wants gpipe or 1f1b or "),
        ("parallel: {order: [data, pip]}", "did you mean pipe?"),
        ("parallel: {order: [data, data]}", "got the list ['data', 'data']"),
        (
            "optim:\n  betas: [0.9,\n    2]",
            "r.yaml:3: optim.betas: wants a list of two numbers from 0 to below 1",
        ),
        ("parallel: 4", "r.yaml:1: parallel: wants a mapping of keys (order, data, pipe"),
        ("- 1", "r.yaml:1: wants a mapping of sections (run, parallel, pipeline"),
        ("launch: {slurm: [1]}", "r.yaml:1: launch.slurm: wants a mapping of names"),
        ("launch: {slurm: {\n1: a}}", "r.yaml:2: launch.slurm.1: a key must be a text"),
        ("run: &r {seed: 1}\nlog:\n  <<: *r", "r.yaml:3: log.<<: merge keys are not read"),
        ("run: !!python/object:os.x {}", "r.yaml:1: run: the tag tag:yaml.org,2002:python/object"),
        ("run: {seed: !!int x}", "r.yaml:1: run.seed: 'x' is not a valid int"),
        ("launch: {slurm: &a {b: *a}}", "r.yaml:1: launch.slurm.b: the alias refers to a value"),
        ("log: {\n  every: [\n", "r.yaml:3: not valid YAML: expected the node content"),
        ("log:\n\tevery: 1", "r.yaml:2: not valid YAML: found character '\\t'"),
        ("log:\n  every: 1\x07", "r.yaml:2: not valid YAML: character 0x7 is not allowed"),
        ('a: "\\U00110000"', "r.yaml:1: not valid YAML: chr() arg not in range"),
        ('"a\\nb": 1', "r.yaml:1: a\\nb: unknown key"),
        ("a: *b", "r.yaml:1: not valid YAML: found undefined alias 'b'"),
        ("[" * 700, "r.yaml:1: not usable YAML: values are nested too deeply, more than 50"),
        ("log: {every: 2}\n---\nlog: {}", "r.yaml:2: not valid YAML: but found another document"),
    ],
)
def test_one_mistake_is_one_line_with_its_place(text: str, expected: str) -> None:
    (line,) = problems(text)
    assert expected in line
    assert line.startswith("r.yaml:")


def test_all_mistakes_are_told_at_once_in_file_order() -> None:
    """Syntax of keys, names, types, and a rule across sections that is not concerned by them."""
    text = (
        "parallel:\n"
        "  tensr: 2\n"
        "  data: 3\n"
        "model: {dim: 130, heads: 4, layers: none}\n"
        "optim:\n"
        "  lr: 1\n"
        "  lr: 2\n"
        "seq_len: 5\n"
    )
    lines = problems(text, "train.steps=x", "data.global_batch=31")
    assert [line.partition(": ")[0] + " " + line.split(": ")[1] for line in lines] == [
        "r.yaml:2 parallel.tensr",
        "r.yaml:4 model.layers",
        "r.yaml:4 model.dim",
        "r.yaml:7 optim.lr",
        "r.yaml:8 seq_len",
        "command line train.steps=x",
        "command line data.global_batch=31",
    ]


def test_a_file_that_is_no_yaml_says_only_that() -> None:
    """Its values are unknown, so a rule has nothing to say; an override is still looked at."""
    lines = problems("model: {heads: [", "model.dim=7", "optim.lrr=1")
    assert [line.split(": ")[:2] for line in lines] == [
        ["r.yaml:1", "not valid YAML"],
        ["command line", "optim.lrr=1"],
    ]


def test_a_section_given_twice_is_checked_both_times() -> None:
    lines = problems("optim: {lrr: 1}\noptim: {epss: 1, lr: no}")
    assert [line.split(": ")[:2] for line in lines] == [
        ["r.yaml:1", "optim.lrr"],
        ["r.yaml:2", "optim"],
        ["r.yaml:2", "optim.lr"],
        ["r.yaml:2", "optim.epss"],
    ]
    lines = problems("optim: {lr: no}\noptim: {lr: 1}")
    assert lines[0].startswith("r.yaml:1: optim.lr: wants a number above 0, got the text")


def test_rules_that_read_a_wrong_value_stay_silent() -> None:
    """heads=3 breaks two rules; with dim misspelt or mistyped neither can be judged."""
    assert len(problems("model: {heads: 3}")) == 1
    assert ["dmi" in line for line in problems("model: {heads: 3, dmi: 129}")] == [True]
    assert ["model.dim" in line for line in problems("model: {heads: 3, dim: x}")] == [True]


@pytest.mark.parametrize("path", KEYS)
def test_every_key_refuses_a_wrong_value_in_our_words(path: str) -> None:
    *parents, leaf = path.split(".")
    text = "".join(f"{'  ' * i}{name}:\n" for i, name in enumerate(parents))
    text += f"{'  ' * len(parents)}{leaf}: [[]]\n"
    (line,) = problems(text)
    assert line.startswith(f"r.yaml:{len(parents) + 1}: {path}: wants ")
    assert problems("", f"{path}=[[]]")[0].startswith(f"command line: {path}=[[]]: wants ")


@pytest.mark.parametrize("path", KEYS)
def test_every_misspelt_key_gets_its_name_back(path: str) -> None:
    (line,) = problems("", f"{path}x=1")
    assert line.startswith(f"command line: {path}x=1: unknown key; did you mean ")
    assert path in line


@pytest.mark.parametrize("path", [p for p in KEYS if p.rpartition(".")[2] not in SECTIONS])
def test_every_key_at_the_top_level_is_sent_home(path: str) -> None:
    leaf = path.rpartition(".")[2]
    (line,) = problems(f"{leaf}: 1")
    assert line.startswith(f"r.yaml:1: {leaf}: misplaced key; did you mean ")
    assert path in line.removesuffix("?").partition("did you mean ")[2].split(" or ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("parallel.tensr=2", "command line: parallel.tensr=2: unknown key; did you mean parallel."),
        ("parallel.tensor=two", 'wants a whole number, 1 or more, up to 1,024, got the text "two"'),
        ("parallel={tensr: 2}", "command line: parallel={tensr: 2}: parallel.tensr: unknown key"),
        ("tensor=2", "command line: tensor=2: misplaced key; did you mean parallel.tensor?"),
        ("foo.bar.baz=2", "command line: foo.bar.baz=2: foo: unknown key"),
        ("optim.lr.x=1", "command line: optim.lr.x=1: optim.lr: wants a number above 0, got a map"),
        ("optim.lr", "command line: optim.lr: write an override as section.key=value"),
        ("optim..lr=1", "command line: optim..lr=1: write an override as section.key=value"),
        ("=1", "command line: =1: write an override as section.key=value"),
        ("optim.lr=", "command line: optim.lr=: wants a number above 0, got nothing (null)"),
        ("optim.betas=[0.9", "command line: optim.betas=[0.9: not valid YAML: "),
        ("launch.slurm={a: 1, a: 2}", "launch.slurm.a: duplicate key"),
        ("model.heads=3", "command line: model.heads=3: model.dim=128 is not a multiple of"),
    ],
)
def test_overrides_pass_the_same_checks(override: str, expected: str) -> None:
    (line,) = problems("model: {dim: 128}\noptim: {lr: 1.0}", override)
    assert line.startswith(f"command line: {override}")
    assert expected in line


def test_an_override_that_undoes_another_is_refused() -> None:
    (line,) = problems("", "optim.lr=1", "optim.lr=2")
    assert line.startswith("command line: optim.lr=2: would undo the override of optim.lr")
    (line,) = problems("", "launch.slurm.a=1", "launch.slurm={}")
    assert "would undo the override of launch.slurm.a" in line


def test_overrides_win_over_the_file_and_its_mistakes() -> None:
    text = "optim:\n  lr: 1e-3\n  clip: 2\nlaunch:\nmodel: {target: 'a.b:c', args: {w: 1}}\n"
    config = loads(
        text,
        overrides=["optim.lr = 1e-4", "launch.local.procs=2", "model.args.deep.er=[1, x]"],
    )
    assert (config.optim.lr, config.optim.clip, config.launch.local.procs) == (1e-4, 2.0, 2)
    assert config.model.args == {"w": 1, "deep": {"er": [1, "x"]}}
    assert loads("log: {every: bad}", overrides=["log.every=3"]).log.every == 3
    assert loads("log: {every: 9}", overrides=["log={plot: false}"]).log.every == 10
    assert "r.yaml:1: log: wants" in problems("log: 3", "log.every=3")[0]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "log:\nlaunch:\n  local:\n"])
def test_an_empty_file_or_section_is_all_defaults(text: str) -> None:
    assert loads(text) == RunConfig()


def test_files_that_cannot_be_read_are_problems_too(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text("log: {every: 3}\n", encoding="utf-8-sig")
    assert load(tmp_path / "gpt.yaml").log.every == 3
    with pytest.raises(
        ConfigErrors, match=r"gtp\.yaml: there is no such file; did you mean .*gpt\.yaml\?"
    ):
        load(tmp_path / "gtp.yaml")
    with pytest.raises(ConfigErrors, match=r"no such file$"):
        load(tmp_path / "no" / "gpt.yaml")
    with pytest.raises(ConfigErrors, match="is a folder, not a file"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"log:\n  every: 1 # \xe9\n")
    with pytest.raises(ConfigErrors, match=r"latin\.yaml:2: byte 0xe9 is not UTF-8"):
        load(tmp_path / "latin.yaml")


def test_problems_are_values_and_survive_a_process_border(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("log:\n  evry: 1\n")
    with pytest.raises(ConfigErrors) as caught:
        load(path)
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.path) == (str(path), 2, "log.evry")
    again = ForkingPickler.loads(ForkingPickler.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), (problem,))


def test_loading_needs_only_yaml_and_pydantic() -> None:
    """`tdp plan` answers in half a second because nothing else is imported."""
    code = (
        "import sys; before = set(sys.modules); import torchdistpackage.config.load;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before"
        " if 'site-packages' in (getattr(sys.modules[name], '__file__', None) or '')})"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    pydantic = {"annotated_types", "pydantic", "pydantic_core"}
    typing = {"typing_extensions", "typing_inspection"}
    assert set(run.stdout.split()) - {"torchdistpackage"} <= {"yaml", *pydantic, *typing}


@pytest.mark.parametrize(
    ("value", "read_as"), [("runs # of mine", "runs"), ("a\n  b", "a b"), ("!!str x", "x")]
)
def test_an_override_that_yaml_would_shorten_is_refused(value, read_as):
    own = "model: {target: 'a:b'}"
    (line,) = problems(own, f"model.args.a={value}")
    assert f'would be read as the text "{read_as}"; put it in quotes of YAML' in line
    quoted = f'model.args.a="{value}"'.replace("\n", "\\n")
    assert loads(own, overrides=[quoted]).model.args == {"a": value}


def test_a_folder_in_place_of_the_file_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=f"{tmp_path}: is a folder, not a file$"):
        load(tmp_path)
    (tmp_path / "resolved.yaml").touch()
    with pytest.raises(ConfigErrors, match=r"did you mean .*/resolved\.yaml\?$"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["~/runs", "~", "$HOME/runs", "a/${NAME}", "/scratch/$USER"])
def test_what_a_shell_would_expand_in_a_path_is_refused(path: str) -> None:
    """A folder of the name ~ would be made, and somebody would remove it by that name."""
    for key in ("run.dir", "data.path", "pipeline.costs"):
        with pytest.raises(ConfigErrors, match="wants a path without ~"):
            loads("", overrides=[f"{key}='{path}'"])
    assert loads("run: {dir: 'a~b/c$/$1'}").run.dir == "a~b/c$/$1"


def test_adapters_without_a_layer_are_refused_and_none_are_none() -> None:
    """Read as none, all weights would train."""
    with pytest.raises(ConfigErrors, match=r"<string>:2: model\.lora: names no layers; set") as e:
        loads("model:\n  lora: {}")
    assert len(e.value.problems) == 1
    for text in ("{lora: }", "{lora: {target: null}}", "{}"):
        assert loads(f"model: {text}").model.lora.target is None
    assert loads(loads("").to_yaml()) == loads("")
    with pytest.raises(ConfigErrors, match="names no layers"):
        loads("", overrides=["model.lora={}"])
