"""Turn a YAML file and `section.key=value` overrides into a RunConfig, or one list of problems.

Loading continues after the first problem. Syntax, names, types and the rules across sections are
all checked, each rule on the valid values.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from torchdistpackage.bounded import read_regular
from torchdistpackage.bounded_yaml import MAX_DEPTH
from torchdistpackage.config.check import failed_rules
from torchdistpackage.config.errors import (
    MAX_PROBLEMS,
    ConfigErrors,
    KeyLocations,
    Problem,
    SourceLocation,
    nearest,
)
from torchdistpackage.config.hugging_face import FILE as CONFIG
from torchdistpackage.config.hugging_face import (
    FREE_KEYS,
    model_keys,
    read_config,
    stored_vocabulary,
)
from torchdistpackage.config.model_section import NO_LAYERS
from torchdistpackage.config.schema import ITEMS, RunConfig, Section
from torchdistpackage.config.types import expected_of
from torchdistpackage.config.written_text import restore
from torchdistpackage.config.yaml_loader import MAX_BYTES, MAX_KEY, Keys, YamlDocument, dotted, read
from torchdistpackage.errors import ConfigError
from torchdistpackage.run_files import RESOLVED

_OVERRIDE = "command line: "
SECTION_NAMES = tuple(RunConfig.model_fields)


@dataclass(frozen=True, slots=True)
class Draft:
    """A run as far as it could be read, and everything that is wrong with it.

    config: the run, in which invalid keys have their defaults. problems: in file order. bad: paths
        of keys that are invalid or that a broken rule reads; "" is the whole file.
    """

    config: RunConfig
    problems: tuple[Problem, ...]
    bad: frozenset[str]


def load(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    *,
    job: bool | None = False,
    only: Collection[str] = SECTION_NAMES,
) -> RunConfig:
    """Read a run from a YAML file; `overrides` such as "optim.lr=1e-4" win over the file.

    An empty file is a run of defaults.

    Args:
        path: the YAML file.
        overrides: values that replace those of the file.
        world_size: number of ranks that a launcher has started; launch.local.procs is then ignored.
        job: without a world_size, the run must fit every number of ranks that launch.slurm allows;
            None: it is a job if that section has keys.
        only: sections to check. Others are not checked, and invalid keys there get their defaults.

    Raises:
        ConfigErrors: lists all that is wrong, each with its place; also `.problems`.
    """
    return _checked(load_draft(path, overrides, world_size, job=job, only=only), os.fspath(path))


def load_draft(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    *,
    job: bool | None = False,
    only: Collection[str] = SECTION_NAMES,
) -> Draft:
    """Read a run as `load` does, and return the valid part together with the problems.

    Raises:
        ConfigErrors: the file cannot be read, or has too many problems to list.
    """
    source, line = os.fspath(path), None
    try:
        text = read_regular(Path(path), MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        folder = Path(path).parent
        files = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        close = nearest(Path(path).name, files)
        why = "there is no such file" + (f"; did you mean {folder / close}?" if close else "")
    except OSError as error:
        run = Path(path) / RESOLVED
        why = f"cannot be read: {error.strerror}"
        if Path(path).is_dir():
            why = "is a folder, not a file" + (f"; did you mean {run}?" if run.is_file() else "")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        why = f"byte {error.object[error.start]:#04x} is not UTF-8; save the file as UTF-8"
    else:
        return _draft(text, source, overrides, world_size, job=job, only=only)
    raise ConfigErrors(source, [Problem(source, line, "", why)])


def loads(
    text: str,
    source: str = "<string>",
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    *,
    job: bool | None = False,
    only: Collection[str] = SECTION_NAMES,
) -> RunConfig:
    """Read a run from YAML text, which errors call `source`; other arguments as in `load`."""
    return _checked(_draft(text, source, overrides, world_size, job=job, only=only), source)


def _checked(draft: Draft, source: str) -> RunConfig:
    if draft.problems:
        raise ConfigErrors(source, draft.problems)
    return draft.config


def _draft(
    text: str,
    source: str,
    overrides: Sequence[str],
    world_size: int | None,
    *,
    job: bool | None,
    only: Collection[str],
) -> Draft:
    draft = _PartialConfig(source, read(text, source))
    for override in overrides:
        draft.override(override)
    restore(draft.values, draft.texts, _field_of)
    draft.fill_from_weights()
    config = draft.validate()
    others = set(SECTION_NAMES) - set(only)
    draft.invalid |= others
    broken = draft.check(config, world_size, bool(config.launch.slurm) if job is None else job)
    problems = [p for p in draft.problems if p.path.partition(".")[0] not in others]
    # resolved.yaml in the run folder has no aliases, and the job must be able to read it
    may_grow = not problems and ("&" in text or len(text) > MAX_BYTES // 8)
    if may_grow and (size := len(config.to_yaml().encode())) > MAX_BYTES:
        why = (
            f"has {size:,} bytes with its aliases written out, more than the {MAX_BYTES:,} "
            "allowed; write less"
        )
        problems.append(Problem(source, None, "", why))
    in_order = sorted(problems, key=lambda p: (p.file.startswith(_OVERRIDE), p.line or 0))
    config = config.written_at(KeyLocations(source, draft.locations))
    return Draft(config, tuple(in_order), frozenset((draft.invalid - others) | broken))


def override_problems(overrides: Sequence[str]) -> list[Problem]:
    """Return the problems of overrides that do not depend on the file: their form, names and
    types.
    """
    draft = _PartialConfig("", read("", ""))
    for override in overrides:
        draft.override(override)
    restore(draft.values, draft.texts, _field_of)
    draft.validate()
    return draft.problems


class _PartialConfig:
    """The values of a file and its overrides before they become a RunConfig, and the problems so
    far.
    """

    def __init__(self, source: str, document: YamlDocument) -> None:
        self.source = source
        self.problems, self.locations = document.problems, document.locations
        self.texts = document.texts
        self.invalid = document.invalid
        self.values: dict[str, Any] = {}
        self._overridden: list[str] = []
        value = document.value
        if isinstance(value, dict):
            self.values = cast(dict[str, Any], value)
        elif value is not None:  # the invalid path "" covers all keys, so no rule is checked
            self._report(SourceLocation(source, 1), "", _unfit_section("", value))

    def _report(self, location: SourceLocation, path: str, text: str) -> None:
        self.problems.append(Problem(*location, path, text))
        self.invalid.add(path)

    def _location(self, path: Keys) -> SourceLocation:
        return KeyLocations(self.source, self.locations).of(path)

    def override(self, text: str) -> None:
        """Set one value in place of that of the file."""
        location = SourceLocation(_OVERRIDE + text)
        name, equals, value = (part.strip() for part in text.partition("="))
        path = tuple(name.split("."))
        if not equals or not all(path) or len(path) > MAX_DEPTH or max(map(len, path)) > MAX_KEY:
            why = "write an override as section.key=value, such as train.steps=100"
            self.problems.append(Problem(*location, "", why))
            return
        if undone := [old for old in self._overridden if f"{old}.".startswith(f"{name}.")]:
            why = f"would undo the override of {undone[0]}; remove one of them"
            self._report(location, name, why)
            return
        self._overridden.append(name)
        document = read(value, location.file, path, location)
        plain = isinstance(document.value, str) and value[:1] not in ("'", '"', "|", ">")
        if plain and document.value != value:
            why = f"would be read as {_shown(document.value)}; put it in quotes of YAML"
            self._report(location, name, why)
            return
        self.problems += document.problems
        self.invalid |= document.invalid
        if not document.problems:
            self._set(path, document, location)

    def _set(self, path: tuple[str, ...], document: YamlDocument, location: SourceLocation) -> None:
        parent = self.values
        for end in range(1, len(path)):
            inside = parent.get(path[end - 1])
            if not isinstance(inside, dict):
                if inside is not None and ".".join(path[:end]) in SECTIONS:
                    return  # the file has no mapping here, which is reported for the file
                inside = parent[path[end - 1]] = dict[str, Any]()
                self.locations[path[:end]] = location
            parent = cast(dict[str, Any], inside)
        parent[path[-1]] = document.value
        for places in (self.locations, self.texts):
            for old in [p for p in places if p[: len(path)] == path]:
                del places[old]
        self.locations |= {path: location, **document.locations}
        self.texts |= document.texts

    def fill_from_weights(self) -> None:
        """Fill the model section with the sizes of the model whose weights it names."""
        value = self.values.get("model")
        section = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        if isinstance(section.get("hf"), str):
            self._fill_vocab(section)
        folder = section.get("weights")
        if not isinstance(folder, str) or section.get("target") is not None:
            return
        location = self._location(("model", "weights"))
        try:
            sizes = model_keys(read_config(folder), f"{folder}/{CONFIG}")
        except ConfigError as error:
            self._report(location, "model.weights", str(error))
            return
        for key, value in sizes.items():
            if key not in section:
                section[key], self.locations["model", key] = value, location
            elif section[key] != value and key not in FREE_KEYS:
                why = (
                    f"{_shown(section[key])}, but {folder}/{CONFIG} has {_shown(value)}; remove it"
                )
                self._report(self._location(("model", key)), f"model.{key}", why)

    def _fill_vocab(self, section: dict[str, Any]) -> None:
        """Fill model.vocab from the config.json of a transformers model; the data section needs
        only that.
        """
        location, folder = self._location(("model", "hf")), section["hf"]
        try:
            settings = read_config(folder)
        except ConfigError as error:
            self._report(location, "model.hf", str(error))
            return
        vocab = stored_vocabulary(settings)
        if type(vocab) is not int:
            why = f"{folder} has vocab_size={_shown(vocab)}; set it to the number of token ids"
            self._report(location, "model.hf", why)
        elif "vocab" not in section:
            section["vocab"], self.locations["model", "vocab"] = vocab, location
        elif not (type(section["vocab"]) is int and section["vocab"] >= vocab):
            why = (
                f"{_shown(section['vocab'])}, but {folder} has {_shown(vocab)}; remove it, or set "
                f"it to more, by which its embedding and output head grow"
            )
            self._report(self._location(("model", "vocab")), "model.vocab", why)

    def validate(self) -> RunConfig:
        """Return the run; values that pydantic refuses are reported and replaced by defaults."""
        while True:
            try:
                return RunConfig.model_validate(self.values)
            except ValidationError as error:
                errors = error.errors(include_url=False, include_context=False, include_input=False)
            seen: set[Keys] = set()
            for item in errors:
                loc, unknown = item["loc"], item["type"] == "extra_forbidden"
                path = loc if unknown else _key_of(loc)
                if path in seen:  # a second error for both branches of a union, or items of a list
                    continue
                seen.add(path)
                if len(self.problems) >= MAX_PROBLEMS:
                    more = Problem(self.source, None, "", f"more than {MAX_PROBLEMS} problems")
                    raise ConfigErrors(self.source, [*self.problems, more])
                inside: Any = self.values
                for key in path[:-1]:
                    inside = inside[key]
                value, name = inside.pop(path[-1]), dotted(path)  # validate the rest without it
                if unknown:
                    text, invalid_paths = unknown_key(path[:-1], str(path[-1]))
                    self.invalid |= invalid_paths
                elif any(b == name or b.startswith((f"{name}.", f"{name}[")) for b in self.invalid):
                    continue  # it, or a part of it, could not be read, which is reported already
                elif name in SECTIONS:
                    text = _unfit_section(name, value)
                else:
                    text = _unfit_value(path, value)
                self._report(self._location(loc), name, text)

    def check(self, config: RunConfig, world_size: int | None, job: bool) -> set[str]:
        """Report the rules across sections that the run breaks, and return the keys that they
        read.
        """
        read_keys = set[str]()
        for keys, text in failed_rules(config, world_size, frozenset(self.invalid), job=job):
            read_keys |= {*keys}
            path = self._culprit(keys)
            self.problems.append(Problem(*self._location(tuple(path.split("."))), path, text))
        return read_keys

    def _culprit(self, keys: Sequence[str]) -> str:
        """Return the key to report: an overridden one, else one in the file, else the first."""
        locations = {key: self.locations.get(tuple(key.split("."))) for key in keys}
        written = {key: location for key, location in locations.items() if location}
        overridden = [x for x, location in written.items() if location.file.startswith(_OVERRIDE)]
        return [*overridden, *written, keys[0]][0]


def _key_of(loc: Keys) -> Keys:
    """Return the key or section of a pydantic location.

    It leaves out branches of unions, and list indices except those of a list of sections.
    """
    ends = (loc[:end] for end in range(len(loc), 0, -1))
    return next((p for p in ends if dotted(p) in SECTIONS or _field_of(p) is not None), loc)


def _field_of(path: Keys) -> FieldInfo | None:
    """Return the schema's field at `path`, in the file or in an entry of a list of sections."""
    if dotted(path) in KEYS:
        return KEYS[dotted(path)]
    section = _section_of(path[:-1])
    return None if section is None else section.model_fields.get(str(path[-1]))


