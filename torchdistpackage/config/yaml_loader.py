"""YAML text to plain values and the place of every key, and back.

A scalar means what YAML 1.2 says, read or written: `1e-4` is a float, `yes` and
`2024-01-01` are strings, `010` is ten. Reading goes over composed nodes, which know their lines.
"""

import re
from typing import Any, cast

import yaml

from torchdistpackage.bounded_yaml import MAX_DEPTH, MAX_NODES, BoundedLoader, BoundError
from torchdistpackage.config.errors import MAX_PROBLEMS, Problem, SourceLocation

Keys = tuple[str | int, ...]
"""Keys and list indices from the top of the file."""

MAX_BYTES = 1 << 18
"""Of a file, in UTF-8."""
MAX_KEY = 200
MAX_TEXT = 1 << 16
"""Characters of a text; of a key MAX_KEY, of a number MAX_NUMBER."""
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
"""Plain scalars that are no text, by kind: what they look like, and their first characters."""

_RESOLVERS: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
"""The table in the shape PyYAML wants: first character -> (tag, pattern) in order."""
for _kind, (_pattern, _first) in _SCALARS.items():
    for _character in _first:
        _RESOLVERS.setdefault(_character, []).append((_TAG + _kind, re.compile(_pattern)))


class _DocumentLoader(BoundedLoader):
    yaml_implicit_resolvers = _RESOLVERS


class _Dumper(yaml.SafeDumper):
    # The same table: the dumper quotes a text that the loader would take for something else.
    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _flow_list(dumper: _Dumper, data: Any) -> yaml.Node:
    return dumper.represent_sequence(_TAG + "seq", data, flow_style=True)


def _text(dumper: _Dumper, data: str) -> yaml.Node:
    # In plain and single-quoted texts YAML folds more line breaks than it writes, e.g. U+0085.
    return yaml.ScalarNode(_TAG + "str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _flow_list)
_Dumper.add_representer(tuple, _flow_list)


def write(value: dict[str, Any]) -> str:
    """YAML of plain values: one key a line, lists in one line, keys in the given order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def dotted(path: Keys) -> str:
    """("optim", "betas", 0) is optim.betas[0]."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def keys_of(path: str) -> Keys:
    """The other way: optim.betas[0] is ("optim", "betas", 0)."""
    parts = (re.fullmatch(r"(.*?)(?:\[(\d+)\])?", part) for part in path.split("."))
    pairs = [(found[1], found[2]) for found in parts if found]
    return tuple(x for key, index in pairs for x in ([key] if index is None else [key, int(index)]))


def read(
    text: str, file: str, root: Keys = (), given: SourceLocation | None = None
) -> "YamlDocument":
    """Read one YAML document; never raises, what is wrong is in `problems`.

    Args:
        root: path of the value, when it is an override.
        given: place of an override; its own lines mean nothing.
    """
    document = YamlDocument(file, given)
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_BYTES:
        document.report(1, root, f"has {size:,} bytes; {MAX_BYTES:,} are allowed")
        return document
    try:
        node = _DocumentLoader(text).get_single_node()
        document.value = None if node is None else document.convert(node, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = ", ".join(part for part in (error.problem, error.context) if part)
        what = "usable" if isinstance(error, BoundError) else "valid"
        document.report(None if mark is None else mark.line + 1, root, f"not {what} YAML: {why}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"character {error.character:#x} is not allowed"
        document.report(line, root, f"not valid YAML: {why}")
    except (ValueError, OverflowError) as error:  # an escape such as "\U00110000"
        document.report(1, root, f"not valid YAML: {error}")
    return document


class YamlDocument:
    """What a text says: its value, where each key stands, and what is wrong with it.

    invalid: dotted paths whose values cannot be trusted, e.g. keys given twice. texts: how plain
    scalars that YAML takes for numbers or truths are written.
    """

    def __init__(self, file: str, given: SourceLocation | None) -> None:
        self.file, self.given = file, given
        self.value: Any = None
        self.locations: dict[Keys, SourceLocation] = {}
        self.texts: dict[Keys, str] = {}
        self.problems: list[Problem] = []
        self.invalid: set[str] = set()
        self._open: list[int] = []  # ids of the nodes around this one: an alias may close a circle
        self._nodes = 0
        self._at: object = None  # of the key at the top: nodes of aliases stand elsewhere

    def location(self, line: int | None) -> SourceLocation:
        return self.given or SourceLocation(self.file, line)

    def report(self, line: int | None, path: Keys, text: str) -> None:
        self.problems.append(Problem(*self.location(line), dotted(path), text))
        self.invalid.add(dotted(path))

    def _go_on(self, node: yaml.Node) -> None:
        if len(self.problems) >= MAX_PROBLEMS:
            why = f"more than {MAX_PROBLEMS} problems; mend those before"
            raise BoundError(why, node.start_mark)

    def convert(self, node: yaml.Node, path: Keys) -> Any:
        line = node.start_mark.line + 1
        if id(node) in self._open:
            self.report(line, path, f"the alias stands for a value that holds itself (line {line})")
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
            here = (*path, index)
            self.locations[here] = self.location(item.start_mark.line + 1)
            items.append(self.convert(item, here))
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
            here = (*path, key)
            if key in out:
                self.report(line, here, f"duplicate key, first given on line {lines[key]}")
                self._look_into(value_node, here, out[key])
                continue
            lines[key], self.locations[here] = line, self.location(line)
            out[key] = self.convert(value_node, here)
        return out

    def _look_into(self, node: yaml.Node, path: Keys, first: Any) -> None:
        """Add what a section given twice says the second time, so that it is checked as well."""
        before = dict(self.locations)
        second = self.convert(node, path)
        self.locations |= before
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
                    # Python writes inf and nan without the dot of YAML.
                    return float(re.sub(r"\.(?=[iInN])", "", text))
                case _:
                    why = f"the tag {node.tag} is not allowed; write a plain value"
        except (ValueError, KeyError):
            why = f"{text[:40]!r} is no {kind}"
        self.report(node.start_mark.line + 1, path, why)
        return None


def _unfit_text(text: str, most: int) -> str | None:
    """Why no file or process takes a text; what else a key may hold its kind says."""
    if len(text) > most:
        return f"has {len(text):,} characters; {most:,} are allowed"
    if bad := re.search("[\ud800-\udfff]", text):
        return f"has the character {ord(bad[0]):#x}, which is half of one"
    return None
