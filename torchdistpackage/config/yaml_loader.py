"""Read YAML text into plain values and the place of every key, and write values as YAML.

Scalars follow YAML 1.2: `1e-4` is a float, `yes` and `2024-01-01` are strings, `010` is ten.
Reading converts composed nodes, because these know their lines.
"""

import re
from typing import Any, cast

import yaml

from torchdistpackage.bounded_yaml import MAX_DEPTH, MAX_NODES, BoundedLoader, BoundError
from torchdistpackage.config.errors import MAX_PROBLEMS, Problem, SourceLocation

Keys = tuple[str | int, ...]
"""Path of keys and list indices from the top of the file."""

MAX_BYTES = 1 << 18
"""Largest size of a file in UTF-8 bytes."""
MAX_KEY = 200
MAX_TEXT = 1 << 16
"""Longest text in characters; MAX_KEY is for keys, MAX_NUMBER for numbers."""
MAX_NUMBER = 100

_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    "null": (r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    "bool": (r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    "int": (
        r"(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)\Z",
        list("-+0123456789"),
    ),
    "float": (
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z",
        list("-+.0123456789"),
    ),
    "merge": (r"<<\Z", ["<"]),
}
"""Plain scalars other than text, by kind: their pattern and possible first characters."""

_RESOLVERS: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
"""The same table in PyYAML's form: first character -> (tag, pattern) in order."""
for _kind, (_pattern, _first) in _SCALARS.items():
    for _character in _first:
        _RESOLVERS.setdefault(_character, []).append((_TAG + _kind, re.compile(_pattern)))


class _DocumentLoader(BoundedLoader):
    yaml_implicit_resolvers = _RESOLVERS


class _Dumper(yaml.SafeDumper):
    # The loader's table, so that the dumper quotes a text that would be read as something else.
    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _flow_list(dumper: _Dumper, data: Any) -> yaml.Node:
    return dumper.represent_sequence(_TAG + "seq", data, flow_style=True)


def _text(dumper: _Dumper, data: str) -> yaml.Node:
    # Double quotes: in other texts YAML folds line breaks that it does not write, such as U+0085.
    return yaml.ScalarNode(_TAG + "str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _flow_list)
_Dumper.add_representer(tuple, _flow_list)


def write(value: dict[str, Any]) -> str:
    """Return YAML of plain values: one key per line, lists on one line, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def dotted(path: Keys) -> str:
    """Return keys as a dotted path: optim.betas[0] for ("optim", "betas", 0)."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def keys_of(path: str) -> Keys:
    """Return the keys of a dotted path: ("optim", "betas", 0) for optim.betas[0]."""
    matches = (re.fullmatch(r"(.*?)(?:\[(\d+)\])?", part) for part in path.split("."))
    pairs = [(match[1], match[2]) for match in matches if match]
    return tuple(x for key, index in pairs for x in ([key] if index is None else [key, int(index)]))


def read(
    text: str, file: str, root: Keys = (), override_at: SourceLocation | None = None
) -> "YamlDocument":
    """Read one YAML document; errors are added to `problems` instead of raised.

    Args:
        text: the YAML text.
        file: name of its file, for problems.
        root: path of the value, if it is an override.
        override_at: place of the override; line numbers within its text mean nothing to a user.
    """
    document = YamlDocument(file, override_at)
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_BYTES:
        why = f"has {size:,} bytes, more than the {MAX_BYTES:,} allowed; write less"
        document.report(1, root, why)
        return document
    try:
        node = _DocumentLoader(text).get_single_node()
        document.value = None if node is None else document.convert(node, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = ", ".join(part for part in (error.problem, error.context) if part)
        adjective = "usable" if isinstance(error, BoundError) else "valid"
        text = f"not {adjective} YAML: {why}"
        document.report(None if mark is None else mark.line + 1, root, text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"character {error.character:#x} is not allowed"
        document.report(line, root, f"not valid YAML: {why}")
    except (ValueError, OverflowError) as error:  # an escape such as "\U00110000"
        document.report(1, root, f"not valid YAML: {error}")
    return document


class YamlDocument:
    """The content of a YAML text: its value, the place of each key, and its problems.

    invalid: dotted paths whose values cannot be trusted, such as keys given twice. texts: the
        characters of plain scalars that YAML reads as numbers or bools.
    """

    def __init__(self, file: str, location: SourceLocation | None) -> None:
        self.file, self.given = file, location
        self.value: Any = None
        self.locations: dict[Keys, SourceLocation] = {}
        self.texts: dict[Keys, str] = {}
        self.problems: list[Problem] = []
        self.invalid: set[str] = set()
        self._open: list[int] = []  # ids of the enclosing nodes, to find an alias to one of them
        self._nodes = 0
        self._at: object = None  # place of the top key, because nodes of aliases have others

    def location(self, line: int | None) -> SourceLocation:
        return self.given or SourceLocation(self.file, line)

    def report(self, line: int | None, path: Keys, text: str) -> None:
        self.problems.append(Problem(*self.location(line), dotted(path), text))
        self.invalid.add(dotted(path))

    def _go_on(self, node: yaml.Node) -> None:
        if len(self.problems) >= MAX_PROBLEMS:
            why = f"more than {MAX_PROBLEMS} problems; fix the ones above first"
            raise BoundError(why, node.start_mark)

    def convert(self, node: yaml.Node, path: Keys) -> Any:
        line = node.start_mark.line + 1
        if id(node) in self._open:
            self.report(line, path, f"the alias refers to a value that contains it (line {line})")
            return None
        self._nodes += 1
        self._go_on(node)
        if self._nodes > MAX_NODES:
            why = f"its aliases stand for more than {MAX_NODES:,} values; write fewer"
            raise BoundError(why, self._at)
        if len(self._open) >= MAX_DEPTH:
            why = f"its aliases nest values too deeply, more than {MAX_DEPTH} levels"
            raise BoundError(why, self._at)
        self._open.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return self._list(node, path)
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
            self.report(line, path, f"the tag {node.tag} is not allowed; write a plain value")
            return None
        finally:
            self._open.pop()

    def _list(self, node: yaml.SequenceNode, path: Keys) -> list[Any]:
        items: list[Any] = []
        for index, item in enumerate(node.value):
            item_path = (*path, index)
            self.locations[item_path] = self.location(item.start_mark.line + 1)
            items.append(self.convert(item, item_path))
        return items

    def _mapping(self, node: yaml.MappingNode, path: Keys) -> dict[str, Any]:
        out: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            self._nodes += 1
            if len(self._open) == 1:
                self._at = key_node.start_mark
            self._go_on(key_node)
            if key_node.tag == _TAG + "merge":
                why = "merge keys are not read; write the keys out"
                self.report(line, (*path, "<<"), why)
                continue
            if key_node.tag != _TAG + "str":
                shown = key_node.value[:40] if isinstance(key_node, yaml.ScalarNode) else "?"
                self.report(line, (*path, shown), "a key must be a text; put it in quotes")
                continue
            key: str = key_node.value
            if why := _unfit_text(key, MAX_KEY):
                self.report(line, (*path, f"{key[:20]}..."), f"a key {why}")
                continue
            key_path = (*path, key)
            if key in out:
                self.report(line, key_path, f"duplicate key, first given on line {lines[key]}")
                self._look_into(value_node, key_path, out[key])
                continue
            lines[key], self.locations[key_path] = line, self.location(line)
            out[key] = self.convert(value_node, key_path)
        return out

    def _look_into(self, node: yaml.Node, path: Keys, first: Any) -> None:
        """Add the keys of a repeated section, so that they are checked too."""
        first_locations = dict(self.locations)
        second = self.convert(node, path)
        self.locations |= first_locations
        if isinstance(first, dict) and isinstance(second, dict):
            merged = cast(dict[str, Any], first)
            merged |= {**cast(dict[str, Any], second), **merged}

    def _scalar(self, node: yaml.ScalarNode, path: Keys) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        if why := _unfit_text(text, MAX_TEXT if kind == "str" else MAX_NUMBER):
            self.report(node.start_mark.line + 1, path, f"the value {why}")
            return None
        if kind in ("bool", "int", "float") and node.style is None:
            self.texts[path] = text
        try:
            match kind:
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text, 0 if text[:2] in ("0x", "0o") else 10)
                case "float":
                    # Python reads inf and nan without the dot of YAML.
                    return float(re.sub(r"\.(?=[iInN])", "", text))
                case _:
                    why = f"the tag {node.tag} is not allowed; write a plain value"
        except (ValueError, KeyError):
            why = f"{text[:40]!r} is not a valid {kind}"
        self.report(node.start_mark.line + 1, path, why)
        return None


def _unfit_text(text: str, most: int) -> str | None:
    """Return why a text is too long or cannot be encoded, or None."""
    if len(text) > most:
        return f"has {len(text):,} characters, more than the {most:,} allowed"
    if bad := re.search("[\ud800-\udfff]", text):
        return f"has the character {ord(bad[0]):#x}, which is half of a surrogate pair; remove it"
    return None