def _section_of(path: Keys) -> type[Section] | None:
    """Return the section class at `path`, which may be a member of a list."""
    is_item = bool(path) and isinstance(path[-1], int)
    return ITEMS.get(dotted(path[:-1])) if is_item else SECTIONS.get(dotted(path))


def _unfit_section(path: str, value: object) -> str:
    if path == "model.lora" and value == {}:
        return NO_LAYERS
    expected = "a mapping of keys" if path else "a mapping of sections"
    return f"wants {expected} ({', '.join(SECTIONS[path].model_fields)}), got {_shown(value)}"


def _unfit_value(path: Keys, value: object) -> str:
    field = _field_of(path)
    assert field is not None
    wants = expected_of(field)
    text = f"wants {wants.text}, got {_shown(value)}"
    items = cast(list[object], value) if isinstance(value, list) else [value]
    wrong = (item for item in items if isinstance(item, str) and item not in wants.choices)
    close = next((c for c in (nearest(name, wants.choices) for name in wrong) if c), None)
    if close:
        return f"{text}; did you mean {close}?"
    target = dotted((*path[:-1], "target"))
    if path[-1] == "name" and target in KEYS and isinstance(value, str) and ":" in value:
        return f"{text}; {target} takes an import path"
    if dotted(path) == "model.name":
        return f"{text}; {_OTHER_MODELS}"
    return text


