"""YAML for a closed configuration: a tree that knows its lines, read by the type of each field.

A scalar keeps its text until the field's type is known. So `1e-3`, `1e6`, `1_000_000` and `.5` are numbers in
a number field, `on`, `no`, `08` and `12:30` stay text in a text field, and a key given twice is refused.
Where no type is declared (`env.kwargs`), the core schema of YAML 1.2 decides.
"""

from __future__ import annotations

import difflib
import io
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from seedrl.errors import ConfigError

_DECIMAL = re.compile(r"[-+]?[0-9][0-9_]*")
_PREFIXED = re.compile(r"[-+]?0(x[0-9a-fA-F_]+|o[0-7_]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Plain text that readers of YAML 1.1 take for a truth value or nothing; `to_text` quotes it for their sake.
_QUOTED_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*")
_KINDS: dict[type, str] = {ScalarNode: "scalar", SequenceNode: "list", MappingNode: "mapping"}


@dataclass
class Node:
    """One place of a document. `where` is its file and line, or the argument of the command line."""

    kind: str  # scalar, list or mapping
    where: str
    text: str = ""
    plain: bool = True  # a scalar without quotes
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    key_where: dict[str, str] = field(default_factory=dict)


def parse(text: str, source: str, *, numbered: bool = True) -> Node:
    """Reads one YAML document.

    Args:
        source: the name of the file, or what else to show as the place; `numbered` adds the line.
    Raises: ConfigError for what is no YAML, a key given twice, a tag, or a value that contains itself."""

    def where(line: int) -> str:
        return f"{source}:{line + 1}" if numbered else source

    try:
        root = YAML(typ="safe", pure=True).compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            what=f"this is no YAML: {error.problem or error.context}",
            where=where(mark.line) if mark is not None else source,
            do="mend the syntax near this place (indent with spaces, close brackets and quotes)",
        ) from None
    except YAMLError as error:
        problem = str(error).strip().split("\n", 1)[0]
        raise ConfigError(
            what=f"this is no YAML: {problem}", where=source, do="save it as text in UTF-8"
        ) from None
    if root is None:
        return Node("scalar", where(0))
    return _convert(root, where, ())


def _convert(node: Any, where: typing.Callable[[int], str], parents: tuple[int, ...]) -> Node:
    here = where(node.start_mark.line)
    if id(node) in parents:
        raise ConfigError(what="a value contains itself", where=here, do="remove the alias")
    tag = str(node.tag)
    if not tag.startswith("tag:yaml.org,2002:") or "python" in tag:
        raise ConfigError(what=f"tag {tag!r} is not allowed", where=here, do="remove the tag")
    parents = (*parents, id(node))
    made = Node(_KINDS[type(node)], here)
    if made.kind == "scalar":
        made.text, made.plain = str(node.value), not node.style
    elif made.kind == "list":
        made.items = [_convert(item, where, parents) for item in node.value]
    else:
        for key, value in node.value:
            line = where(key.start_mark.line)
            if not isinstance(key, ScalarNode):
                raise ConfigError(what="a key must be text", where=line, do="write `key: value`")
            name = str(key.value)
            if name in made.entries:
                raise ConfigError(
                    what=f"key {name!r} is given twice",
                    where=f"{line} {name}",
                    do=f"remove one of them; the first is at {made.key_where[name]}",
                )
            made.entries[name] = _convert(value, where, parents)
            made.key_where[name] = line
    return made


def parse_inline(text: str, source: str, annotation: Any) -> Node:
    """The value of `key=value`: inline YAML, but a text field takes the characters as they are."""
    is_text = text_only(annotation) and not text.startswith(("'", '"')) and text not in _NULLS
    return Node("scalar", source, text=text) if is_text else parse(text, source, numbered=False)


def text_only(annotation: Any) -> bool:
    """Whether a field of this type holds text (or null) and nothing else."""
    members = _members(annotation)
    return bool(members) and all(
        m is str or typing.get_origin(m) is typing.Literal for m in members
    )


def _members(annotation: Any) -> list[Any]:
    """The types that a value may have, without None and without constraints."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [m for part in typing.get_args(annotation) for m in _members(part)]
    return [] if annotation is type(None) else [annotation]


def value_of(node: Node, annotation: Any, path: str) -> Any:
    """The value that `node` means to a field of type `annotation`; `path` is for messages.

    Raises: ConfigError for a number with leading zeros, where text and number are both plausible."""
    members = _members(annotation)
    if node.kind == "mapping":
        return {key: value_of(child, Any, f"{path}.{key}") for key, child in node.entries.items()}
    if node.kind == "list":
        lists = [m for m in members if typing.get_origin(m) is list]
        item_type = typing.get_args(lists[0])[0] if lists else Any
        return [value_of(item, item_type, f"{path}[{i}]") for i, item in enumerate(node.items)]
    if not node.plain:
        return node.text
    if node.text in _NULLS:
        return None
    if text_only(annotation):
        return node.text
    return _plain_value(node, whole=members == [int], path=path)


def _plain_value(node: Node, *, whole: bool, path: str) -> Any:
    text = node.text
    if text in _BOOLS:
        return _BOOLS[text]
    if _LEADING_ZERO.fullmatch(text):
        number = text.replace("_", "").lstrip("+-0") or "0"
        raise ConfigError(
            what=f"{text} may be a number or text",
            where=f"{node.where} {path}",
            do=f'write {number} for the number, or "{text}" for the text',
        )
    digits = text.replace("_", "")
    if _DECIMAL.fullmatch(text):
        return int(digits)
    if _PREFIXED.fullmatch(text):
        return int(digits, 0)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    if _FLOAT.fullmatch(text):
        value = float(digits)
        return int(value) if whole and value.is_integer() else value
    return text


def to_text(value: Any) -> str:
    """One value as inline YAML that reads back equal, also by readers of YAML 1.1."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _QUOTED_WORDS
        return value if is_plain else _quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_text(str(k))}: {to_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_text(item) for item in value) + "]"
    raise ConfigError(
        what=f"a value of type {type(value).__name__} cannot be written to YAML",
        do="use text, numbers, true, false, null, lists and mappings",
    )


def _float_text(value: float) -> str:
    if value != value:
        return ".nan"
    if value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 wants a point in a number with an exponent: 1e-05 would be text there.
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _quoted(text: str) -> str:
    parts = []
    for char in text:
        code = ord(char)
        if char in '"\\':
            parts.append("\\" + char)
        elif 32 <= code < 127:
            parts.append(char)
        else:
            parts.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return '"' + "".join(parts) + '"'


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, whatever its case and dashes; None when nothing is near."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    by_plain = {plain(option): option for option in options}
    found = difflib.get_close_matches(plain(word), by_plain, n=1, cutoff=0.6)
    return by_plain[found[0]] if found else None
