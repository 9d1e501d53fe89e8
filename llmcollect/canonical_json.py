"""JSON for columns that may hold anything: one text for one value, and no value that loses its row.

| value | becomes |
| --- | --- |
| numpy scalar or array, torch tensor | number, or nested lists |
| datetime, date, time | ISO 8601 text |
| bytes | `{"base64": "..."}` |
| set, frozenset | sorted list |
| pydantic model, dataclass | object of its fields |
| NaN, Infinity | `NaN`, `Infinity` as Python's json reads them |
| a key that is not text | its `str` |
| anything else | `{"type": "module.Class", "repr": "..."}` |
"""

import base64
import dataclasses
import datetime
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

_MAX_REPR = 1000
_MAX_DEPTH = 50


def dumps(value: Any) -> str:
    """Canonical JSON text: sorted keys, no spaces; characters that UTF-8 cannot hold are escaped."""
    try:
        text = _compact(value)
    except (TypeError, ValueError, RecursionError):
        text = _compact(_plain(value, 0))
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    return text


def _encode(value: Any) -> Any:
    match value:
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case bytes() | bytearray() | memoryview():
            return {"base64": base64.b64encode(bytes(value)).decode()}
        case set() | frozenset():
            return sorted((_plain(item, 0) for item in value), key=repr)
        case BaseModel():
            return value.model_dump()
        case Mapping():
            return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    try:
        return value.tolist()  # numpy and torch, scalars and arrays alike
    except Exception:  # noqa: BLE001 - an attribute of a foreign object may do anything
        return _described(value)


def _described(value: Any) -> dict[str, str]:
    kind = type(value)
    try:
        text = repr(value)[:_MAX_REPR]
    except Exception as error:  # noqa: BLE001
        text = f"<repr failed: {type(error).__name__}>"
    return {"type": f"{kind.__module__}.{kind.__qualname__}", "repr": text}


def _plain(value: Any, depth: int) -> Any:
    """Plain data for what json.dumps itself refuses: odd keys, mixed keys, cycles and very deep nesting."""
    if depth > _MAX_DEPTH:
        return _described(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return _plain(_encode(value), depth + 1)


_compact = json.JSONEncoder(default=_encode, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode
