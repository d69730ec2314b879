"""Check a run's files and all rules across sections, for every number of ranks it may have.

All violations are reported. A rule is skipped only if its own keys are already wrong, because its
message would be noise.
"""

import contextlib
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

from torchdistpackage.bounded import check_regular
from torchdistpackage.config import rules
from torchdistpackage.config.cached_datasets import CACHED, located
from torchdistpackage.config.chat_templates import chat_templates, no_chat_template
from torchdistpackage.config.data_section import CHAT_FIELDS, SUFFIX_OF_KIND, DataSection
from torchdistpackage.config.data_split import split_at_end, too_few_tokens
from torchdistpackage.config.errors import Problem
from torchdistpackage.config.hugging_face import tokenizer_file, vocabulary_size
from torchdistpackage.config.job_geometry import GPUS, LAYOUT, JobGeometry, job_geometry
from torchdistpackage.config.packages import too_old
from torchdistpackage.config.rules import DEGREES
from torchdistpackage.config.rules_data import DATA_RULES
from torchdistpackage.config.rules_experts import EXPERT_RULES
from torchdistpackage.config.rules_model import MODEL_RULES
from torchdistpackage.config.rules_optim import OPTIM_RULES
from torchdistpackage.config.rules_pipeline import PIPELINE_RULES
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.config.site import read_site, site_problems
from torchdistpackage.config.slurm import Found, canonical_name, problems
from torchdistpackage.config.text_ends import text_ends
from torchdistpackage.errors import ConfigError, DataError

_SECTIONS = tuple(RunConfig.model_fields)
RULES = sorted(
    (*MODEL_RULES, *OPTIM_RULES, *EXPERT_RULES, *rules.RULES, *DATA_RULES, *PIPELINE_RULES),
    key=lambda rule: _SECTIONS.index(rule.fields[0].partition(".")[0]),
)
"""All rules, in the order of the sections, which is the order of the report."""
_SLURM = "launch.slurm"


Violation = tuple[tuple[str, ...], str]
"""The keys that a rule reads, the one to change first, and what is wrong with them."""


def violations(
    config: RunConfig,
    world_size: int | None = None,
    bad: Collection[str] = (),
    *,
    job: bool = False,
) -> tuple[Problem, ...]:
    """Return a problem for every rule across sections that `config` breaks.

    The arguments are those of `failed_rules`.
    """
    failed = failed_rules(config, world_size, bad, job=job)
    return tuple(config.problem(keys[0], text) for keys, text in failed)


def failed_rules(
    config: RunConfig,
    world_size: int | None = None,
    bad: Collection[str] = (),
    *,
    job: bool = False,
) -> Iterator[Violation]:
    """Yield every rule across sections that `config` breaks.

    Args:
        world_size: number of ranks; None if not known yet, then `launch.local.procs` must fit.
        bad: dotted paths already known to be wrong; rules that read them are skipped.
        job: the run is a Slurm job: without a world_size it must fit every number of ranks that
            `launch.slurm` allows.
    """
    wrong = problems(config.launch.slurm)
    yield from _of_options(config, wrong, bad)
    if world_size or not job:
        yield from _on(config, world_size, bad)
        return
    bad = [*bad, *(f"{_SLURM}.{canonical_name(key)}" for key, _ in wrong)]
    shape = None
    if not touches(
        (*DEGREES, "launch.elastic", *(f"{_SLURM}.{name}" for name in (*LAYOUT, *GPUS))), bad
    ):
        shape, wrong = job_geometry(config)
        yield from _of_options(config, wrong, bad)
    if config.launch.site is not None and not touches(("launch.site",), bad):
        yield from _of_site(config, config.launch.site, bad)
    if shape is None:
        yield from _on(config, config.launch.local.procs, bad)
    elif config.launch.elastic.nodes is not None:
        # only the largest world: on smaller ones the degrees are planned anew, by another check
        yield from _on(config, shape.world_sizes[-1], bad)
    else:
        yield from _on_each(config, shape, bad)