_OTHER_MODELS = (
    "gpt with model.norm=rms, mlp=swiglu and others is a Llama (docs/models.md, "
    "configs/llama_13b_slurm.yaml); model.hf trains the model of a Hugging Face folder, and "
    "model.target your own"
)


def _shown(value: object) -> str:
    """Return a value and its kind for a message; quotes distinguish "4" from 4."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value}"
        case str():
            return f'the text "{value}"' if len(value) <= 60 else f'the text "{value[:57]}..."'
        case list():
            items = cast(list[object], value)
            return f"a list of {len(items)}" if len(str(items)) > 60 else f"the list {items}"
        case dict() if value and len(str(cast(dict[str, object], value))) <= 60:
            return f"a mapping {value}"
        case _:
            return "a mapping"


SECTIONS: dict[str, type[Section]] = {}
KEYS: dict[str, FieldInfo] = {}
"""Dotted path -> section class ("" is the whole file), and dotted path -> key."""


def _collect(section: type[Section], path: str) -> None:
    SECTIONS[path] = section
    for name, info in section.model_fields.items():
        full = f"{path}.{name}".removeprefix(".")
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            _collect(info.annotation, full)
        else:
            KEYS[full] = info


_collect(RunConfig, "")


_ELSEWHERE = {
    "batch_size": "data.global_batch",
    "learning_rate": "optim.lr",
    **dict.fromkeys(("num_epochs", "num_train_epochs", "max_epochs"), "train.epochs"),
}
"""Names of other trainers -> the key here, if the two are not similar."""
_FAR = 0.85
"""Smallest similarity to a key of another section. It is high, because among many keys something
always looks similar.
"""


def unknown_key(path: Keys, key: str) -> tuple[str, frozenset[str]]:
    """Return the message for an unknown key of the section at `path`, and the paths it may mean.

    The message names the sections that have a key of this name, else the nearest key of this
    section, else a very similar key of another section, else the valid keys.
    """
    section_class = _section_of(path)
    known_keys, section = {} if section_class is None else section_class.model_fields, dotted(path)
    if section not in SECTIONS:
        close = nearest(key, known_keys)
        hint = f"did you mean {close}?" if close else f"valid here: {', '.join(known_keys)}"
        return f"unknown key; {hint}", frozenset()
    last = {path: path.rpartition(".")[2] for path in (*SECTIONS, *KEYS) if path}
    belongs = [path for path in last if last[path] == key]
    close = nearest(key, known_keys)
    options = belongs + ([f"{section}.{close}".removeprefix(".")] if close else [])
    if (ours := _ELSEWHERE.get(key)) is not None:
        options = [ours]
    if not options and (far := nearest(key, last.values(), _FAR)):
        options = [path for path in last if last[path] == far]
    if not options:
        return f"unknown key; valid here: {', '.join(known_keys)}", frozenset()
    top = SECTIONS[""].model_fields if section else ()
    shown = [f"{path} at the top level" if path in top else path for path in options]
    kind = "misplaced key" if belongs else "unknown key"
    return f"{kind}; did you mean {' or '.join(shown)}?", frozenset(options)
