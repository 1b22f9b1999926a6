"""The JSON in an answer: alone, in a fence, between words, or broken and mended; and what got lost on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .answer_checks import as_json, refuse_constant, schema_validator

FENCED = re.compile(r"```[\w-]*[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
MAX_DEPTH = 100  # of what is looked through for lost fields


@dataclass(frozen=True)
class Parsed:
    """`how` is "clean", "fenced" (a fence or words stand around it), "repaired" (it was broken) or "lost" (there is no
    object or list in it; `value` is None). `lost` names the fields of the schema that the answer begins and the value
    lacks, or that are required and not there."""

    value: Any
    how: str
    lost: tuple[str, ...] = ()


def parse_answer(text: str, schema: Mapping | None = None) -> Parsed:
    """The JSON value of an answer.

    Example:
        'Here you are:\\n```json\\n{"age": 7,}\\n```' gives Parsed({"age": 7}, "repaired").
    """
    how, value = _read(text.strip())
    return Parsed(value, how, tuple(dict.fromkeys(_lost(text, value, schema or {}))) if how != "lost" else ())


def _read(text: str) -> tuple[str, Any]:
    try:
        value = as_json(text)
        return ("fenced" if text.startswith("```") else "clean"), value
    except (ValueError, RecursionError):
        pass
    inside = FENCED.search(text)
    part = inside[1].strip() if inside else text
    try:
        return "fenced", as_json(part)
    except (ValueError, RecursionError):
        pass
    start = re.search(r"[{\[]", part)
    if not start:
        return "lost", None
    part = part[start.start() :]
    try:
        return "fenced", json.JSONDecoder(parse_constant=refuse_constant).raw_decode(part)[0]
    except (ValueError, RecursionError):
        return _mended(part)


def _mended(text: str) -> tuple[str, Any]:
    import json_repair

    try:
        value = json_repair.loads(text, skip_json_loads=True)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError, TypeError, IndexError):
        return "lost", None
    return ("repaired", value) if isinstance(value, dict | list) and value else ("lost", None)


def _lost(text: str, value, schema: Mapping, path: str = "", depth: int = 0) -> Iterator[str]:
    """Fields of the schema's objects that are not in the value, though required, or named in the text."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    if isinstance(value, dict):
        required = schema.get("required") or ()
        for name, inner in (schema.get("properties") or {}).items():
            if name in value:
                yield from _lost(text, value[name], inner, f"{path}{name}.", depth + 1)
            elif name in required or (not path and f'"{name}"' in text):
                yield f"{path}{name}"
    elif isinstance(value, list):
        for item in value:
            yield from _lost(text, item, schema.get("items") or {}, path, depth + 1)


def misfits(value, schema: Mapping) -> list[str]:
    """The places of a value that its schema does not allow, such as `address.zip`; empty where it fits. The values
    themselves are not told."""
    found = {
        ".".join(map(str, error.absolute_path)) or "the whole" for error in schema_validator(schema).iter_errors(value)
    }
    return sorted(found)


def canonical(value, schema: Mapping | None = None) -> str:
    """A value as JSON text, its fields in the order of the schema, so that a student sees one order only."""
    return json.dumps(_ordered(value, schema or {}), ensure_ascii=False)


def _ordered(value, schema):
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, dict):
        known = schema.get("properties") or {}
        names = [name for name in known if name in value] + [name for name in value if name not in known]
        return {name: _ordered(value[name], known.get(name)) for name in names}
    if isinstance(value, list):
        return [_ordered(item, schema.get("items")) for item in value]
    return value