def _of_options(
    config: RunConfig, wrong: Collection[Found], bad: Collection[str]
) -> Iterator[Violation]:
    """Yield the problems of `launch.slurm`, each under its key as spelled in the file."""
    written = {canonical_name(key): key for key in config.launch.slurm}
    for key, text in wrong:
        keys = (f"{_SLURM}.{written.get(key, key)}",)
        if not touches(keys, bad):
            yield keys, text


def _of_site(config: RunConfig, path: str, bad: Collection[str]) -> Iterator[Violation]:
    """Yield each request that the site of the job cannot satisfy."""
    try:
        site = read_site(path)
    except ConfigError as error:
        yield ("launch.site",), str(error)
        return
    for key, text in site_problems(site, config.launch.slurm, config.launch.requeue.mode):
        if key.startswith("launch."):
            if not touches((key,), bad):
                yield (key,), text
        else:
            yield from _of_options(config, [(key, text)], bad)


def _on_each(config: RunConfig, shape: JobGeometry, bad: Collection[str]) -> Iterator[Violation]:
    """Yield each rule that a job breaks once, with the node counts that break it."""
    texts: dict[tuple[str, ...], tuple[str, list[int]]] = {}
    for nodes, world_size in zip(shape.nodes, shape.world_sizes, strict=True):
        for keys, text in _on(config, world_size, bad):
            texts.setdefault(keys, (text, []))[1].append(nodes)
    for keys, (text, nodes) in texts.items():
        if len(shape.nodes) > 1:
            fitting = [n for n in shape.nodes if n not in nodes]
            text = f"not on {_some(nodes)} of nodes={shape.nodes_text}: {text}"
            text += f"; nodes={','.join(map(str, fitting))} would fit" if fitting else ""
        elif keys[0] in DEGREES:
            text += f" (the job has {shape})"
        yield keys, text


def _on(config: RunConfig, world_size: int | None, bad: Collection[str]) -> Iterator[Violation]:
    world = world_size or config.launch.local.procs
    if world and not touches(DEGREES, bad):
        # If this fails, a rule below reports it, and the other rules read the degrees as written.
        with contextlib.suppress(ConfigError):
            config = config.resolve(world)
    for rule in RULES:
        if not touches(rule.fields, bad) and (text := rule.message(config, world_size)):
            yield rule.fields, text


def touches(keys: tuple[str, ...], bad: Collection[str]) -> bool:
    """Return whether one of `keys` is in `bad`, or lies inside or around a path in it.

    The path "" in `bad` stands for the whole file.
    """
    return any(
        not b or key == b or key.startswith(f"{b}.") or b.startswith((f"{key}.", f"{key}["))
        for key in keys
        for b in bad
    )


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


def _unfit_path(path: Path) -> str:
    try:
        path = located(str(path))
    except DataError as error:
        return str(error)
    if not path.exists():
        hint = f", or write {CACHED}{path}, which is cached" if _is_cached(path) else ""
        return f"{path} does not exist, seen from {Path.cwd()}; check the path{hint}"
    if path.is_dir():
        return ""
    try:
        check_regular(path, follow=True)
    except OSError as error:
        return f"{path} {error.strerror}; name a file or a folder"
    return ""


def _is_cached(path: Path) -> bool:
    try:
        located(f"{CACHED}{path}")
    except DataError:
        return False
    return True


