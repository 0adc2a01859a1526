"""What a field admits, in words: `a whole number from 1 to 1024, or null`; made from its annotation, for help and errors."""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

import annotated_types
from pydantic.fields import FieldInfo

DEVICE_PATTERN = r"^(cpu|cuda(:\d{1,2})?)$"


def members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is Annotated:
        return members(typing.get_args(annotation)[0])
    parts = (
        typing.get_args(annotation) if type(None) in typing.get_args(annotation) else (annotation,)
    )
    return list(parts)


def is_mapping(annotation: Any) -> bool:
    return any(typing.get_origin(member) is dict for member in members(annotation))


def choices(annotation: Any) -> list[str]:
    return [
        choice
        for member in members(annotation)
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    ]


def item_type(annotation: Any) -> Any:
    """The type of a list's items."""
    return next(
        (
            typing.get_args(member)[0]
            for member in members(annotation)
            if typing.get_origin(member) is list
        ),
        Any,
    )


_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
_NOUNS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def takes(annotation: Any, field: FieldInfo | None = None) -> str:
    """What a field admits, in words: `a whole number from 1 to 1024, or null`."""
    admitted = members(annotation)
    words = []
    for member in admitted:
        if member in (type(None), Any):
            continue
        origin = typing.get_origin(member)
        if origin is Literal:
            known = [str(choice) for choice in typing.get_args(member)]
            words.append(known[0] if len(known) == 1 else f"one of {', '.join(known)}")
        elif origin is list:
            words.append(f"a list of {_PLURALS[members(typing.get_args(member)[0])[0]]}")
        elif origin is dict:
            words.append("a mapping with text as keys")
        else:
            words.append(_NOUNS[member])
    text = " or ".join(words) or "plain"
    if field is None and typing.get_origin(annotation) is Annotated:
        field = next(
            (extra for extra in typing.get_args(annotation) if isinstance(extra, FieldInfo)), None
        )
    if field is not None:
        text += _range(field.metadata)
    return text + (", or null" if type(None) in admitted else "")


def _range(metadata: list[Any]) -> str:
    words = []
    for limit in metadata:
        if isinstance(limit, annotated_types.Ge):
            words.append(f"of at least {_short(limit.ge)}")
        elif isinstance(limit, annotated_types.Gt):
            words.append(f"more than {_short(limit.gt)}")
        elif isinstance(limit, annotated_types.Le):
            words.append(f"at most {_short(limit.le)}")
        elif isinstance(limit, annotated_types.Lt):
            words.append(f"less than {_short(limit.lt)}")
        elif isinstance(limit, annotated_types.MinLen):
            words.append("that is not empty")
        elif isinstance(limit, annotated_types.MaxLen):
            words.append(f"at most {limit.max_length} long")
        elif getattr(limit, "pattern", None) == DEVICE_PATTERN:
            words.append("that names a device (cpu, cuda or cuda:N)")
    if len(words) == 2 and words[0].startswith("of at least ") and words[1].startswith("at most "):
        return f" from {words[0][12:]} to {words[1][8:]}"
    return " " + " and ".join(words) if words else ""


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
