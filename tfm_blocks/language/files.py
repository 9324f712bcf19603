"""Read model files as plain YAML within size limits, and refuse malicious files before anything else parses them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

from tfm_blocks.errors import ConfigError, Place, Problem, cut, display_path, shown, suggest

HEADER = "# @package _global_"
# libyaml's loader is eight times as fast, but recurses without a limit: check `nested_events` before building objects
SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LARGEST = 64 * 1024
DEEPEST = 32
LONGEST_INTEGER = 100
INDEX = re.compile(r"0|-?[1-9][0-9]*")  # of a layer; OmegaConf does not merge 0x0 and "0" into 0
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")
YAML_1_1 = re.compile(  # plain scalars that YAML 1.2 reads as another value, or that only YAML 1.2 reads as a number
    r"(?P<word>yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)"
    r"|[-+]?(0b[01_]+|0o[0-7]+|0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)"
    r"|[-+]0x[0-9a-fA-F_]+|0x[0-9a-fA-F]*_[0-9a-fA-F_]*|[-+]?\.?[0-9][0-9_.]*_[0-9_.]*([eE][-+]?[0-9_]+)?"
)
_KNOB = re.compile(r"\$\{[A-Za-z_]\w*\}")
_SCALARS = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null"))
_DIRECTIVE = re.compile(r"\s*#\s*@")
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|#.*")
_UNQUOTED = re.compile(r"\$\{[^{}]*\}?")  # needs quotes within braces or brackets


@dataclass(frozen=True)
class YamlFile:
    """A parsed YAML file: its display path, its text, the root of its nodes, and its value, which nobody changes.

    `parents` are the models that a model file inherits, in order.
    """

    shown: str
    text: str
    root: yaml.Node | None = None
    value: Any = None
    parents: tuple[str, ...] = ()

    @cached_property
    def entries(self) -> list[tuple[tuple[str, ...], Place, str]]:
        """Return the path and the location of each key, and its value if that is a scalar, as written."""
        return list(self._walk(self.root, (), self.text.splitlines()))

    def _walk(
        self, node: yaml.Node | None, around: tuple[str, ...], lines: list[str]
    ) -> Iterator[tuple[tuple[str, ...], Place, str]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            path, mark = (*around, str(key.value)), key.start_mark
            place = Place(self.shown, mark.line + 1, mark.column + 1, lines[mark.line].strip())
            yield path, place, value.value if isinstance(value, yaml.ScalarNode) else ""
            yield from self._walk(value, path, lines)


_read: dict[tuple[Path, str, bool], tuple[tuple[int, ...], YamlFile]] = {}  # files as they were when they were read


def read_yaml_file(path: Path, *, plain: bool = False) -> YamlFile:
    """Read and parse a YAML file, once as long as it does not change. Raises ConfigError and OSError.

    `plain` is set for model files: at most 64 KB of plain values under unique names, without aliases and tags.
    """
    path = path.resolve()
    stat = path.stat()
    state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    key = (path, file := display_path(path), plain)
    known = _read.get(key)
    if known is None or known[0] != state:
        known = _read[key] = (state, _parse(path, file, plain))
    return known[1]


def _parse(path: Path, file: str, plain: bool) -> YamlFile:
    address, text = file if plain else path.stem, ""
    with path.open("rb") as stream:
        raw = stream.read(LARGEST + 1 if plain else -1)
    if plain and len(raw) > LARGEST:
        help = "inherit from another model and write only the differences"
        raise _refuse(file, f"a model file has at most {LARGEST // 1024} KB", help=help)
    try:
        text = raw.decode("utf-8")
        document = _Document(_checked_events(text, address, file, plain))
        root = document.get_single_node()
        if plain:
            _expect_plain(root, file)
        return YamlFile(file, text, root, document.construct_document(root) if root else None)
    except UnicodeDecodeError as error:
        line, rule, help = raw[: error.start].count(b"\n") + 1, "is not UTF-8 text", "save it as UTF-8"
    except yaml.MarkedYAMLError as error:
        line = getattr(error.problem_mark, "line", 0) + 1
        rows = text.splitlines()[line - 1 : line]
        knob = _UNQUOTED.search(_QUOTED.sub("", rows[0])) if rows else None
        rule = f"is not YAML: {error.problem}"
        help = f'quote it: "{cut(knob[0])}"' if knob else "check brackets, quotes and indentation"
        if any("\t" in row[: len(row) - len(row.lstrip())] for row in rows):
            help = "indent with spaces: YAML does not allow tabs"
    except yaml.YAMLError as error:
        line, rule = None, f"is not YAML: {str(error).splitlines()[0]}"
        help = "save it as plain text, without control characters"
    except ValueError as error:  # an integer with too many digits
        line, rule = None, f"has a value that cannot be read: {error}"
        help = "write a smaller value, or put it in quotes"
    raise _refuse(file, rule, line, help, address) from None


class _Document(Composer, SafeConstructor, Resolver):
    """Build the nodes and the value of a document from the parser's events, as OmegaConf does: dates are text."""

    def __init__(self, events: Iterable[yaml.Event]) -> None:
        self.events = deque(events)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def check_event(self, *choices: type[yaml.Event]) -> bool:
        return bool(self.events) and isinstance(self.events[0], choices)

    def peek_event(self) -> yaml.Event:
        return self.events[0]

    def get_event(self) -> yaml.Event:
        return self.events.popleft()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is written twice; YAML would silently keep the last value."""
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ConstructorError(
                    problem=f"the key {shown(key.value)} is written twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Document.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+0123456789.")
)
_Document.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)  # type: ignore[type-var]


def read_model_file(path: Path, root_keys: Collection[str]) -> YamlFile:
    """Read a file as plain YAML, whose value is a mapping without `root_keys`. Raises ConfigError for another file."""
    file = read_yaml_file(path, plain=True)
    for number, line in enumerate(file.text.splitlines(), 1):
        if _DIRECTIVE.match(line) and line.rstrip() != HEADER:
            help = f"the only allowed directive is {HEADER}"
            raise _refuse(file.shown, f"has the directive {shown(line.strip())}", number, help)
    expect_header(file, file.shown)
    if not isinstance(file.value, dict):
        raise _refuse(file.shown, "must be a mapping of knobs and the key model", help="write heads: 8, model: {…}")
    _expect_knobs(file, root_keys)
    return replace(file, parents=_parents(file.value.get("defaults", []), file.shown))


def expect_header(file: YamlFile, address: str, effect: str = "") -> None:
    """Raise ConfigError unless the first line is HEADER. Hydra does not read it below a comment or after a mark."""
    if file.text.startswith("\ufeff"):
        rule, help = "begins with a byte order mark, which hides its first line", "save it as UTF-8 without a mark"
        raise _refuse(file.shown, rule, 1, help, address)
    if [line.rstrip() for line in file.text.lstrip().splitlines()[:1]] != [HEADER]:
        rule, help = f"lacks the required first line{effect}", f"begin the file with {HEADER}"
        raise _refuse(file.shown, rule, help=help, address=address)


def expect_unambiguous(event: yaml.Event, address: str, file: str) -> None:
    """Raise ConfigError if the event is a plain scalar whose value depends on the version of YAML."""
    if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and (match := YAML_1_1.fullmatch(event.value)):
        rule = f"has {shown(event.value)}, which YAML 1.1 and YAML 1.2 read as different values"
        fix = "true or false" if match["word"] else "the number in decimal digits, without leading zeros, : or _"
        line = event.start_mark.line + 1 if event.start_mark else None
        raise ConfigError(Problem(address, rule, Place(file, line), help=f"write {fix}; put text in quotes"))


def nested_events(text: str) -> Iterator[tuple[Any, int]]:
    """Yield the events of the YAML parser, which build no objects, each with its depth of nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        yield event, depth