def absent_files(config: RunConfig) -> list[Problem]:
    """Return a problem for each file of data and log sections and each package that is missing."""
    named = {key: part.path for key, part in config.data.all_parts.items()}
    named |= {"data.tokenizer": config.data.tokenizer, "log.profile": config.log.profile}
    absent = [
        config.problem(key, why)
        for key, path in named.items()
        if path is not None and (why := _unfit_path(Path(path)))
    ]
    needed = [
        (package, key, "int8" if package == "bitsandbytes" else "hf")
        for package, key in _needed_packages(config).items()
    ]
    needed += [("plotly", "log.report", "report")] if config.log.report else []
    needed += [(name, "log.to", name) for name in config.log.to]
    why = "needs {0}, which is not installed; install the extra {1}: "
    why += 'pip install "torchdistpackage[{1}]"'
    return absent + [
        config.problem(key, why.format(package, extra))
        for package, key, extra in needed
        if find_spec(package) is None
    ]


def old_packages(config: RunConfig) -> list[Problem]:
    """Return a problem for each package whose release is too old for a key that needs it."""
    problems_of = {key: too_old(package) for package, key in _needed_packages(config).items()}
    return [config.problem(key, text) for key, text in problems_of.items() if text is not None]


def _needed_packages(config: RunConfig) -> dict[str, str]:
    """Return the packages that the run needs, each with the key that needs it."""
    model = config.model
    needs = {
        "transformers": ("model.hf", model.hf is not None),
        "peft": ("model.lora.target", model.lora.target is not None),
        "bitsandbytes": ("model.lora.load_in_4bit", model.lora.load_in_4bit),
    }
    if package := config.optim.spec.package:
        needs[package] = ("optim.name", True)
    return {package: key for package, (key, is_needed) in needs.items() if is_needed}


def wrong_files(config: RunConfig) -> list[Problem]:
    """Return a problem for each file that exists, but does not fit this run."""
    problems_of = {"data.tokenizer": _of_tokenizer(config)}
    problems_of |= {key: _of_size(part) for key, part in config.data.all_parts.items()}
    return old_packages(config) + [
        config.problem(key, text) for key, texts in problems_of.items() for text in texts
    ]


def _of_size(data: DataSection) -> Iterator[str]:
    """Yield a problem if a file of bytes or token ids is too short; it is cut near its end."""
    path = Path(data.path or "")
    if data.name not in ("text", "tokens") or data.tokenizer is not None or not path.is_file():
        return
    width = 1 if data.name == "text" else int(data.dtype.removeprefix("uint")) // 8
    total = path.stat().st_size // width
    numbers = split_at_end(total, data.val_fraction)
    sides = (data.val_fraction < 1, data.val_fraction > 0)
    for split, number, is_read in zip(("train", "val"), numbers, sides, strict=True):
        if is_read and (text := too_few_tokens(split, number, data.seq_len, total=total)):
            yield f"{path}: {text}"


def bytes_there(data: DataSection) -> int | None:
    """Return the total size in bytes of a data section's files, or None if none exists."""
    try:
        path, suffix = located(data.path or ""), SUFFIX_OF_KIND.get(data.name or "", "")
    except DataError:
        return None
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else None
    return sum(x.stat().st_size for x in path.rglob(f"*{suffix}") if x.is_file())


def _of_tokenizer(config: RunConfig) -> Iterator[str]:
    folder = Path(config.data.tokenizer or "")
    if config.data.tokenizer is None or not folder.exists():
        return
    try:
        file = tokenizer_file(folder)
        size, vocab = vocabulary_size(file), config.model.vocab
        if size > vocab:
            fix = f"set model.vocab to {size} or more"
            if (hf := config.model.hf) is not None:
                fix = f"use the tokenizer of {hf}, or set model.vocab to {size} to add rows"
            yield f"{folder} has {size} ids, but model.vocab is {vocab}; {fix}"
        fields = {x.field for x in config.data.all_parts.values() if x.tokenizer}
        if fields - {*CHAT_FIELDS}:
            text_ends(file, config.data.bos, config.data.eos)
        if fields & {*CHAT_FIELDS} and not chat_templates(file.parent):
            yield no_chat_template(file.parent)
    except DataError as error:
        yield str(error).removeprefix("data.tokenizer ")