def _checked_events(text: str, address: str, file: str, plain: bool) -> Iterator[yaml.Event]:
    """Yield the parser's events after checking them, so that alias bombs and deep nesting cost nothing."""
    for event, depth in nested_events(text):
        line = event.start_mark.line + 1 if event.start_mark else None
        if plain and (isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None)):
            raise _refuse(file, "uses a YAML alias or anchor", line, "write the value out, or make it a knob: ${knob}")
        if plain and (tag := getattr(event, "tag", None)):
            raise _refuse(file, f"uses the YAML tag {tag}", line, "model files hold plain values only")
        if plain and isinstance(event, yaml.ScalarEvent) and "${" in _KNOB.sub("", event.value, count=1):
            rule = f"has {shown(event.value)}, which is more than one ${{knob}}: a resolver or an expression"
            raise _refuse(file, rule, line, "a value holds one ${knob} at most; put arithmetic in model.args")
        expect_unambiguous(event, address, file)
        if depth > DEEPEST:
            fix = "write inner layers as sibling nodes" if plain else "check the brackets, or write fewer levels"
            raise _refuse(file, f"nests deeper than {DEEPEST}", line, fix, address)
        yield event


def _expect_plain(node: yaml.Node | None, file: str) -> None:
    """Check that values are plain, and that keys are unique strings: YAML would silently keep the last duplicate."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _expect_plain(item, file)
    if isinstance(node, yaml.ScalarNode):
        _plain_scalar(node, file)
    seen: set[str] = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise _refuse(file, "has a list or a mapping as a key", line, "a key is a name")
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:int"):
            rule = f"has a key that YAML does not read as a name: {shown(key.value)}"
            merges = "write the keys out, or inherit a model with defaults"
            raise _refuse(file, rule, line, merges if key.value == "<<" else "put it in quotes")
        _plain_scalar(key, file)
        if key.tag.endswith(":int") != bool(INDEX.fullmatch(key.value)):
            rule = f"has the key {shown(key.value)}, but the index of a layer is a decimal number without quotes"
            raise _refuse(file, rule, line, "write 0 for the first layer, -1 for the last")
        if key.value in seen:
            raise _refuse(file, f"has the key {shown(key.value)} twice", line, "remove one of them")
        seen.add(key.value)
        _expect_plain(value, file)


def _plain_scalar(node: yaml.ScalarNode, file: str) -> None:
    line = node.start_mark.line + 1
    kind = node.tag.rpartition(":")[2]
    if node.tag not in _SCALARS:
        raise _refuse(file, f"has the {kind} {shown(node.value)}", line, "put text that looks like one in quotes")
    if kind == "int" and len(node.value) > LONGEST_INTEGER:
        rule = f"has an integer of {len(node.value)} characters: {cut(node.value)}"
        raise _refuse(file, rule, line, f"write one of at most {LONGEST_INTEGER}")


def _expect_knobs(file: YamlFile, root_keys: Collection[str]) -> None:
    """Raise ConfigError for a root key that is neither `defaults`, `model` nor a knob."""
    lines = {path: place.line for path, place, _ in file.entries}
    for key, value in file.value.items():
        line = lines.get((str(key),))
        if key in ("defaults", "model"):
            continue
        if isinstance(value, (dict, list)):
            rule = f"has the root key {shown(key)}, which is neither defaults, model nor a single value"
            raise _refuse(file.shown, rule, line, suggest(str(key), ["defaults", "model"]))
        if key in root_keys or not str(key).isidentifier() or str(key).startswith("_"):
            help = "give the knob another name"
            raise _refuse(file.shown, f"cannot set {shown(key)}: a model file sets only its own knobs", line, help)


def _parents(names: Any, file: str) -> tuple[str, ...]:
    if not isinstance(names, list):
        rule = f"defaults must be a list of models, but is {shown(names)}"
        raise _refuse(file, rule, help="defaults: [base, _self_]")
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            rule = f"defaults lists names of models, but has {shown(name)}"
            raise _refuse(file, rule, help="defaults: [base, _self_]")
    if names.count("_self_") > 1:
        raise _refuse(file, "has _self_ twice in its defaults", help="write it once, as the last entry")
    if "_self_" in names and names[-1] != "_self_":
        raise _refuse(file, "has _self_ before a parent: a model must come after its parents", help="put _self_ last")
    return tuple(name for name in names if name != "_self_")


def _refuse(file: str, rule: str, line: int | None = None, help: str = "", address: str = "") -> ConfigError:
    return ConfigError(Problem(address or file, rule, Place(file, line), help=help))
